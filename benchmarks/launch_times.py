"""The times of launches that a tuning online tells, beside the times of the same configs in replays
of a CUDA graph.

A step is bound by its host (it works 300 us before each launch), by its device (a long kernel is
queued first), or waits for its device before each launch; other processes keep the host's cores
busy, or not.

    .venv/bin/python benchmarks/launch_times.py [--busy N]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("DIST_TUNE_CACHE_DIR", tempfile.mkdtemp())
os.environ.setdefault("DIST_TUNE_LOG_DIR", tempfile.mkdtemp())
os.environ.setdefault("DIST_TUNE_VERBOSITY", "quiet")

import torch
import triton
import triton.language as tl
from rich.console import Console
from rich.table import Table

from dist_tune import contextual_autotune

SIZES = 1 << 12, 1 << 21, 1 << 24, 1 << 27
CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps) for block in (1024, 4096) for warps in (4, 8)
]
N_IN_GRAPH = 20


@triton.autotune(configs=CONFIGS, key=["n"])
@triton.jit
def scale_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Doubles."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)


def launch(x: torch.Tensor, y: torch.Tensor) -> None:
    """One launch with the config in use."""
    scale_kernel[lambda config: (triton.cdiv(x.numel(), config["BLOCK"]),)](x, y, x.numel())


def graph_us(x: torch.Tensor, y: torch.Tensor, config: Any) -> float:
    """Microseconds of a launch in a graph of several, the least of some replays' medians."""

    def run() -> None:
        grid = (triton.cdiv(x.numel(), config.kwargs["BLOCK"]),)
        scale_kernel.fn[grid](x, y, x.numel(), **config.kwargs, num_warps=config.num_warps)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(N_IN_GRAPH):
            run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = list[float]()
    for _ in range(30):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / N_IN_GRAPH)
    return median(found)


def work(us: float) -> None:
    """Keep this thread busy."""
    end = time.perf_counter() + us / 1e6
    while time.perf_counter() < end:
        pass


def host_bound(long: torch.Tensor) -> None:
    """Before a launch: the device is idle when it comes."""
    work(300.0)


def device_bound(long: torch.Tensor) -> None:
    """Before a launch: the device has 2 ms of work."""
    torch.mm(long, long)


def waiting(long: torch.Tensor) -> None:
    """Before a launch: the host has just waited for the device."""
    torch.cuda.synchronize()


KINDS: dict[str, Callable[[torch.Tensor], None]] = {
    "host-bound": host_bound,
    "device-bound": device_bound,
    "waits before each launch": waiting,
}


def burn() -> None:
    """Keep a core busy for ever."""
    while True:
        pass


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--busy", type=int, default=0, help="processes that keep a core busy meanwhile"
    )
    options = parser.parse_args()
    others = [
        multiprocessing.get_context("spawn").Process(target=burn, daemon=True)
        for _ in range(options.busy)
    ]
    for each in others:
        each.start()
    long = torch.randn(6144, 6144, device="cuda", dtype=torch.bfloat16)
    pairs = [(torch.randn(n, device="cuda"), torch.empty(n, device="cuda")) for n in SIZES]
    truth = {x.numel(): [graph_us(x, y, config) for config in CONFIGS] for x, y in pairs}
    table = Table(
        "step",
        "kernel by graph, us",
        "told, us",
        "most apart, us",
        "%",
        "ends",
        title=device_name(options.busy),
    )
    for kind, before in KINDS.items():
        scale_kernel.cache.clear()

        def step(before: Any = before) -> None:
            for x, y in pairs:
                before(long)
                launch(x, y)

        step.__qualname__ = f"step, {kind}"
        tuned = contextual_autotune(search="online", max_slowdown=1.0, cache=False)(step)
        began = time.monotonic()
        n_calls = 0
        while not tuned.records and time.monotonic() - began < 40.0:
            tuned()
            n_calls += 1
            if n_calls % 8 == 0:
                torch.cuda.synchronize()
        for record in tuned.records:
            n = int(record.key.strip("[]").split(",")[0])
            told = [each.latency_ms * 1e3 for each in record.candidates if each.latency_ms]
            pairs_us = [
                (true, each.latency_ms * 1e3)
                for true, each in zip(truth[n], record.candidates, strict=True)
                if each.latency_ms
            ]
            if not pairs_us:
                table.add_row(kind, f"{truth[n][0]:.1f}", "not timed", "", "", record.reason)
                continue
            true, mine = max(
                pairs_us,
                key=lambda pair: min(abs(pair[1] - pair[0]) / 3, abs(pair[1] / pair[0] - 1) / 0.05),
            )
            table.add_row(
                kind,
                f"{true:.1f}",
                f"{mine:.1f}",
                f"{mine - true:+.1f}",
                f"{100 * (mine / true - 1):+.1f}",
                f"{n_calls} calls, {len(told)} of {len(CONFIGS)} timed",
            )
        if not tuned.records:
            table.add_row(kind, "", "", "", "", f"not tuned after {n_calls} calls")
    Console(width=140).print(table)
    for each in others:
        each.kill()


def device_name(n_busy: int) -> str:
    """The title."""
    return (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__},"
        f" {n_busy} busy processes"
    )


if __name__ == "__main__":
    main()
