"""What a queue of tasks reads on the store, when no rank of this version has posted it: an error that names it, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from dist_tune.distributed import WorkQueue, work_queue
from dist_tune.errors import PeerFailedError

pytestmark = pytest.mark.once

GARBAGE = [b"", b"x", b"\xff\xfe", b"99 ", b"-1", b"[" * 20_000, b"\x1b[2J\n", b"1" * 30]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The store of a job of two ranks."""
    host = dist.HashStore()
    monkeypatch.setattr(work_queue, "shared_store", lambda space: dist.PrefixStore(space, host))
    return dist.PrefixStore("dist_tune/work/w", host)


def queue() -> WorkQueue:
    return WorkQueue("w", 0, (0, 1), ["a", "b"], 0.2)


def refused(call: Callable[[], Any], key: str) -> None:
    with pytest.raises(PeerFailedError, match="is not of this dist_tune's form") as caught:
        call()
    assert key in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("key", ["next", "owner/1", "tasks", "stopped"])
def test_what_is_no_message_is_refused(store: Any, key: str, garbage: bytes):
    """In a run; ranks that are none are no owners."""
    if key == "owner/1":
        store.set("next", "2")  # both tasks are taken
        store.set("owner/0", "1")
    store.set(key, garbage)
    if garbage:  # what is empty counts as unset, as compare_set has it
        refused(lambda: queue().run(str), key)


@pytest.mark.parametrize("garbage", [b"x", b"7", b"\xff"])
def test_a_claim_by_no_rank_is_refused(store: Any, garbage: bytes):
    """Of two ranks."""
    store.set("claimed/gpu", garbage)
    refused(lambda: queue().claim("gpu"), "claimed/gpu")


@pytest.mark.parametrize("garbage", [b"\xff", b"x" * (8 * 2**20 + 1)])
def test_a_result_or_a_report_that_cannot_be_read_is_refused(store: Any, garbage: bytes):
    """No text, or too long."""
    store.set("done/0", garbage)
    store.set("done/1", "fine")
    refused(lambda: queue().run(str), "done/0")
    store.set("saved", b"1" + garbage)
    refused(lambda: queue().merge(str), "saved")


def test_a_result_that_is_too_long_is_not_posted(store: dist.Store):
    """The store would close the connection."""
    with pytest.raises(Exception, match="result of task 0 takes"):
        queue().run(lambda task: "x" * (9 * 2**20))


def test_messages_of_ranks_are_read(store: dist.Store):
    """The tasks are done, and their results are the texts."""
    assert queue().run(lambda task: f"{task} ✓") == ["0 ✓", "1 ✓"]
    assert queue().claim("gpu") == 0
