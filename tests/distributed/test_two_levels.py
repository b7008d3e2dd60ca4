"""Meetings by way of homes: the same results and errors as on one level, with ranks that are threads over one store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.distributed.protocol import homes
from dist_tune.distributed.protocol.meetings import Meetings
from dist_tune.distributed.protocol.parts import absent
from dist_tune.distributed.protocol.reduction import Reduction
from dist_tune.errors import AbsentRanksError, PeerFailedError, RankMismatchError

pytestmark = [pytest.mark.once, pytest.mark.processes]

DEADLINE_S = 2.0
N_RANKS = 5
"""In homes of two, two and one."""


@Reduction
def joined(parts: Mapping[int, str]) -> list[str]:
    return [f"{rank}:{part}" for rank, part in parts.items()]


class Levels:
    """Ranks in threads of this process, on one level or on two."""

    def __init__(self, host: Any, name: str, n_levels: int) -> None:
        self.store = dist.PrefixStore(name, host)
        members = tuple(range(N_RANKS))
        self.ranks = [Meetings(dist.PrefixStore(name, host.clone()), rank, members, DEADLINE_S) for rank in members]
        self.n_calls = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(homes, "FLAT_RANKS", N_RANKS if n_levels == 1 else 1)
            patch.setenv("LOCAL_WORLD_SIZE", "2")
            for rank in self.ranks:
                rank.calls("f")
        self.enter()
        assert self.each(lambda rank: rank.reduce("first", "x", joined)) == [[f"{i}:x" for i in range(N_RANKS)]] * N_RANKS

    @property
    def sizes(self) -> list[int]:
        """Ranks of each rank's home; 0 on one level."""
        return [len(rank._parts.home.ranks) for rank in self.ranks]

    def enter(self) -> None:
        """All ranks come to the next call."""
        self.n_calls += 1
        assert self.each(lambda rank: rank.enter("f", self.n_calls)) == [None] * N_RANKS

    def close(self) -> None:
        """No rank answers any more."""
        for rank in self.ranks:
            with suppress(dist.DistError):
                rank.close()

    def each(self, do: Callable[[Meetings], Any], ranks: Sequence[int] = range(N_RANKS)) -> list[Any]:
        """What each of these ranks came to, all at once: a value or an error."""
        got: dict[int, Any] = {}

        def run(rank: int) -> None:
            try:
                got[rank] = do(self.ranks[rank])
            except Exception as error:  # noqa: BLE001  # the test looks at it
                got[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return [got[rank] for rank in ranks]


@pytest.fixture(scope="module")
def host() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=60), wait_for_workers=False)


@pytest.fixture(scope="module", params=[1, 2])
def made(host: dist.Store, request: pytest.FixtureRequest) -> Iterator[Levels]:
    levels = Levels(host, f"{request.param}", request.param)
    assert levels.sizes == ([0] * N_RANKS if request.param == 1 else [2, 2, 2, 2, 1])
    yield levels
    levels.close()


@pytest.fixture
def levels(made: Levels) -> Levels:
    made.enter()
    return made


def test_all_ranks_get_one_result_of_all_parts(levels: Levels):
    """Bit-equal, in the order of the ranks, from meeting to meeting."""
    for topic in ("a", "b", "c"):
        got = levels.each(partial(Meetings.reduce, topic=topic, part=topic, fn=joined))
        assert got == [[f"{i}:{topic}" for i in range(N_RANKS)]] * N_RANKS


def test_a_rank_of_a_home_is_waited_for(levels: Levels):
    """The second of a home comes late, and so does a whole home."""

    def late(rank: Meetings) -> Any:
        time.sleep(0.5 if rank.rank in (1, 2, 3) else 0.0)
        return rank.reduce("late", str(rank.rank), joined)

    assert levels.each(late) == [[f"{i}:{i}" for i in range(N_RANKS)]] * N_RANKS


@pytest.mark.parametrize("who", [0, 1, 4])
def test_an_abort_is_told_to_all_as_that_ranks(levels: Levels, who: int):
    """Of a leader, of another rank, and of one that is alone in its home; long before the deadline."""
    began = time.monotonic()
    got = levels.each(lambda rank: rank.abort(ValueError("no")) if rank.rank == who else rank.reduce("a", "x", joined))
    assert time.monotonic() - began < DEADLINE_S
    assert got.pop(who) is None
    assert [(type(error), error.rank) for error in got] == [(PeerFailedError, who)] * (N_RANKS - 1)


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_that_does_not_come_is_named_by_all(levels: Levels, who: int):
    """Only that one, and not the rest of its home."""
    got = levels.each(lambda rank: rank.reduce("a", "x", joined), [rank for rank in range(N_RANKS) if rank != who])
    assert [(type(error), error.ranks) for error in got] == [(AbsentRanksError, (who,))] * (N_RANKS - 1)


