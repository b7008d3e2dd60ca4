"""Steps that change what they are given, and ranks whose calls differ, on all ranks that torchrun starts: results and peaks of memory.

- lengths: 50 steps whose lengths differ between ranks, with a collective inside; every sum is checked
- optimizer: three steps of Adam over a model with a tuned kernel in it, bitwise beside the same steps without a tuner
- alone: calls that are new on one rank alone, and what asking the others costs it
- late: a rank comes to its first call later than the deadline, and the timeouts of the groups are seen from inside the step
- layers: a step of many layers with temporaries under ``restore_value``; growth of memory beside untuned and vanilla Triton
- gla: forward and backward of flash-linear-attention's ``chunk_gla`` (fla-core), a public library; peak beside untuned

    launch/launch.sh benchmarks/bench_side_effects.py
    launch/launch.sh benchmarks/bench_side_effects.py --case gla
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton  # isort: skip
import triton.language as tl  # isort: skip

from dist_tune import contextual_autotune
from kernels.harness import join_ranks

CASES = ("lengths", "optimizer", "alone", "late", "layers", "gla")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = [1 << k for k in (12, 13, 14, 15, 16, 17)]


@triton.jit
def scale_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Two times x."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < n
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=keep) * 2.0, mask=keep)


@triton.jit
def add_to_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Adds x to y."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < n
    tl.store(y_ptr + at, tl.load(y_ptr + at, mask=keep) + tl.load(x_ptr + at, mask=keep), mask=keep)


def autotuned(kernel: Any, **options: Any) -> Any:
    """The kernel with a few block sizes, made anew."""
    blocks = (1024, 2048, 4096, 8192) if DEVICE == "cuda" else (16384, 65536)
    return triton.autotune([triton.Config({"BLOCK": block}) for block in blocks], key=["n"], **options)(kernel)


def launch(kernel: Any, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    """Launch it over all of ``x``."""
    y = torch.empty_like(x) if y is None else y
    kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
    return y


def lengths(rank: int, n_ranks: int) -> str:
    """Steps of different lengths."""
    kernel = autotuned(scale_kernel)

    @contextual_autotune(is_dist=True, cache=False)
    def step(x: torch.Tensor) -> float:
        total = launch(kernel, x).sum()
        dist.all_reduce(total)
        return float(total)

    draws = [random.Random(f"rank {r}") for r in range(n_ranks)]
    began, n_wrong, slowest_s = time.perf_counter(), 0, 0.0
    for _ in range(50):
        sizes = [draw.choice(LENGTHS) for draw in draws]
        before = time.perf_counter()
        n_wrong += step(torch.ones(sizes[rank], device=DEVICE)) != 2.0 * sum(sizes)
        slowest_s = max(slowest_s, time.perf_counter() - before)
    assert n_wrong == 0, f"{n_wrong} wrong sums"
    return f"50 right sums in {time.perf_counter() - began:.2f} s, the longest step {slowest_s:.2f} s, {len(kernel.cache)} keys tuned here"


class _Model(torch.nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(n, n), torch.nn.Linear(n, 1)
        self.kernel = autotuned(scale_kernel)
        self.register_buffer("n_seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n_seen.add_(1)  # type: ignore[operator]
        return self.last(self.first(launch(self.kernel, x))).square().mean()  # type: ignore[no-any-return]


def optimizer(rank: int, n_ranks: int) -> str:
    """Optimizer steps inside the step."""
    ends: list[Any] = []
    for is_tuned in (True, False):
        model = _Model(256).to(DEVICE)
        adam = torch.optim.Adam(model.parameters(), lr=0.01)

        def step(x: torch.Tensor, model: Any = model, adam: Any = adam) -> float:
            adam.zero_grad()
            loss = model(x)
            loss.backward()
            for each in model.parameters():
                dist.all_reduce(each.grad)
            adam.step()
            return float(loss.detach())

        run = contextual_autotune(is_dist=True, cache=False)(step) if is_tuned else step
        if not is_tuned:
            model.kernel.cache[(256 * 64, "torch.float32", "torch.float32")] = model.kernel.configs[0]
        losses = [run(torch.ones(64, 256, device=DEVICE)) for _ in range(3)]
        ends.append([losses, [each.detach().clone() for each in (*model.parameters(), *model.buffers())]])
    assert ends[0][0] == ends[1][0], (ends[0][0], ends[1][0])
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))
    return f"three steps, losses {', '.join(f'{loss:.6f}' for loss in ends[0][0])}: bitwise as without a tuner"


def alone(rank: int, n_ranks: int) -> str:
    """Calls that are new on the last rank alone, and on which nothing waits in the step."""
    kernel = autotuned(scale_kernel)
    step = contextual_autotune(is_dist=True, cache=False)(lambda x: launch(kernel, x))
    step(torch.ones(LENGTHS[0], device=DEVICE))
    seconds = []
    for n in LENGTHS[1:]:
        dist.barrier()
        before = time.perf_counter()
        step(torch.ones(n if rank == n_ranks - 1 else LENGTHS[0], device=DEVICE))
        seconds.append(time.perf_counter() - before)
    told: list[Any] = [None] * n_ranks
    dist.all_gather_object(told, [round(each * 1e3) for each in seconds])
    return f"{len(seconds)} calls that are new on rank {n_ranks - 1}: {told[-1]} ms there, {told[0]} ms on rank 0"


def late(rank: int, n_ranks: int) -> str:
    """A rank that is late."""
    os.environ["DIST_TUNE_DEADLINE_S"] = "2"
    kernel, seen = autotuned(scale_kernel), set()
    backend: Any = dist.group.WORLD._get_backend(torch.device(DEVICE))  # type: ignore[union-attr]

    @contextual_autotune(is_dist=True, cache=False)
    def step(x: torch.Tensor) -> float:
        seen.add(backend.options._timeout.total_seconds())
        total = launch(kernel, x).sum()
        dist.all_reduce(total)
        return float(total)

    own_s = backend.options._timeout.total_seconds()
    began = time.perf_counter()
    time.sleep(6.0 if rank == 1 else 0.0)
    assert step(torch.ones(4096, device=DEVICE)) == 2.0 * 4096 * n_ranks
    assert backend.options._timeout.total_seconds() == own_s
    del os.environ["DIST_TUNE_DEADLINE_S"]
    return (
        f"rank 1 came 6 s late, deadline 2 s: {time.perf_counter() - began:.2f} s; timeouts in the step {sorted(seen)} s, then {own_s:g} s"
    )


def _grown_bytes(run: Any) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def layers(rank: int, n_ranks: int) -> str:
    """Temporaries under restore_value."""
    if DEVICE != "cuda":
        return "needs a GPU"
    n, grown = 1 << 22, {}
    for name in ("untuned", "tuned", "vanilla"):
        kernel = autotuned(add_to_kernel, restore_value=["y_ptr"])
        if name == "untuned":
            kernel.cache[(n, "torch.float32", "torch.float32")] = kernel.configs[0]

        def step(x: torch.Tensor, kernel: Any = kernel) -> torch.Tensor:
            for _ in range(100):
                x = launch(kernel, x, torch.zeros_like(x))
            return x

        run = contextual_autotune(is_dist=True, cache=False)(step) if name == "tuned" else step
        x = torch.ones(n, device=DEVICE)
        grown[name] = _grown_bytes(lambda run=run, x=x: run(x)) / 2**20
    return ", ".join(f"{name} {mib:.0f} MiB" for name, mib in grown.items())


def gla(rank: int, n_ranks: int) -> str:
    """Linear attention, forward and backward."""
    if DEVICE != "cuda":
        return "needs a GPU"
    from fla.ops.gla import chunk_gla

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> float:
        out, _ = chunk_gla(q, k, v, g)
        out.sum().backward()
        for each in (q, k, v):
            dist.all_reduce(each.grad)
        return float(out.detach().float().sum())

    def arguments() -> list[torch.Tensor]:
        torch.manual_seed(0)
        made = [torch.randn(2, 4096, 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
        gates = torch.nn.functional.logsigmoid(torch.randn(2, 4096, 8, 128, device=DEVICE, dtype=torch.float32))
        return [each.requires_grad_() for each in (*made, gates)]

    given = arguments()
    held = torch.cuda.memory_allocated()
    began = time.perf_counter()
    tuned = contextual_autotune(is_dist=True, cache=False)(step)
    tuned_bytes = _grown_bytes(lambda: tuned(*given))
    seconds = time.perf_counter() - began
    gradients = [each.grad.clone() for each in given if each.grad is not None]
    again = arguments()
    untuned_bytes = _grown_bytes(lambda: step(*again))  # with the winners, which are in the kernels now
    others = [each.grad for each in again if each.grad is not None]
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(gradients, others, strict=True))
    ratio = tuned_bytes / untuned_bytes
    log = Path(os.environ.get("DIST_TUNE_LOG_DIR", ".autotune_logs")) / f"rank-{rank}.log"
    first_bytes = int(re.findall(r"peak_memory_bytes first_run=(\d+)", log.read_text())[-1]) - held
    peaks = f"peak while tuning {tuned_bytes / 2**20:.0f} MiB, of its first run {first_bytes / 2**20:.0f} MiB"
    peaks += f", with the winners alone {untuned_bytes / 2**20:.0f} MiB, {ratio:.3f} x"
    return f"{len(tuned.records)} sites in {seconds:.1f} s, {peaks}; gradients within {worst:.1e} of an untuned run's"


def main() -> None:
    """Run the cases on all ranks; rank 0 prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    chosen = parser.parse_args().case or list(CASES)
    _, console = join_ranks()
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    for name in chosen:
        dist.barrier()
        console.print(f"{name}: {globals()[name](rank, n_ranks)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
