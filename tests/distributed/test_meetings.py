"""Meetings: their results and errors, with ranks that are threads over one store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.distributed.meetings import Meetings
from dist_tune.distributed.messages import Reduction
from dist_tune.distributed.store import absent
from dist_tune.errors import AbsentRanksError, PeerFailedError, RankMismatchError

pytestmark = [pytest.mark.once, pytest.mark.processes]

DEADLINE_S = 2.0
N_RANKS = 5


@Reduction
def joined(parts: Mapping[int, str]) -> list[str]:
    return [f"{rank}:{part}" for rank, part in parts.items()]


class Threads:
    """Ranks in threads of this process."""

    def __init__(self, host: Any) -> None:
        name = "meetings"
        self.store = dist.PrefixStore(name, host)
        members = tuple(range(N_RANKS))
        self.ranks = [Meetings(dist.PrefixStore(name, host.clone()), rank, members, DEADLINE_S) for rank in members]
        self._calls = ExitStack()
        self.enter()
        assert self.each(lambda rank: rank.reduce("first", "x", joined)) == [[f"{i}:x" for i in range(N_RANKS)]] * N_RANKS

    def enter(self) -> None:
        """All ranks come to the next call."""
        self._calls.close()
        numbers = {rank.rank: self._calls.enter_context(rank.calling("f")) for rank in self.ranks}
        assert self.each(lambda rank: rank.enter("f", numbers[rank.rank])) == [None] * N_RANKS

    def close(self) -> None:
        """No rank answers any more."""
        self._calls.close()
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


@pytest.fixture(scope="module")
def made(host: dist.Store) -> Iterator[Threads]:
    threads = Threads(host)
    yield threads
    threads.close()


@pytest.fixture
def threads(made: Threads) -> Threads:
    made.enter()
    return made


def test_all_ranks_get_one_result_of_all_parts(threads: Threads):
    """Bit-equal, in the order of the ranks, from meeting to meeting."""
    for topic in ("a", "b", "c"):
        got = threads.each(partial(Meetings.reduce, topic=topic, part=topic, fn=joined))
        assert got == [[f"{i}:{topic}" for i in range(N_RANKS)]] * N_RANKS


def test_late_ranks_are_waited_for(threads: Threads):
    """Three of five."""

    def late(rank: Meetings) -> Any:
        time.sleep(0.5 if rank.rank in (1, 2, 3) else 0.0)
        return rank.reduce("late", str(rank.rank), joined)

    assert threads.each(late) == [[f"{i}:{i}" for i in range(N_RANKS)]] * N_RANKS


@pytest.mark.parametrize("who", [0, 1, 4])
def test_an_abort_is_told_to_all_as_that_ranks(threads: Threads, who: int):
    """Of the first, of the last and of one between; long before the deadline."""
    began = time.monotonic()
    got = threads.each(lambda rank: rank.abort(ValueError("no")) if rank.rank == who else rank.reduce("a", "x", joined))
    assert time.monotonic() - began < DEADLINE_S
    assert got.pop(who) is None
    assert [(type(error), error.rank) for error in got] == [(PeerFailedError, who)] * (N_RANKS - 1)


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_that_does_not_come_is_named_by_all(threads: Threads, who: int):
    """Only that one."""
    got = threads.each(lambda rank: rank.reduce("a", "x", joined), [rank for rank in range(N_RANKS) if rank != who])
    assert [(type(error), error.ranks) for error in got] == [(AbsentRanksError, (who,))] * (N_RANKS - 1)


def test_a_rank_at_another_step_is_named_by_all(threads: Threads):
    """The first of those that differ."""
    got = threads.each(lambda rank: rank.reduce("b" if rank.rank in (2, 3) else "a", "x", joined))
    assert {type(error) for error in got} == {RankMismatchError}
    assert len({str(error) for error in got}) == 1
    assert "rank 2 is in f, step 'b'" in str(got[0])


def test_ranks_meet_on_after_an_error(threads: Threads):
    """An abort, and then a meeting to which all come."""
    threads.each(lambda rank: rank.abort(ValueError("no")) if rank.rank == 3 else rank.reduce("a", "x", joined))
    threads.enter()
    assert threads.each(lambda rank: rank.reduce("b", "y", joined)) == [[f"{i}:y" for i in range(N_RANKS)]] * N_RANKS


def test_calls_gather_and_reduce_in_turn(threads: Threads):
    for _ in range(2):
        wanted = [[f"{i}:x" for i in range(N_RANKS)]] * N_RANKS
        assert threads.each(lambda rank: rank.gather("a", "x", joined)) == wanted
        assert threads.each(lambda rank: rank.reduce("b", "x", joined)) == wanted


def test_keys_do_not_pile_up(threads: Threads):
    """As many after forty meetings as after ten."""
    counts = []
    for _ in range(4):
        for _ in range(10):
            threads.each(lambda rank: rank.reduce("a", "x", joined))
        counts.append(threads.store.num_keys())
    assert counts[3] <= counts[0] + N_RANKS, counts


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
