"""Verdicts as errors: the kind, and what the message tells of ranks, steps and causes."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from dist_tune.distributed.protocol.verdicts import FAILED, error_of, is_secondary, mismatch_of, text_of
from dist_tune.errors import SHARED_ERRORS, AbsentRanksError, DistTuneError, PeerFailedError, RankMismatchError

pytestmark = pytest.mark.once

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


def test_a_timeout_names_the_absent_ranks_and_their_last_signs():
    """Ranks as numbers, sorted, although JSON has made strings of them."""
    verdict = {"state": "timed out", "missing": {"3": "nothing yet", "1": "f: replay 2"}, "topic": "report 1", "closure": "f", "by": 0}
    error = error_of(verdict | {"within_s": 30.0}, 2, "f")
    assert isinstance(error, AbsentRanksError)
    assert error.ranks == (1, 3)
    for text in ("ranks [1, 3] did not come", "within 30 s", "noticed by rank 0, read by rank 2", "rank 1 last seen at: f: replay 2"):
        assert text in str(error)


@pytest.mark.parametrize("kind", sorted(SHARED_ERRORS))
def test_an_error_that_all_ranks_share_keeps_its_kind(kind: str):
    """And its message, which is the same on all."""
    error = error_of({"state": "aborted", "rank": 1, "kind": kind, "error": f"{kind}: why", "message": "why"}, 0, "f")
    assert (type(error).__name__, str(error)) == (kind, "why")


def test_an_error_of_one_rank_is_named_on_the_others():
    """With the rank, its exception and the closure."""
    verdict = {"state": "aborted", "rank": 1, "kind": "KeyError", "error": "KeyError: 'a'", "message": "'a'"}
    error = error_of(verdict, 0, "module.step")
    assert isinstance(error, PeerFailedError)
    assert (error.rank, error.error) == (1, "KeyError: 'a'")
    assert "rank 1 raised KeyError: 'a' while module.step was being tuned; rank 0 stops" in str(error)


def test_ranks_in_different_closures_are_named():
    """The first rank, and the first that is elsewhere."""
    error = mismatch_of((0, 2, 4), [("f", "manifest"), ("f", "manifest"), ("g", "manifest")], "f", {})
    assert isinstance(error, RankMismatchError)
    assert str(error).startswith("rank 0 is in f, step 'manifest', rank 4 is in g, step 'manifest'. ")


@pytest.mark.parametrize("n_failed", [1, 2])
def test_a_collective_without_all_its_ranks_names_who_failed_and_where_the_others_were(n_failed: int):
    """The first of those that failed is the one in the attributes."""
    steps = [("f", f"{FAILED}RuntimeError: gloo")] * n_failed + [("f", "report 0")] * (2 - n_failed)
    error = mismatch_of((0, 1), steps, "f", {0: "f: replay 1", 1: "f: replay 2"})
    assert isinstance(error, PeerFailedError)
    assert (error.rank, error.error) == (0, "RuntimeError: gloo")
    assert f"ranks {list(range(n_failed))} failed so" in str(error)
    assert ("rank 1 at 'report 0' (last seen at: f: replay 2)" if n_failed == 1 else "no other did not") in str(error)
