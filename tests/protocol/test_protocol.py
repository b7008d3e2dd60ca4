"""Ranks that come, are late, raise, die, pass or call again, in any order: each run ends, and ranks
that end a call say the same.

The tables of docs/how-it-works.md, walked at random.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_tune.errors import DistTuneError
from dist_tune.ranks.messages import Reduction
from tests.protocol.in_memory import ERRORS, GLOO, Rank, Script, World, joined, met, until

MET = met()
ACTIONS = ("come", "come", "late", "raise", "pass", "die")
SCRIPTS = st.lists(
    st.lists(st.tuples(st.just("f"), st.sampled_from(ACTIONS)), min_size=1, max_size=3),
    min_size=2,
    max_size=4,
)


@settings(max_examples=30, deadline=None)
@given(scripts=SCRIPTS)
@pytest.mark.processes  # it lasts seconds
def test_each_run_ends_and_ranks_that_end_a_call_say_the_same(scripts: list[Script]):
    """One value, or errors of one kind; the rank that raised has its own."""
    world, by_call = World(len(scripts)), dict[tuple[str, int], set[str]]()
    world.run(*scripts)
    for rank in world.ranks:
        for closure, number, told in rank.told:
            by_call.setdefault((closure, number), set()).add(told)
    for call, said in by_call.items():
        assert len(said - {"ValueError"}) <= 1, (call, said, scripts)


ABORTED, ABSENT = (
    "rank 1 raised ValueError: boom while f was being tuned",
    r"rank 1 last seen at: .*ranks \[1\] did not come",
)
TABLE = [
    # what each rank does -> what is told those that are told anything, and in which words
    ("come, come, late", "", ""),
    ("come, raise, late", "PeerFailedError", ABORTED),
    ("come, shared, late", "NoValidConfigError", "no config"),
    ("late raise, raise, late", "PeerFailedError", ABORTED),  # the first one counts
    ("come, pass, late", "AloneError", r"rank . is alone in f, call 1: ranks \[1\] have passed it"),
    ("come, die, late", "AloneError", r"rank 1 has not come to it: .*its process has ended"),
    (
        "come, stop, late",
        "AbsentRanksError",
        rf"{ABSENT} to the exchange 'done' of f, call 1 within ",
    ),
    (
        "come, stray, late",
        "RankMismatchError",
        r"rank 0 is in f, step 'manifest', rank 1 is in f, step 'other'",
    ),
    (
        "broken, late raise, broken",
        "PeerFailedError",
        ABORTED,
    ),  # what a failed collective is a consequence of
    (
        "broken, pass slowly, broken",
        "AbsentRanksError",
        rf"{ABSENT} after a failed collective of f, call 1 within",
    ),
    ("broken, broken, late broken", "PeerFailedError", "rank 0 waited in vain.*rank 2 waited"),
]


@pytest.mark.parametrize(("actions", "told", "words"), TABLE)
@pytest.mark.processes  # it lasts seconds
def test_what_ranks_are_told_and_that_they_meet_again(actions: str, told: str, words: str):
    """The one that raised has its own error; a collective's is chained to its cause."""
    world, each = (
        World(3, **({"deadline_s": 1.0} if told == "AbsentRanksError" else {})),
        actions.split(", "),
    )
    again = [] if "die" in each else [("again", "come")]
    found = world.run(*([("f", action), *again] for action in each))
    for rank, action, said in zip(world.ranks, each, found, strict=True):
        assert not again or said.pop() == met(3)
        if action in ("pass", "pass slowly", "die"):
            assert said == []
        elif own := {
            "late raise": "ValueError",
            "raise": "ValueError",
            "shared": "NoValidConfigError",
        }.get(action):
            assert said == [own]
        elif told:
            (error,) = rank.errors
            assert said == [told]
            assert re.search(words, str(error)), error
            assert error.__cause__ is (GLOO if "broken" in action else None)
            assert words != ABORTED or (error.rank, error.error) == (1, "ValueError: boom")  # type: ignore[attr-defined]


def test_a_peers_next_call_is_no_other_call_that_it_waits_in():
    """Between a look for the verdict and one at its peer, this rank is held up; the peer raises
    meanwhile, and waits in the next call.
    """
    world, n_looks, looks_again = World(), [0], threading.Event()
    one, other = world.ranks

    def look(name: str, *args: Any) -> None:
        n_looks[0] += (name, args[:1]) == ("check", (["f/n1/0/part/0", "f/n1/0/part/1"],))
        if n_looks[0] == 2:
            looks_again.set()
            until(lambda: b"again" in world.store.get("card/1"))

    def answer(name: str, *args: Any) -> None:
        if (name, args) == ("delete_key", ("ask/1/0",)):  # the first question
            until(lambda: world.store.check(["again/n1/0/part/1"]))

    def end(name: str, *args: Any) -> None:
        answer(name, *args)
        if name == "compare_set" and args[0].startswith("f/"):  # after that look for the verdict
            until(looks_again.is_set)

    one.client.before, other.client.before = look, end
    assert world.run(*([("f", action), ("again", "come")] for action in ("broken", "raise"))) == [
        ["PeerFailedError", MET],
        ["ValueError", MET],
    ]


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_last_to_come_reduces_for_all(is_broken: bool):
    """Once a meeting, and the others read what came of it.

    An error there is its own, and the others learn whose it was.
    """
    reduced, told, world = [], list[str](), World()

    @Reduction
    def reduce(parts: Mapping[int, str]) -> str:
        if is_broken:
            raise ValueError("cannot reduce")
        reduced.append(parts)
        return "+".join(parts.values())

    def play(rank: Rank) -> None:
        with rank.calling("f") as place:
            rank.enter(place)
            try:
                for number in range(9):
                    assert rank.reduce(f"step {number}", f"{rank.rank}é", reduce) == "0é+1é"
            except (DistTuneError, ValueError) as error:
                with suppress(DistTuneError):
                    rank.abort(error)
                told.append(str(error))

    other = threading.Thread(target=play, args=(world.ranks[1],))
    other.start()
    play(world.ranks[0])
    other.join()
    assert len(reduced) == 9 * (not is_broken)
    assert not is_broken or sorted(told)[0] == "cannot reduce"
    assert not is_broken or "raised ValueError: cannot reduce while f" in sorted(told)[1]


