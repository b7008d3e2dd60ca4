"""Ranks that come, are late, raise, die, pass or call again, in any order: each run ends, and ranks that end a call say the same.

The table of docs/how-it-works.md, walked at random; the ranks are threads over one store.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_tune.distributed.calls import Place
from dist_tune.distributed.meetings import Meetings
from dist_tune.distributed.messages import Reduction
from dist_tune.distributed.presence import Presence, process_name
from dist_tune.errors import DistTuneError, NoValidConfigError

pytestmark = pytest.mark.processes

DEADLINE_S, GATHER_S = 0.4, 0.8
GLOO = "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"
ERRORS = {"raise": ValueError("boom"), "shared": NoValidConfigError("no config"), "broken": RuntimeError(GLOO)}
MET = json.dumps([["0:x", "1:x"], ["0:y", "1:y"]])
"""What two ranks have that have met."""
_worlds = count()
Script = list[tuple[str, str]]
"""Closure and action of each call of a rank."""


@Reduction
def joined(parts: Mapping[int, str]) -> list[str]:
    return [f"{rank}:{part}" for rank, part in parts.items()]


class Rank(Meetings):
    """One rank, whose collectives take all ranks that live."""

    def __init__(self, host: Any, world: World, rank: int) -> None:
        super().__init__(dist.PrefixStore(world.name, host.clone()), rank, tuple(range(world.n_ranks)), DEADLINE_S)
        self.gather_s = GATHER_S
        self.count = 0
        self.told: list[tuple[str, int, str]] = []
        """Closure, number of the call, and what came of it here."""
        self.errors: list[DistTuneError] = []

    @property
    def n_issued(self) -> int:
        return self.count

    def run(self, script: Script) -> None:
        """Make these calls, and come to the end of the program."""
        for closure, action in script:
            if action == "die":
                self.die()
                return
            if action in ("pass", "pass slowly"):
                time.sleep(2.5 * DEADLINE_S if action == "pass slowly" else 0.0)
                self.calls(closure).n_calls += 1
                continue
            with self.calling(closure) as place:
                self.told.append((closure, place.number, self.came(place, action)))
        self.close()

    def came(self, place: Place, action: str) -> str:
        """What a call came to: the values of its meetings, or the class of its error."""
        time.sleep(0.15 if action.startswith("late") else 0.0)
        action = action.removeprefix("late ")
        own = ERRORS.get(action)
        try:
            self.enter(place, has_raised=own is not None)
            if own is not None:
                self.abort(own)
                return type(own).__name__
            values = [self.reduce("other" if action == "stray" else "manifest", "x", joined, is_gathering=True)]
            if action == "stop":  # after the first meeting, and it learns of the end between replays
                time.sleep(2.5 * DEADLINE_S)
                self.beat("replay 3")
            for number in range(5 if action == "beat" else 0):
                self.beat(f"compiling {number}")
                time.sleep(DEADLINE_S / 2)
            values.append(self.reduce("done", "y", joined))
        except DistTuneError as error:
            self.errors.append(error)
            return type(error).__name__
        except SystemExit:
            return "gone"
        return json.dumps(values)

    def die(self) -> None:
        """Answer no more, as a process of this host that was killed."""
        self.calls("f")
        assert self._presence is not None
        self._presence._post = lambda: None  # type: ignore[method-assign]
        dead = " ".join([*process_name().split(" ")[:-1], "0"])
        card = json.loads(self._store.get(f"card/{self.rank}"))
        self._store.set(f"card/{self.rank}", json.dumps({**card, "process": dead}))


class World:
    """The ranks of one run."""

    def __init__(self, host: Any, n_ranks: int) -> None:
        self.name, self.n_ranks = f"world {next(_worlds)}", n_ranks
        self.ranks = [Rank(host, self, rank) for rank in range(n_ranks)]

    def run(self, scripts: list[Script]) -> list[list[str]]:
        """All scripts at once; what came of the calls of each rank. Fails if one does not end."""
        threads = [threading.Thread(target=rank.run, args=(script,), daemon=True) for rank, script in zip(self.ranks, scripts, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads), scripts
        return [[told for _, _, told in rank.told] for rank in self.ranks]


@pytest.fixture(scope="module")
def host() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=60), wait_for_workers=False)


ACTIONS = ("come", "come", "late", "raise", "pass", "die")
SCRIPTS = st.lists(st.lists(st.tuples(st.just("f"), st.sampled_from(ACTIONS)), min_size=1, max_size=3), min_size=2, max_size=4)


@settings(max_examples=30, deadline=None)
@given(scripts=SCRIPTS)
def test_each_run_ends_and_ranks_that_end_a_call_say_the_same(host: dist.Store, scripts: list[Script]):
    """One value, or errors of one kind; the rank that raised has its own."""
    world = World(host, len(scripts))
    world.run(scripts)
    by_call: dict[tuple[str, int], set[str]] = {}
    for rank in world.ranks:
        for closure, number, told in rank.told:
            by_call.setdefault((closure, number), set()).add(told)
    for call, said in by_call.items():
        assert len(said - {"ValueError"}) <= 1, (call, said, scripts)


ABORTED, ABSENT = "rank 1 raised ValueError: boom while f was being tuned", r"rank 1 last seen at: .*ranks \[1\] did not come"
TABLE = [
    # what each rank does -> what is told those that are told anything, and in which words
    ("come, come, late", "", ""),
    ("come, beat, late", "", ""),
    ("come, raise, late", "PeerFailedError", ABORTED),
    ("come, shared, late", "NoValidConfigError", "no config"),
    ("late raise, raise, late", "PeerFailedError", ABORTED),  # the first one counts
    ("come, pass, late", "AloneError", r"rank . is alone in f, call 1: ranks \[1\] have passed it"),
    ("come, die, late", "AloneError", r"rank 1 has not come to it: .*its process has ended"),
    ("come, stop, late", "AbsentRanksError", rf"{ABSENT} to the exchange 'done' of f, call 1 within "),
    ("come, stray, late", "RankMismatchError", r"rank 0 is in f, step 'manifest', rank 1 is in f, step 'other'"),
    ("broken, late raise, broken", "PeerFailedError", ABORTED),  # what a failed collective is a consequence of
    ("broken, pass slowly, broken", "AbsentRanksError", rf"{ABSENT} after a failed collective of f, call 1 within"),
    ("broken, broken, late broken", "PeerFailedError", "all ranks did so"),
]


@pytest.mark.parametrize(("actions", "told", "words"), TABLE)
def test_what_ranks_are_told_and_that_they_meet_again(host: dist.Store, actions: str, told: str, words: str):
    """The tables of docs/how-it-works.md. The one that raised has its own error; a collective's is chained to its cause."""
    world = World(host, 3)
    each = actions.split(", ")
    again = [] if "die" in each else [("again", "come")]
    found = world.run([[("f", action), *again] for action in each])
    for rank, action, said in zip(world.ranks, each, found, strict=True):
        assert not again or said.pop() == json.dumps([["0:x", "1:x", "2:x"], ["0:y", "1:y", "2:y"]])
        if action in ("pass", "pass slowly", "die"):
            assert said == []
        elif own := {"late raise": "ValueError", "raise": "ValueError", "shared": "NoValidConfigError"}.get(action):
            assert said == [own]
        elif told:
            (error,) = rank.errors
            assert said == [told]
            assert re.search(words, str(error)), error
            assert error.__cause__ is (ERRORS["broken"] if "broken" in action else None)
            assert told != "PeerFailedError" or words != ABORTED or (error.rank, error.error) == (1, "ValueError: boom")  # type: ignore[attr-defined]
        else:
            assert said[0].startswith("[[")


