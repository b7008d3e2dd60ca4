"""Ranks that come, are late, raise, die, pass or call again, in any order: each run ends, and ranks that end a call say the same.

The table of docs/distributed.md, walked at random; the ranks are threads over one store.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
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
from dist_tune.distributed.presence import process_name
from dist_tune.errors import DistTuneError

pytestmark = [pytest.mark.once, pytest.mark.processes]

DEADLINE_S, GATHER_S = 0.4, 0.8
ERRORS = {"raise": ValueError("of the step"), "broken": RuntimeError("[/gloo/transport] Connection closed by peer [127.0.0.1]:1234")}
MET = json.dumps([["0:x", "1:x"], ["0:y", "1:y"]])
"""What two ranks have that have met."""
_worlds = count()


@Reduction
def joined(parts: Mapping[int, str]) -> list[str]:
    return [f"{rank}:{part}" for rank, part in parts.items()]


class Rank(Meetings):
    """One rank, whose collectives take all ranks that live."""

    def __init__(self, host: Any, world: World, rank: int) -> None:
        super().__init__(dist.PrefixStore(world.name, host.clone()), rank, tuple(range(world.n_ranks)), DEADLINE_S)
        self.gather_s = GATHER_S
        self.world, self.count = world, 0
        self.told: list[tuple[str, int, str]] = []
        """Closure, number of the call, and what came of it here."""

    @property
    def n_issued(self) -> int:
        return self.count

    def run(self, script: list[tuple[str, str]]) -> None:
        """Make these calls, and come to the end of the program."""
        for closure, action in script:
            if action == "die":
                self.die()
                return
            if action == "pass":
                self.calls(closure).n_calls += 1
                continue
            with self.calling(closure) as place:
                self.told.append((closure, place.number, self.came(place, action)))
        self.close()

    def came(self, place: Place, action: str) -> str:
        """What a call came to."""
        time.sleep(0.15 if action == "late" else 0.0)
        try:
            self.enter(place, has_raised=action in ERRORS)
            if action in ERRORS:
                self.abort(ERRORS[action])
                return type(ERRORS[action]).__name__
            values = [self.reduce("manifest", "x", joined, is_gathering=True), self.reduce("done", "y", joined)]
        except DistTuneError as error:
            return type(error).__name__
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

    def run(self, scripts: list[list[tuple[str, str]]]) -> None:
        """All scripts at once; fails if one does not end."""
        threads = [threading.Thread(target=rank.run, args=(script,), daemon=True) for rank, script in zip(self.ranks, scripts, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads), scripts


@pytest.fixture(scope="module")
def host() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=60), wait_for_workers=False)


ACTIONS = ("come", "come", "late", "raise", "pass", "die")
SCRIPTS = st.lists(st.lists(st.tuples(st.just("f"), st.sampled_from(ACTIONS)), min_size=1, max_size=3), min_size=2, max_size=4)


@settings(max_examples=30, deadline=None)
@given(scripts=SCRIPTS)
def test_each_run_ends_and_ranks_that_end_a_call_say_the_same(host: dist.Store, scripts: list[list[tuple[str, str]]]):
    """One value, or errors of one kind; the rank that raised has its own."""
    world = World(host, len(scripts))
    world.run(scripts)
    by_call: dict[tuple[str, int], set[str]] = {}
    for rank in world.ranks:
        for closure, number, told in rank.told:
            by_call.setdefault((closure, number), set()).add(told)
    for call, said in by_call.items():
        assert len(said - {"ValueError"}) <= 1, (call, said, scripts)


TABLE = [
    # what rank 1 does -> what rank 0, which comes, is told
    ("come", "value"),
    ("late", "value"),
    ("raise", "PeerFailedError"),
    ("pass", "AloneError"),
    ("die", "AloneError"),
]


@pytest.mark.parametrize(("action", "told"), TABLE)
def test_what_a_rank_that_comes_is_told(host: dist.Store, action: str, told: str):
    """The table of docs/distributed.md."""
    world = World(host, 3)
    world.run([[("f", "come")], [("f", action)], [("f", "late")]])
    assert {text if text.endswith("Error") else "value" for _, _, text in world.ranks[0].told + world.ranks[2].told} == {told}


def test_ranks_that_wait_in_different_calls_for_each_other_are_told(host: dist.Store):
    """No rank has passed the other's call, and none will come to it."""
    world = World(host, 3)
    world.run([[("f", "come")], [("g", "come")], [("f", "late")]])
    assert [told for rank in world.ranks for _, _, told in rank.told] == ["AloneError"] * 3


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
            ERRORS["second"] = ValueError("the second time")
            assert other.came(next_one, "second") == "ValueError"
        elif again == "come":
            other.count = 1
            assert other.came(next_one, "come") == told
        one.enter(place, has_raised=again != "come")
        meet = partial(one.reduce, "manifest", "x", joined, is_gathering=True) if again == "come" else partial(one.abort, ERRORS["broken"])
        with pytest.raises(DistTuneError) as caught:
            meet()
    assert type(caught.value).__name__ == told
    assert {"come": "called again", "raise": "the second time", "": "of the step"}[again] in str(caught.value)
    one.close()
    other.close()


def test_the_last_rank_that_is_stopped_before_it_reads_the_parts_finds_them(host: dist.Store, monkeypatch: pytest.MonkeyPatch):
    """Another rank fixes the verdict in its place, and goes on."""
    world = World(host, 2)
    one, other = world.ranks
    agree = other._agree

    def stopped(*args: Any) -> None:
        time.sleep(DEADLINE_S / 2)
        agree(*args)

    monkeypatch.setattr(other, "_agree", stopped)
    world.run([[("f", "come")], [("f", "late")]])
    assert one.told == other.told == [("f", 1, MET)]


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


def test_calls_that_end_without_agreement_leave_no_keys_behind(host: dist.Store):
    """As many after forty such calls as after ten, once the ranks have met again."""
    counts = []
    for n_calls in (10, 40):
        world = World(host, 2)
        for rank in world.ranks:
            rank.gather_s = 60.0
        world.run([[("f", "come")] * (n_calls + 1), [("f", "raise"), ("f", "pass")] * (n_calls // 2) + [("f", "come")]])
        store = dist.PrefixStore(world.name, host)
        counts.append(sum(store.check([f"f/n{n}/{k}/verdict"]) for n in range(1, n_calls + 2) for k in range(3)))
    assert counts[1] <= counts[0], counts
