"""Whether tunings of one step agree where the host is slower than the device: several tunings, and the step's device time with each choice.

- gla: forward and backward of flash-linear-attention's ``chunk_gla`` (fla-core), gradients all-reduced; 11 sites
- small: 15 small kernels in a row, and an all-reduce
- slow-host: the same, with a millisecond of Python before each kernel

All choices are timed in turn: host queued ahead, ranks aligned, the slowest rank's median. Nothing is compiled after the first tuning.
The first choice is timed once more under another name: what the two differ by is noise.

    launch/launch.sh benchmarks/bench_choices.py
    launch/launch.sh benchmarks/bench_choices.py --case small --tunings 3
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton  # isort: skip
import triton.language as tl  # isort: skip
from rich.table import Table
from triton.runtime.autotuner import Autotuner

from dist_tune import contextual_autotune
from examples.beside_vanilla import HEAD_START_CYCLES, kernels_in
from kernels import harness
from kernels.harness import join_ranks

IS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_GPU else "cpu"
CASES = ("gla", "small", "slow-host")
N_SMALL = 15
AGAIN = "0 again"
Step = Callable[[], object]


@triton.jit
def scale_add_kernel(x_ptr, y_ptr, n, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """Y += SCALE * x."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < n
    tl.store(y_ptr + at, tl.load(y_ptr + at, mask=keep) + SCALE * tl.load(x_ptr + at, mask=keep), mask=keep)


def small(python_s: float = 0.0) -> tuple[Step, list[Any]]:
    """The step of small kernels, each after ``python_s`` seconds of the host's own, and the kernels."""
    blocks, n = ((256, 512, 1024, 2048, 4096), 1 << 18) if IS_GPU else ((4096, 8192), 1 << 13)
    configs = [triton.Config({"BLOCK": block}, num_warps=warps) for block in blocks for warps in ((2, 4, 8) if IS_GPU else (4,))]
    kernels = [triton.autotune(configs, key=["n"])(scale_add_kernel) for _ in range(N_SMALL)]
    x, y = torch.randn(n, device=DEVICE), torch.empty(n, device=DEVICE)

    def step() -> object:
        y.zero_()
        for k, kernel in enumerate(kernels):
            n_own = n - 16 * k  # a key of its own, so that each is a site
            until = time.perf_counter() + python_s
            while time.perf_counter() < until:
                pass
            kernel[lambda meta, n_own=n_own: (triton.cdiv(n_own, meta["BLOCK"]),)](x, y, n_own, SCALE=k + 1)
        total = y.sum()
        dist.all_reduce(total)
        return total

    return step, kernels


def gla() -> tuple[Step, list[Any]]:
    """The step of the library, and its kernels."""
    from fla.ops.gla import chunk_gla

    torch.manual_seed(0)
    made = [torch.randn(2, 4096, 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    gates = torch.nn.functional.logsigmoid(torch.randn(2, 4096, 8, 128, device=DEVICE, dtype=torch.float32))
    given = [each.requires_grad_() for each in (*made, gates)]

    def step() -> None:
        for each in given:
            each.grad = None
        out, _ = chunk_gla(*given)
        out.sum().backward()
        for each in given:
            dist.all_reduce(each.grad)

    return step, kernels_in("fla", Autotuner)


def choose(kernels: list[Any], configs: list[dict[Any, Any]]) -> None:
    """Let the kernels use these configs, and no others."""
    for kernel, cache in zip(kernels, configs, strict=True):
        kernel.cache.clear()
        kernel.cache.update(cache)


def run(name: str, n_tunings: int) -> Table:
    """Tune a step several times, and time all choices in turn."""
    step, kernels = gla() if name == "gla" else small(1e-3 if name == "slow-host" else 0.0)
    choices, rows = [], []
    for _ in range(n_tunings):
        choose(kernels, [{}] * len(kernels))
        tuned = contextual_autotune(is_dist=True, cache=False)(step)
        began = time.perf_counter()
        tuned()
        weights = [each.closure_weight for each in tuned.records]
        rows.append((f"{time.perf_counter() - began:.2f}", str(tuned.records[0].n_replays), f"{max(weights):.2f}"))
        choices.append([dict(kernel.cache) for kernel in kernels])

    def with_choice(k: int) -> Step:
        def chosen() -> object:
            choose(kernels, choices[k])
            return step()

        return chosen

    runs = {f"{k}": with_choice(k) for k in range(n_tunings)} | {AGAIN: with_choice(0)}
    for each in runs.values():
        each()  # nothing is loaded in what is timed
    times_ms = harness.aligned_ms(runs, head_start_cycles=HEAD_START_CYCLES) if IS_GPU else dict.fromkeys(runs, 1.0)
    noise = times_ms.pop(AGAIN) / times_ms["0"] - 1
    best_ms = min(times_ms.values())
    worst = max(times_ms.values()) / best_ms - 1
    n_different = len({repr([sorted((str(key), str(value)) for key, value in each.items()) for each in choice]) for choice in choices})
    table = Table(title=f"{name}: {n_tunings} tunings, {n_different} different choices, the worst {worst:+.2%}; 0 again {noise:+.2%}")
    for title in ("tuning", "seconds", "replays", "largest closure weight", "device ms", "over the best"):
        table.add_column(title, justify="right")
    for k, row in enumerate(rows):
        ms = times_ms[f"{k}"]
        table.add_row(f"{k}", *row, f"{ms:.4f}", f"{ms / best_ms - 1:+.2%}")
    return table


def main() -> None:
    """Print a table for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--tunings", type=int, default=10)
    options = parser.parse_args()
    _, console = join_ranks()
    for name in options.case or CASES:
        if name == "gla" and not IS_GPU:
            console.print("gla needs a GPU")
            continue
        console.print(run(name, options.tunings))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
