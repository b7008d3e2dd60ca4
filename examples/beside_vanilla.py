"""The same step tuned by dist_tune and by vanilla `triton.autotune`, in one run: choices kept
apart, cold caches, times.

Knows steps as functions to call and kernels by the package that they lie in; knows nothing of how a
step works.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import triton
from rich.console import Console
from rich.table import Column, Table
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction, KernelInterface

from dist_tune import TuningRecord
from kernels import harness

Step = Callable[[], object]
Choices = list[dict[Any, Any]]
"""What each kernel's cache holds: tuning key -> config."""
PHASES = ("discover", "compile", "race", "finals", "apply")
N_HOST_CALLS = 20
HEAD_START_CYCLES = 40_000_000
"""About 20 ms: longer than a host takes to queue a step of a hundred small kernels and its backward
pass.
"""


def kernels_in(package: str, kind: type[Any]) -> list[Any]:
    """Kernels of a kind in the loaded modules of a package, in a fixed order; wrappers such as
    heuristics are looked through.
    """
    found: dict[int, Any] = {}
    for name in sorted(sys.modules):
        if f"{name}.".startswith(f"{package}."):
            for value in list(vars(sys.modules[name]).values()):
                while isinstance(value, KernelInterface):
                    if isinstance(value, kind):
                        found[id(value)] = value
                    value = getattr(value, "fn", None)  # from the wrapper to what it wraps
    return list(found.values())


def choices_in(package: str) -> Choices:
    """The configs that the kernels of a package use now."""
    return [dict(kernel.cache) for kernel in kernels_in(package, Autotuner)]


def choose(package: str, choices: Choices) -> None:
    """Let the kernels of a package use these configs, and no others."""
    for kernel, configs in zip(kernels_in(package, Autotuner), choices, strict=True):
        kernel.cache.clear()
        kernel.cache.update(configs)


def forget(package: str) -> None:
    """Let the kernels of a package have no configs in use, so that each tunes at its next
    launch.
    """
    for kernel in kernels_in(package, Autotuner):
        kernel.cache.clear()