def test_a_peers_next_call_is_no_other_call_that_it_waits_in(host: dist.Store, monkeypatch: pytest.MonkeyPatch):
    """Between a look for the verdict and one at its peer, this rank is held up; the peer raises meanwhile, and waits in the next call."""
    answer, world = Presence._post, World(host, 2)
    looks = world.ranks[0]._looks

    def answer_late(presence: Presence) -> None:
        time.sleep(0.3 * (presence._activity.rank == 1 and presence._question > 0))
        answer(presence)

    def look_late(key: str) -> Iterator[float]:
        for k, now in enumerate(looks(key)):
            while k == 1 and b"again" not in world.ranks[0]._store.get("card/1"):
                time.sleep(0.01)
            yield now

    monkeypatch.setattr(Presence, "_post", answer_late)
    monkeypatch.setattr(world.ranks[0], "_looks", look_late)
    found = world.run([[("f", action), ("again", "come")] for action in ("broken", "late raise")])
    assert found == [["PeerFailedError", MET], ["ValueError", MET]]


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_last_to_come_reduces_for_all(host: dist.Store, is_broken: bool):
    """Once a meeting, and the others read what came of it. An error there is its own, and the others learn whose it was."""
    reduced = []

    @Reduction
    def reduce(parts: Mapping[int, str]) -> str:
        if is_broken:
            raise ValueError("cannot reduce")
        reduced.append(parts)
        return "+".join(parts.values())

    def play(rank: Rank) -> None:
        with rank.calling("f") as place:
            rank.enter(place)
            for number in range(9):
                time.sleep(0.02 if rank.rank == number % 2 else 0.0)
                try:
                    assert rank.reduce(f"step {number}", f"{rank.rank}é", reduce) == "0é+1é"
                except (DistTuneError, ValueError) as error:
                    with suppress(DistTuneError):
                        rank.abort(error)
                    return told.append(str(error))
        return None

    world, told = World(host, 2), list[str]()
    with ThreadPoolExecutor() as pool:
        list(pool.map(play, world.ranks))
    assert len(reduced) == 9 * (not is_broken)
    assert not is_broken or sorted(told)[0] == "cannot reduce"
    assert not is_broken or "raised ValueError: cannot reduce while f" in sorted(told)[1]
    for rank in world.ranks:
        rank.close()


