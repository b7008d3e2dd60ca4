"""Meetings of real processes: parts, deadlines, aborts, late ranks, subgroups, and a store that dies."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from dist_tune.distributed.group import Ranks, group_of
from dist_tune.distributed.messages import Reduction
from dist_tune.errors import NoValidConfigError
from dist_tune.testing import values
from tests.ranks.world import caught, over_tcp
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once

DEADLINE_S = 1.0
GLOO = "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"
AGAIN = ["part 0", "part 1", "part 2", "part 3"]


_calls = ExitStack()


def enter(ranks: Ranks, closure: str) -> None:
    """Come to the meetings of the next call, after the one before."""
    _calls.close()
    ranks.enter(_calls.enter_context(ranks.calling(closure)))


def entered(group: dist.ProcessGroup | None = None) -> Ranks:
    ranks = group_of(group, DEADLINE_S)
    enter(ranks, "f")
    dist.barrier()
    return ranks


@Reduction
def listed(parts: Mapping[int, str]) -> list[str]:
    """A reduction that loses nothing."""
    return list(parts.values())


def meet(ranks: Ranks, topic: str, part: str = "") -> list[str]:
    return ranks.reduce(topic, part, listed)


def come(ranks: Ranks, closure: str, topic: str, part: str = "") -> list[str]:
    enter(ranks, closure)
    return meet(ranks, topic, part)


def meet_again(ranks: Ranks) -> list[str]:
    dist.barrier()
    return come(ranks, "again", "once more", f"part {ranks.rank}")


def _parts(rank: int) -> Any:
    ranks, met = entered(), []
    for number in range(20):
        time.sleep(0.01 if rank == number % 3 else 0.0)
        met.append(meet(ranks, f"step {number}", f"{rank}é{number}" * (100_000 if number == 7 else 1)))
    kept = {k for k in range(25) for name in ("verdict", "count", "part/1") if ranks._store.check([f"f/n1/{k}/{name}"])}
    return ranks.members, met, kept


def test_parts_come_in_the_order_of_members():
    """All ranks, whichever is last, read the same parts, large ones too; and the keys of finished meetings are deleted."""
    for members, met, kept in values(on_ranks(3, _parts)):
        assert members == (0, 1, 2)
        assert met == [[f"{rank}é{number}" * (100_000 if number == 7 else 1) for rank in range(3)] for number in range(20)]
        assert kept <= {18, 19}


def _absent(rank: int) -> Any:
    ranks, seconds = entered(), 0.0
    errors = []
    for closure in ("f", "g"):
        began = time.monotonic()
        error = caught(lambda: come(ranks, closure, "manifest") if rank != 2 else None)  # noqa: B023  # called at once
        seconds = max(seconds, time.monotonic() - began)
        dist.barrier()
        errors.append(caught(lambda: come(ranks, "f", "manifest")) if (closure, rank) == ("f", 2) else error)
        dist.barrier()
    time.sleep(0.3 if rank == 2 else 0.0)
    return errors, seconds, come(ranks, "again", "once more", f"part {rank}")


def test_the_absent_rank_is_named_on_all():
    """Two ranks wait a deadline for the third and name it. That one learns it, but not where all have come again by now."""
    for rank, (errors, seconds, met) in enumerate(values(on_ranks(3, _absent))):
        first, second = errors
        assert (first.kind, first.ranks, met) == ("AbsentRanksError", (2,), AGAIN[:3])
        assert re.search(r"ranks \[2\] did not come to the meeting for 'manifest' of f, call \d within 1", first.message)
        assert first.message.endswith(f" Rank {rank} stops for that.")
        assert second.kind == ("AbsentRanksError" if rank != 2 else "")
        assert rank == 2 or DEADLINE_S <= seconds < 2 * DEADLINE_S


def _slow(rank: int, n_beats: int) -> Any:
    ranks = entered()
    for number in range(10 if rank == 1 else 0):
        if number < n_beats:
            ranks.beat(f"compiling candidate {number}")
        time.sleep(0.27)  # signs of life are posted at most four times a second
    ends_work = rank == 1 and n_beats < 10
    return caught(lambda: ranks.beat("compiling the last one") if ends_work else meet(ranks, "compiled", "")), meet_again(ranks)


@pytest.mark.parametrize(("n_beats", "told"), [(10, ""), (1, "AbsentRanksError")])
def test_a_rank_that_beats_is_waited_for(n_beats: int, told: str):
    """Almost three deadlines. With one sign of life the waiting rank says what it was, and the late one hears at its next beat."""
    for error, met in values(on_ranks(2, _slow, n_beats)):
        assert (error.kind, met) == (told, AGAIN[:2])
        assert not told or "rank 1 last seen at: compiling candidate 0 of f, call 1 for 2." in error.message


def _aborted(rank: int, kind: type[Exception]) -> Any:
    ranks, own = entered(), KeyError("mine") if rank == 3 else kind("boom")
    if rank == 1:
        ranks.abort(own)
    dist.barrier()
    time.sleep(0.3 if rank == 2 else 0.0)  # or it is too early for a second beat
    leave: list[Callable[[], object]] = [lambda: meet(ranks, "report", ""), lambda: None, lambda: ranks.beat("x"), lambda: ranks.abort(own)]
    return caught(leave[rank]), getattr(own, "__notes__", []), meet_again(ranks)


@pytest.mark.parametrize(("kind", "told"), [(ValueError, "PeerFailedError"), (NoValidConfigError, "NoValidConfigError")])
def test_the_first_abort_wins(kind: type[Exception], told: str):
    """Peers learn rank and error, or raise what is everyone's; the one who raised and a later one keep their own errors."""
    meeting, raiser, beating, second = values(on_ranks(4, _aborted, kind))
    assert raiser[2] == second[2] == meeting[2] == beating[2] == AGAIN
    assert (raiser[0].kind, second[0].kind, raiser[1]) == ("", "", [])
    text = "rank 1 raised ValueError: boom while f was being tuned" if kind is ValueError else "boom"
    assert text in second[1][0]
    for error in (meeting[0], beating[0]):
        assert (error.kind, error.message.startswith(text)) == (told, True)
        assert kind is not ValueError or (error.rank, error.error) == (1, "ValueError: boom")


