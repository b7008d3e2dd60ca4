"""The last tuning of a signature, told from the numbers of calls alone."""

from __future__ import annotations

import pytest

from dist_tune.tuning.key_history import KeyHistory

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
