"""A run of a step as a CUDA graph: what stands against one, its capture, and what a failed one
leaves. Knows nothing of candidates.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dist_tune.measure.clocks import is_interpreted

_broken: list[Any] = []
"""Graphs that were not captured to their end: torch's allocator of pinned memory goes on asking
them.
"""


def obstacle_in(run: Callable[[], object]) -> str:
    """Make a run; why no graph can hold it: where its host waits for the device, as far as torch
    notices. Empty if nothing says so.
    """
    if not torch.cuda.is_available() or is_interpreted():
        run()
        return "there is no CUDA device"
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    waits = [
        f"{Path(each.filename).name}:{each.lineno}"
        for each in told
        if "synchronizing CUDA operation" in str(each.message)
    ]
    return f"it waits for the device in {waits[0]}" if waits else ""


def graph_pool() -> Any:
    """Memory for graphs of which no two are replayed at once.

    Waits for the device, and frees what torch keeps: a capture may not.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.graph_pool_handle()


def captured(run: Callable[[], object], pool: Any) -> Any:
    """The graph of a run, whose ``replay()`` makes it; the run itself does nothing on the device.

    Raises:
        Exception: that of the run or of CUDA. Torch's allocator and generators are as before.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        try:
            # Watchdogs ask the device meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            run()
            graph.capture_end()
        except BaseException:  # raised again
            _end(graph, pool)
            raise
    return graph


def _end(graph: Any, pool: Any) -> None:
    """End a capture that failed.

    Where CUDA has broken it off, torch leaves its allocator and its generators as if it went on.
    """
    with suppress(RuntimeError):
        graph.capture_end()
    with suppress(RuntimeError):
        graph.pool()
        return  # it has ended as others do
    _broken.append(graph)
    for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with suppress(RuntimeError):
            end(torch.cuda.current_device(), pool)
    with suppress(RuntimeError):  # one more, after which generators capture no more
        one, another = torch.ones(1, device="cuda"), torch.cuda.CUDAGraph()
        another.capture_begin(capture_error_mode="thread_local")
        one.add_(1)
        another.capture_end()
