"""Verdicts as errors: the kind, and what the message tells of ranks, steps and causes."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from dist_tune.distributed.calls import Place
from dist_tune.distributed.messages import Aborted, Mismatch, TimedOut
from dist_tune.distributed.verdicts import FAILED, error_of, is_secondary, text_of
from dist_tune.errors import SHARED_ERRORS, AbsentRanksError, DistTuneError, PeerFailedError, RankMismatchError

pytestmark = pytest.mark.once
PLACE = Place("f", 1)

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(GLOO), True),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error"), True),
        (dist.DistBackendError("timed out"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError(GLOO), False),
        (DistTuneError("kernel nccl_copyError: NCCL error"), False),
    ],
    ids=["gloo", "nccl", "torch", "ordinary", "value", "own"],
)
def test_a_collective_that_failed_for_a_peer_is_no_cause(error: Exception, expected: bool):
    """By torch's class, or by the text of a RuntimeError; a tuning's own error is one, whatever names its text holds."""
    assert is_secondary(error) is expected


def test_long_messages_are_cut():
    """They travel over the store."""
    assert text_of(ValueError("x" * 5000)) == f"ValueError: {'x' * 2000}"


def test_a_timeout_names_the_absent_ranks_and_what_they_last_did():
    """First of all, in the order of ranks."""
    verdict = TimedOut(missing={3: "nothing yet", 1: "replay 2 of f, call 1 for 3.0 s"}, topic="report 1", by=0, within_s=30.0)
    error = error_of(verdict, 2, PLACE)
    assert isinstance(error, AbsentRanksError)
    assert error.ranks == (1, 3)
    assert str(error).startswith("rank 1 last seen at: replay 2 of f, call 1 for 3.0 s; rank 3 last seen at: nothing yet. ")
    for text in (
        "ranks [1, 3] did not come to the meeting for 'report 1' of f, call 1",
        "within 30 s",
        "noticed by rank 0, read by rank 2",
    ):
        assert text in str(error)


def test_a_timeout_after_a_failed_collective_ends_with_its_text():
    """What the rank did that did not come stands before it."""
    verdict = TimedOut(missing={1: "replay 2"}, topic=f"{FAILED}RuntimeError: {GLOO}", by=0, within_s=4.0)
    text = str(error_of(verdict, 0, PLACE))
    assert text.startswith("rank 1 last seen at: replay 2. So ranks [1] did not come after a collective had failed there")
    assert f"That collective's error: RuntimeError: {GLOO}." in text


@pytest.mark.parametrize("kind", sorted(SHARED_ERRORS))
def test_an_error_that_all_ranks_share_keeps_its_kind(kind: str):
    """And its message, which is the same on all."""
    error = error_of(Aborted(rank=1, kind=kind, error=f"{kind}: why", message="why"), 0, PLACE)
    assert (type(error).__name__, str(error)) == (kind, "why")


def test_an_error_of_one_rank_is_named_on_the_others():
    """With the rank, its exception and the closure."""
    error = error_of(Aborted(rank=1, kind="KeyError", error="KeyError: 'a'", message="'a'"), 0, PLACE)
    assert isinstance(error, PeerFailedError)
    assert (error.rank, error.error) == (1, "KeyError: 'a'")
    assert "rank 1 raised KeyError: 'a' while f was being tuned; rank 0 stops" in str(error)


def test_ranks_in_different_closures_are_named():
    """The first rank, and the first that is elsewhere."""
    error = error_of(Mismatch(steps={0: ("f", "manifest"), 2: ("f", "manifest"), 4: ("g", "manifest")}), 0, PLACE)
    assert isinstance(error, RankMismatchError)
    assert str(error).startswith("rank 0 is in f, step 'manifest', rank 4 is in g, step 'manifest'. ")


@pytest.mark.parametrize("n_failed", [1, 2])
def test_a_collective_without_all_its_ranks_names_who_failed_and_where_the_others_were(n_failed: int):
    """The first of those that failed is the one in the attributes."""
    steps = [("f", f"{FAILED}RuntimeError: gloo")] * n_failed + [("f", "report 0")] * (2 - n_failed)
    error = error_of(Mismatch(steps=dict(enumerate(steps)), doing={0: "replay 1", 1: "replay 2"}), 0, PLACE)
    assert isinstance(error, PeerFailedError)
    assert (error.rank, error.error) == (0, "RuntimeError: gloo")
    assert f"ranks {list(range(n_failed))} failed so" in str(error)
    assert ("rank 1 at 'report 0' (last seen at: replay 2)" if n_failed == 1 else "no other did not") in str(error)