def _secondary(rank: int, root: str) -> Any:
    ranks = entered()
    time.sleep(0.3 if rank == 1 else 0.0)  # the cause comes last
    cause = ValueError("root") if (rank, root) == (1, "error") else RuntimeError(GLOO)
    error = caught(lambda: ranks.abort(cause) if (rank, root) != (1, "absent") else None)
    dist.barrier()
    return error if (rank, root) != (1, "absent") else caught(lambda: ranks.beat("late")), meet_again(ranks)


@pytest.mark.parametrize(
    ("root", "kinds", "text"),
    [
        ("error", ["PeerFailedError", "", "PeerFailedError"], "rank 1 raised ValueError: root"),
        ("absent", ["AbsentRanksError"] * 3, "ranks [1] did not come"),
        ("none", ["PeerFailedError"] * 3, "ranks [0, 1, 2] failed so"),
    ],
)
def test_a_broken_collective_waits_for_the_cause(root: str, kinds: list[str], text: str):
    """Ranks whose collective broke name who raised, or who is absent, or that all failed so; their own error is chained."""
    for rank, (error, met) in enumerate(values(on_ranks(3, _secondary, root))):
        assert (error.kind, met) == (kinds[rank], AGAIN[:3])
        if error.kind:
            assert text in error.message
            assert error.cause == ("None" if (rank, root) == (1, "absent") else GLOO)


def _mismatch(rank: int) -> Any:
    ranks = group_of(None, DEADLINE_S)
    return caught(lambda: come(ranks, "f", f"topic {rank // 2}")), meet_again(ranks)


def test_ranks_at_different_steps_are_told():
    """An error on all ranks that quotes both steps."""
    for error, met in values(on_ranks(3, _mismatch)):
        assert (error.kind, met) == ("RankMismatchError", AGAIN[:3])
        assert re.match(r"rank [01] is in f, step 'topic 0', rank 2 is in f, step 'topic 1'\.", error.message), error.message


def _host_dies(rank: int) -> Any:
    over_tcp(rank)
    ranks = entered()
    if rank == 0:
        os._exit(0)
    while rank == 2:
        time.sleep(0.05)
        ranks.beat("replay 3")
    return meet(ranks, "report", "")


def test_a_dead_store_ends_all_ranks():
    """The process that hosts the store is gone: those who wait and those who beat say so at once."""
    host, *others = on_ranks(3, _host_dies)
    assert host.error == "Died"
    for outcome, topic in zip(others, ("report", "replay 3"), strict=True):
        assert (outcome.error, outcome.seconds < 5.0) == ("StoreGoneError", True)
        assert f"the c10d store cannot be reached at '{topic}' of f" in outcome.message


def _dies_on_arrival(rank: int) -> Any:
    ranks = entered()
    if rank == 1:
        ranks._store = SimpleNamespace(set=ranks._store.set, add=lambda *_: os._exit(0))
    return meet(ranks, "report", "")


def test_a_rank_that_dies_on_arrival_strands_nobody():
    """Its part is there and it is not counted; the one who waits comes to an end all the same."""
    assert [outcome.error == "Hung" for outcome in on_ranks(2, _dies_on_arrival)] == [False, False]
