"""Captures that fail, with torch's part played by a stand-in: what is put right, and what is told
of waits.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from typing import Any, ClassVar

import pytest
import torch

from dist_tune.measure import captured, graphs, obstacle_in


class FakeGraph:
    """Torch's graph; where CUDA has broken a capture off, its end raises and leaves allocator and
    generators as if it went on.
    """

    calls: ClassVar[list[str]] = []
    is_broken: ClassVar[bool] = False
    is_capturing: ClassVar[bool] = False
    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.has_ended = False
        self.alive.add(self)

    def capture_begin(self, *, pool: Any = None, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        FakeGraph.is_capturing = True
        self.calls.append(f"begin {pool}")

    def capture_end(self) -> None:
        if FakeGraph.is_broken:
            FakeGraph.is_broken = False
            raise RuntimeError("operation failed due to a previous error during capture")
        FakeGraph.is_capturing = False
        self.has_ended = True
        self.calls.append("end")

    def pool(self) -> str:
        if not self.has_ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return "pool"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(FakeGraph, "calls", [])
    for name, value in {
        "CUDAGraph": FakeGraph,
        "Stream": lambda: None,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_device": lambda: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, device: ones(*shape))
    for name in ("endAllocateToPool", "releasePool"):
        monkeypatch.setattr(
            torch._C,
            f"_cuda_{name}",
            lambda device, pool, name=name: FakeGraph.calls.append(f"{name} {pool}"),
            raising=False,
        )
    monkeypatch.setattr(FakeGraph, "alive", weakref.WeakSet())
    return FakeGraph.calls


def test_a_capture_that_cuda_breaks_off_leaves_nothing_behind(calls: list[str]):
    """The error of the step is raised; the pool is given back, and one more capture takes
    generators out of theirs.
    """

    def wait() -> None:
        FakeGraph.is_broken = True
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        captured(wait, "mine")
    assert calls == [
        "begin mine",
        "endAllocateToPool mine",
        "releasePool mine",
        "begin None",
        "end",
    ]
    assert not FakeGraph.is_capturing
    gc.collect()
    assert len(FakeGraph.alive) == 1  # freed, it would end its capture once more


def test_a_step_that_raises_ends_its_capture(calls: list[str]):
    """Nothing else is to be done."""

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        captured(fail, "mine")
    assert calls == ["begin mine", "end"]
    gc.collect()
    assert len(FakeGraph.alive) == 0


def test_a_capture_that_is_broken_off_unseen_fails_at_its_end(calls: list[str]):
    """A step may catch the error of what it may not do."""

    def hide() -> None:
        FakeGraph.is_broken = True

    with pytest.raises(RuntimeError, match="previous error"):
        captured(hide, "mine")
    assert calls[-1] == "end"
    assert not FakeGraph.is_capturing


def test_waits_for_the_device_are_told_with_their_place(monkeypatch: pytest.MonkeyPatch):
    """As torch warns of them; other warnings are none, and the mode is as before."""
    modes: list[Any] = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def wait() -> None:
        assert modes[-1] == "warn"
        warnings.warn("something else", stacklevel=1)
        warnings.warn_explicit(
            "called a synchronizing CUDA operation (Triggered internally ...)",
            UserWarning,
            "/home/me/train.py",
            42,
        )

    assert obstacle_in(wait) == "it waits for the device in train.py:42"
    assert obstacle_in(lambda: warnings.warn("something else", stacklevel=1)) == ""
    assert modes == [0, "warn", 0, "warn", 0]


def test_a_step_that_is_interpreted_has_no_graph(monkeypatch: pytest.MonkeyPatch):
    """Beside a GPU, too: a capture would make its work, and a replay none of it."""
    runs = list[int]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(graphs, "is_interpreted", lambda: True)
    assert obstacle_in(lambda: runs.append(1)) == "there is no CUDA device"
    assert runs == [1]