@contextmanager
def cold(package: str) -> Iterator[None]:
    """No config is in use, nothing is compiled or loaded, and the ranks share a new folder as
    Triton's cache. Collective.
    """
    forget(package)
    for kernel in kernels_in(package, JITFunction):
        kernel.device_caches.clear()
    folder: list[Any] = [tempfile.mkdtemp(prefix="triton-")]
    own, used = folder[0], triton.knobs.cache.dir
    dist.broadcast_object_list(folder)
    triton.knobs.cache.dir = folder[0]
    try:
        yield
    finally:
        triton.knobs.cache.dir = used
        dist.barrier()
        shutil.rmtree(own, ignore_errors=True)


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def slowest(value: float, device: torch.device) -> float:
    """MAX over ranks. Collective."""
    told = torch.tensor([value], device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return float(told)


def first_call_s(step: Step, device: torch.device) -> float:
    """Seconds of a call until its device is done, MAX over ranks. Collective."""
    wait(device)
    dist.barrier()
    began = time.perf_counter()
    step()
    wait(device)
    return slowest(time.perf_counter() - began, device)


def host_ms(step: Step, device: torch.device) -> float:
    """Milliseconds until a call returns, its device idle before: the median, MAX over ranks.

    Collective.
    """
    samples = []
    for _ in range(N_HOST_CALLS):
        wait(device)
        began = time.perf_counter()
        step()
        samples.append((time.perf_counter() - began) * 1e3)
    return slowest(statistics.median(samples), device)


def worst(
    errors: dict[str, float], limit: float, reason: str, device: torch.device
) -> tuple[bool, str]:
    """Whether the largest error of all ranks is within its limit, and the end of a line that says
    so. Collective.
    """
    name = max(
        errors, key=lambda each: errors[each] if errors[each] == errors[each] else float("inf")
    )
    error = slowest(torch.tensor(errors[name]).nan_to_num(nan=float("inf")).item(), device)
    told = f"largest relative error {error:.1e} ({name} on rank 0), limit {limit:.0e}: {reason}"
    verdict = "ok" if error <= limit else "FAILED"
    return error <= limit, f"{told}; {verdict}"


def say(console: Console, text: str) -> None:
    """Print one line as it is, however long."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def phases(records: Sequence[TuningRecord], seconds: float) -> str:
    """Sites, configs and seconds by phase of the tuning that the records are of."""
    spent = ", ".join(f"{name} {getattr(records[0].spent, name):.2f}" for name in PHASES)
    counts = (
        f"{len(records)} sites, {sum(len(each.candidates) for each in records)} configs,"
        f" {records[0].n_replays} replays"
    )
    return f"{counts}, first call {seconds:.2f} s ({spent})"


def site_table(records: Sequence[TuningRecord]) -> Table:
    """A line for each site: its winner and its time."""
    table = Table("kernel", "key", "configs", "failed", "kernel ms", "winner", title="sites")
    for each in records:
        failed = sum(candidate.failure is not None for candidate in each.candidates)
        ms = "-" if each.best.latency_ms is None else f"{each.best.latency_ms:.4f}"
        table.add_row(
            each.kernel.rpartition(".")[2],
            each.key,
            str(len(each.candidates)),
            str(failed),
            ms,
            each.best.config,
        )
    return table


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give a parser --vanilla, for `perf`."""
    text = (
        "for perf: vanilla starts with nothing compiled, or finds compiled what dist_tune has; cold"
        " if not given, which takes minutes"
    )
    parser.add_argument("--vanilla", choices=["cold", "compiled"], default="cold", help=text)


def perf(package: str, tuned: Any, plain: Step, vanilla: str, console: Console) -> None:
    """Tune the step in both ways, time both choices in turns, and print a table and a line.

    Collective.
    """
    device, seconds = torch.device("cuda" if torch.cuda.is_available() else "cpu"), {}
    # NCCL's and cuBLAS's own first calls are none of a tuner's.
    dist.all_reduce(torch.ones(16, 16, device=device) @ torch.ones(16, 16, device=device))
    with cold(package):
        seconds["dist_tune"] = first_call_s(tuned, device)
        choices = {"dist_tune": choices_in(package)}
        if vanilla == "compiled":
            forget(package)
            seconds["triton.autotune"] = first_call_s(plain, device)
    if vanilla == "cold":
        with cold(package):
            seconds["triton.autotune"] = first_call_s(plain, device)
    choices["triton.autotune"] = choices_in(package)

    def call(name: str, step: Step) -> None:
        choose(package, choices[name])
        step()

    steps = {"dist_tune": tuned, "triton.autotune": plain}
    runs: dict[str, Step] = {name: partial(call, name, step) for name, step in steps.items()}
    for run in (*runs.values(), *runs.values()):
        run()
    device_ms = harness.aligned_ms(runs, head_start_cycles=HEAD_START_CYCLES)
    queued_ms = {}
    for name, step in steps.items():
        choose(package, choices[name])
        queued_ms[name] = host_ms(step, device)
    columns = [
        Column("tuner", no_wrap=True),
        *(
            Column(each, justify="right")
            for each in ("Triton cache", "first call s", "device ms", "host ms")
        ),
    ]
    table = Table(
        *columns,
        title=(
            "first call: until the device is done; device ms: host queued ahead; medians, MAX over"
            " ranks"
        ),
    )
    for name in steps:
        state = "cold" if name == "dist_tune" else vanilla
        table.add_row(
            name, state, f"{seconds[name]:.2f}", f"{device_ms[name]:.4f}", f"{queued_ms[name]:.3f}"
        )
    console.print(table)
    ours, theirs = device_ms["dist_tune"], device_ms["triton.autotune"]
    gain = (
        f"first call {seconds['dist_tune']:.2f} s, vanilla's ({vanilla})"
        f" {seconds['triton.autotune']:.2f} s"
    )
    say(
        console,
        f"perf: {gain}; step on the device {ours:.4f} ms, with vanilla's choice {theirs:.4f} ms,"
        f" {theirs / ours:.3f} x",
    )