def test_ranks_that_wait_in_different_calls_for_each_other_are_told():
    """No rank has passed the other's call, and none will come to it."""
    assert World(3).run([("f", "come")], [("g", "come")], [("f", "late")]) == [["AloneError"]] * 3


@pytest.mark.parametrize("late", ["come", "late"])
def test_an_error_of_an_earlier_call_is_not_raised_in_a_healthy_one(late: str):
    """One rank raised in a call that the other made without a meeting."""
    assert World().run([("f", "pass"), ("f", late)], [("f", "raise"), ("f", "come")]) == [
        [MET],
        ["ValueError", MET],
    ]


def test_a_rank_that_has_issued_more_collectives_has_passed_the_call():
    """Also the first collective of the group: rank 1 has gone to a barrier, and makes no such call
    any more.
    """
    one, other = World().ranks
    other.count = 1
    one.run([("f", "come")])
    assert [told for _, _, told in one.told] == ["AloneError"]


@pytest.mark.parametrize(
    ("again", "told"),
    [("come", "AloneError"), ("raise", "PeerFailedError"), ("", "PeerFailedError")],
)
def test_a_call_that_a_rank_raised_in_and_made_again_is_not_tuned(again: str, told: str):
    """Rank 1 raises before the collective of its first run.

    Rank 0 has issued that, and its run returns if rank 1 comes to it as well.
    """
    one, other = World().ranks
    with other.calling("f") as place:
        other.came(place, "raise")
    with one.calling("f") as place, other.calling("f") as next_one:
        one.count = 1
        if again == "raise":
            with suppress(DistTuneError):
                other.enter(next_one, has_raised=True)
                other.abort(ValueError("the second time"))
        elif again == "come":
            other.count = 1
            assert other.came(next_one, "come") == told
        one.enter(place, has_raised=again != "come")
        meet = (
            partial(one.reduce, "manifest", "x", joined, is_gathering=True)
            if again == "come"
            else partial(one.abort, GLOO)
        )
        with pytest.raises(
            DistTuneError,
            match={"come": "called again", "raise": "the second time", "": "boom"}[again],
        ) as caught:
            meet()
    assert type(caught.value).__name__ == told


def test_the_last_rank_that_is_stopped_before_it_reads_the_parts_finds_them():
    """Another rank fixes the verdict in its place, and goes on."""
    world = World(deadline_s=2.0)

    def stopped(name: str, *args: Any) -> None:
        if (name, args) == ("multi_get", (["f/n1/0/part/0", "f/n1/0/part/1"],)):
            until(lambda: world.store.check(["f/n1/0/verdict"]))

    world.ranks[1].client.before = stopped
    assert world.run([("f", "come")], [("f", "late")]) == [[MET], [MET]]


def test_a_rank_that_dies_on_arrival_strands_nobody():
    """Its part is there and it is not counted: the meeting comes to its end, and the next one names
    it.
    """
    world = World(deadline_s=1.0)
    world.ranks[1].client.before = lambda name, *args: name == "add" and sys.exit()
    assert world.run([("f", "come")], [("f", "late")]) == [["AbsentRanksError"], ["gone"]]
    assert "the exchange 'manifest'" in str(world.ranks[0].errors[0])


def test_a_call_that_another_thread_begins_is_not_ended_by_the_error_of_a_tuning():
    """Rank 0's tuning of f raises while its other thread is in the first run of g."""
    one, other = World().ranks
    thread = threading.Thread(target=other.run, args=([("f", "come"), ("g", "come")],))
    thread.start()
    with one.calling("f") as place:
        one.enter(place)
        one.reduce("manifest", "x", joined, is_gathering=True)
        with one.calling("g") as place_of_g:
            one.abort(ERRORS["raise"])
            assert one.came(place_of_g, "come") == MET
    thread.join()
    assert [told for _, _, told in other.told] == ["PeerFailedError", MET]


@pytest.mark.parametrize("actions", [("raise", "pass"), ("come", "come")])
def test_calls_leave_no_keys_behind(actions: tuple[str, str]):
    """As many after forty as after ten, once the ranks have met again."""
    counts = []
    for n_calls in (10, 40):
        world = World()
        world.run(
            [("f", "come")] * (n_calls + 1),
            [("f", action) for action in actions] * (n_calls // 2) + [("f", "come")],
        )
        counts.append(world.store.num_keys())
    assert counts[1] <= counts[0], counts