def test_ranks_that_wait_in_different_calls_for_each_other_are_told(host: dist.Store):
    """No rank has passed the other's call, and none will come to it."""
    assert World(host, 3).run([[("f", "come")], [("g", "come")], [("f", "late")]]) == [["AloneError"]] * 3


def test_an_error_of_an_earlier_call_is_not_raised_in_a_healthy_one(host: dist.Store):
    """One rank raised in a call that the other made without a meeting."""
    for late in ("come", "late"):
        first, second = World(host, 2).run([[("f", "pass"), ("f", late)], [("f", "raise"), ("f", "come")]])
        assert (first, second) == ([MET], ["ValueError", MET])


def test_a_rank_that_has_issued_more_collectives_has_passed_the_call(host: dist.Store):
    """Also the first collective of the group: rank 1 has gone to a barrier, and makes no such call any more."""
    world = World(host, 2)
    one, other = world.ranks
    other.calls("f")
    other.count = 1
    began = time.monotonic()
    one.gather_s = 60.0
    one.run([("f", "come")])
    other.close()
    assert [told for _, _, told in one.told] == ["AloneError"]
    assert time.monotonic() - began < 5.0


@pytest.mark.parametrize(("again", "told"), [("come", "AloneError"), ("raise", "PeerFailedError"), ("", "PeerFailedError")])
def test_a_call_that_a_rank_raised_in_and_made_again_is_not_tuned(host: dist.Store, again: str, told: str):
    """Rank 1 raises before the collective of its first run. Rank 0 has issued that, and its run returns if rank 1 comes to it as well."""
    world = World(host, 2)
    one, other = world.ranks
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
        meet = partial(one.reduce, "manifest", "x", joined, is_gathering=True) if again == "come" else partial(one.abort, ERRORS["broken"])
        with pytest.raises(DistTuneError) as caught:
            meet()
    assert type(caught.value).__name__ == told
    assert {"come": "called again", "raise": "the second time", "": "boom"}[again] in str(caught.value)
    one.close()
    other.close()


def test_the_last_rank_that_is_stopped_before_it_reads_the_parts_finds_them(host: dist.Store, monkeypatch: pytest.MonkeyPatch):
    """Another rank fixes the verdict in its place, and goes on."""
    world = World(host, 2)
    agree = world.ranks[1]._agree

    def stopped(*args: Any) -> None:
        time.sleep(DEADLINE_S / 2)
        agree(*args)

    monkeypatch.setattr(world.ranks[1], "_agree", stopped)
    assert world.run([[("f", "come")], [("f", "late")]]) == [[MET], [MET]]


def test_a_rank_that_dies_on_arrival_strands_nobody(host: dist.Store, monkeypatch: pytest.MonkeyPatch):
    """Its part is there and it is not counted: the meeting comes to its end, and the next one names it."""
    world = World(host, 2)
    monkeypatch.setattr(world.ranks[1]._store, "add", lambda *words: sys.exit(), raising=False)
    assert world.run([[("f", "come")], [("f", "late")]]) == [["AbsentRanksError"], ["gone"]]
    assert "the exchange 'manifest'" in str(world.ranks[0].errors[0])


def test_a_call_that_another_thread_begins_is_not_ended_by_the_error_of_a_tuning(host: dist.Store):
    """Rank 0's tuning of f raises while its other thread is in the first run of g."""
    world = World(host, 2)
    one, other = world.ranks
    thread = threading.Thread(target=other.run, args=([("f", "come"), ("g", "come")],))
    thread.start()
    with one.calling("f") as place:
        one.enter(place)
        one.reduce("manifest", "x", joined, is_gathering=True)
        with one.calling("g") as place_of_g:
            one.abort(ValueError("of f"))
            assert one.came(place_of_g, "come") == MET
    thread.join(20)
    assert [told for _, _, told in other.told] == ["PeerFailedError", MET]
    one.close()


@pytest.mark.parametrize("actions", [("raise", "pass"), ("come", "come")])
def test_calls_leave_no_keys_behind(host: dist.Store, actions: tuple[str, str]):
    """As many after forty as after ten, once the ranks have met again."""
    counts = []
    for n_calls in (10, 40):
        world = World(host, 2)
        for rank in world.ranks:
            rank.gather_s = 60.0
        world.run([[("f", "come")] * (n_calls + 1), [("f", action) for action in actions] * (n_calls // 2) + [("f", "come")]])
        store = dist.PrefixStore(world.name, host)
        names = [f"f/n{n}/{k}/{name}" for n in range(1, n_calls + 2) for k in range(3) for name in ("verdict", "count", "part/0", "part/1")]
        counts.append(sum(store.check([name]) for name in names))
    assert counts[1] <= counts[0], counts
