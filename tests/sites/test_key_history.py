"""The last tuning of a signature, told from the numbers of calls alone."""

from __future__ import annotations

import pytest

from dist_tune.sites.key_history import KeyHistory

pytestmark = pytest.mark.once


def last(calls: list[tuple[int, str]]) -> list[bool]:
    """For each tuning, by call and signature, the answer before it."""
    history, answers = KeyHistory(), []
    for call, signature in calls:
        answers.append(history.is_last(call, signature))
        history.add(call, signature, f"[{call}]")
    return answers


@pytest.mark.parametrize(
    ("calls", "answers"),
    [
        ([(1, "a"), (2, "a"), (3, "a")], [False, False, True]),
        ([(1, "a"), (2, "b"), (3, "a"), (4, "b"), (5, "a")], [False, False, False, False, True]),
        ([(1, "a"), (2, "a"), (4, "a"), (5, "a"), (6, "a")], [False, False, False, False, True]),
        ([(1, "a"), (2, "b"), (3, "c"), (4, "d")], [False] * 4),
    ],
)
def test_the_third_tuning_in_a_row_of_one_signature_is_its_last(calls: list[tuple[int, str]], answers: list[bool]):
    """Other signatures may lie between, calls that found their config may not."""
    assert last(calls) == answers


def test_new_keys_of_a_closed_signature_use_its_config():
    """Of that group and signature; of all signatures of the group where ranks have agreed."""
    history = KeyHistory()
    assert (history.is_closed, history.final_config("g", "s")) == (False, None)
    for call in (1, 2, 3):
        history.add(call, "s", f"[{call}]")
    history.close("g", "s", "config", closes_all=False)
    assert (history.is_closed, history.final_keys) == (True, ["[1]", "[2]", "[3]"])
    assert [history.final_config(*each) for each in (("g", "s"), ("g", "t"), ("h", "s"))] == ["config", None, None]
    history.close("h", "s", "other", closes_all=True)
    assert [history.final_config(*each) for each in (("g", "t"), ("h", "t"), ("g", "s"))] == [None, "other", "config"]