def test_a_rank_at_another_step_is_named_by_all(levels: Levels):
    """Also where a whole home is at the other step."""
    got = levels.each(lambda rank: rank.reduce("b" if rank.rank in (2, 3) else "a", "x", joined))
    assert {type(error) for error in got} == {RankMismatchError}
    assert len({str(error) for error in got}) == 1
    assert "rank 2 is in f, step 'b'" in str(got[0])


def test_ranks_meet_on_after_an_error(levels: Levels):
    """An abort, and then a meeting to which all come."""
    levels.each(lambda rank: rank.abort(ValueError("no")) if rank.rank == 3 else rank.reduce("a", "x", joined))
    levels.enter()
    assert levels.each(lambda rank: rank.reduce("b", "y", joined)) == [[f"{i}:y" for i in range(N_RANKS)]] * N_RANKS


def test_calls_gather_and_reduce_in_turn(levels: Levels):
    """A gathering goes past the homes."""
    for _ in range(2):
        wanted = [[f"{i}:x" for i in range(N_RANKS)]] * N_RANKS
        assert levels.each(lambda rank: rank.gather("a", "x", joined)) == wanted
        assert levels.each(lambda rank: rank.reduce("b", "x", joined)) == wanted


def test_keys_do_not_pile_up(levels: Levels):
    """As many after forty meetings as after ten."""
    counts = []
    for _ in range(4):
        for _ in range(10):
            levels.each(lambda rank: rank.reduce("a", "x", joined))
        counts.append(levels.store.num_keys())
    assert counts[3] <= counts[0] + N_RANKS, counts


def test_a_home_that_is_lost_costs_time_and_no_result(host: dist.Store):
    """Its ranks bring their parts to the job's store, as on one level."""
    levels = Levels(host, "lost", 2)

    class Lost:
        def __getattr__(self, name: str) -> Any:
            raise dist.DistNetworkError("connection reset by peer")

    lost: Any = Lost()
    levels.ranks[0]._parts.home._store = levels.ranks[1]._parts.home._store = lost
    for _ in range(2):
        assert levels.each(lambda rank: rank.reduce("a", "x", joined)) == [[f"{i}:x" for i in range(N_RANKS)]] * N_RANKS
    assert levels.sizes == [0, 0, 2, 2, 1]
    levels.close()


def test_a_home_that_does_not_answer_is_seen_from_outside(host: dist.Store):
    """The process that hosts it may be stopped: the watchdog sees the call without an answer, as one of the job's store."""
    levels = Levels(host, "silent", 2)
    home, seen = levels.ranks[1]._parts.home, []
    watched: Any = home._store

    class Slow:
        def check(self, keys: list[str]) -> bool:
            seen.append(home.asked)
            return True

    own, watched._store = watched._store, Slow()
    watched.__dict__.pop("check", None)
    assert home.ask(lambda store: store.check(["a"]))
    watched._store = own
    assert [each.call for each in seen if each is not None] == ["check"]
    assert home.asked is None
    levels.close()


def test_a_group_without_all_homes_meets_on_one_level(host: dist.Store, monkeypatch: pytest.MonkeyPatch):
    """A rank that sees another network than its leader joins no home, and so no rank uses one."""
    monkeypatch.setattr(homes, "network_name", lambda: threading.current_thread().name)
    levels = Levels(host, "apart", 2)
    assert levels.sizes == [0] * N_RANKS
    levels.close()


@given(st.sets(st.integers(0, 40)), st.integers(0, 40))
def test_absent_keys_are_found_with_few_questions(there: set[int], n: int):
    """Exactly those; two questions and log2(n) for each at most."""
    asked = []

    class Store:
        def check(self, keys: list[str]) -> bool:
            asked.append(keys)
            return all(int(key) in there for key in keys)

    lacking = [str(key) for key in range(n) if key not in there]
    assert absent(Store(), [str(key) for key in range(n)]) == lacking
    assert len(asked) <= 1 + 2 * len(lacking) * max(1, n.bit_length())
