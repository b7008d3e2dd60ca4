# ruff: noqa: D103, T201  # a script that prints
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""What compiling costs on the host, on the fake H200 driver of the tests.

    python logs/compile-cpu/measure.py stages summary sharing

``stages`` compiles 216 configs of the AllGather-GEMM one after the other and writes stages.txt, of which ``summary`` tells the sums;
``sharing`` compiles 16 configs of a small GEMM serially, in threads, and on two ranks, five times in turns.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import triton
import triton.language as tl

from dist_tune.compiler import Candidate, Compiler, compile_cost
from dist_tune.runtime import Launch
from dist_tune.testing import install_fake_driver, on_ranks, values

LIMIT_BYTES = 232448
HERE = Path(__file__).parent
STAGES = ("front_end", "ttir", "ttgir", "llir", "ptx", "cubin")


@triton.jit
def gemm_kernel(a, b, c, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    row, col, k = (
        tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M),
        tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N),
        tl.arange(0, BLOCK_K),
    )
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        acc = tl.dot(tl.load(a + row[:, None] * K + start + k[None, :]), tl.load(b + (start + k)[:, None] * N + col[None, :]), acc)
    tl.store(c + row[:, None] * N + col[None, :], acc.to(tl.bfloat16))


def small_configs() -> list[triton.Config]:
    return [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 64}, num_warps=warps, num_stages=stages)
        for m in (64, 128)
        for n in (64, 128)
        for warps in (4, 8)
        for stages in (3, 4)
    ]


def launch() -> Launch:
    x = torch.zeros(64, dtype=torch.bfloat16)
    kernel = triton.autotune(configs=small_configs(), key=["M", "N", "K"])(gemm_kernel)
    return Launch(kernel, (x, x, x, 4096, 4096, 4096), {"grid": (1,), "warmup": False})


def cold() -> None:
    """An empty cache on disk and in memory; what is paid once per process is paid."""
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
    Candidate(launch(), triton.Config({"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16})).compilation.run(None)
    gemm_kernel.device_caches.clear()


def serial_s() -> float:
    cold()
    began = time.perf_counter()
    for config in small_configs():
        candidate = Candidate(launch(), config)
        candidate.compilation.run(None)
        candidate.load()
    return time.perf_counter() - began


def threads_s() -> float:
    cold()
    compiler, configs = Compiler(2, 60), small_configs()
    began = time.perf_counter()
    compiler.begin("site", launch(), configs, range(len(configs)))
    for index in range(len(configs)):
        compiler.load("site", index)
    compiler.close()
    return time.perf_counter() - began


def on_rank(rank: int, does_share: bool) -> tuple[float, list[Any]]:
    from dist_tune import contextual_autotune

    if not does_share:
        os.environ["TRITON_CACHE_DIR"] += f"/{rank}"
    each = launch()
    step = contextual_autotune(is_dist=True, n_repeat=1, n_warmup=0)(lambda: each.kernel.run(*each.arguments[0], **each.arguments[1]))
    step()
    spent = step.records[0].spent
    return spent.discover + spent.compile, [candidate.failure for candidate in step.records[0].candidates]


def ranks_s(does_share: bool) -> float:
    got = values(on_ranks(2, on_rank, does_share, mode="fake", env={"DIST_TUNE_DEADLINE_S": "60"}, timeout_s=300))
    assert all(failure is None for _, failures in got for failure in failures)
    return max(float(seconds) for seconds, _ in got)


def sharing() -> None:
    measures = {
        "one after the other": serial_s,
        "2 threads": threads_s,
        "2 ranks, a cache folder each": lambda: ranks_s(False),
        "2 ranks, one cache folder": lambda: ranks_s(True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(5):  # in turns: the machine is not quiet
        for name, measure in measures.items():
            seconds[name].append(measure())
    for name, each in seconds.items():
        print(f"{name:30} median {np.median(each):5.2f} s, of " + " ".join(f"{one:.2f}" for one in sorted(each)), flush=True)


def stages() -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from kernels import shard_gemm

    cold()
    x = torch.zeros(4096, dtype=torch.bfloat16)
    square = [TensorDescriptor(x, [64, 64], [64, 1], [1, 1]) for _ in range(3)]
    args = (
        *square,
        TensorDescriptor(x, [4, 16, 64], [1024, 64, 1], [1, 1, 1]),
        x,
        torch.zeros(4, dtype=torch.int32),
        4096,
        11008,
        4096,
        3,
        1,
    )
    kwargs = {"WORLD": 4, "INTERPRETED": False, "grid": (1,), "warmup": False}
    seen = SimpleNamespace(stages=[], shared=0)

    def listener(*, metadata: dict[str, Any], times: Any, **facts: Any) -> None:
        seen.stages = [times.ir_initialization, *(us for _, us in times.lowering_stages)]
        seen.shared = metadata["shared"]

    triton.knobs.compilation.listener = listener
    lines = ["BLOCK_M BLOCK_N BLOCK_K stages warps shared_bytes seconds " + " ".join(f"{name}_ms" for name in STAGES)]
    for m in (64, 128, 256):
        for n in (64, 128, 256):
            for k in (32, 64, 128):
                for n_stages in (2, 3, 4, 5):
                    for warps in (4, 8):
                        config = shard_gemm.make_config(m, n, k, warps=warps, stages=n_stages)
                        candidate = Candidate(Launch(shard_gemm.ag_gemm_kernel, args, kwargs), config)
                        began = time.perf_counter()
                        candidate.compilation.run(None)
                        seconds = time.perf_counter() - began
                        by_stage = " ".join(f"{us / 1e3:.0f}" for us in seen.stages)
                        lines.append(f"{m} {n} {k} {n_stages} {warps} {seen.shared} {seconds:.3f} {by_stage}")
    (HERE / "stages.txt").write_text("\n".join(lines) + "\n")


def summary() -> None:
    table = np.loadtxt(HERE / "stages.txt", skiprows=1)
    shared, seconds, late_s = table[:, 5], table[:, 6], table[:, -2:].sum(axis=1) / 1e3
    large = shared > LIMIT_BYTES
    configs = [triton.Config({"M": int(r[0]), "N": int(r[1]), "K": int(r[2])}, num_stages=int(r[3]), num_warps=int(r[4])) for r in table]
    compile_costs = np.array([compile_cost(config) for config in configs])

    def place(values: Any) -> Any:
        """Of each among all, equal ones alike."""
        return np.array([(values < each).sum() + ((values == each).sum() - 1) / 2 for each in values])

    print(
        f"{len(table)} configs {seconds.sum():.0f} s; {large.sum()} need more than {LIMIT_BYTES} bytes: {seconds[large].sum():.0f} s,",
        end=" ",
    )
    print(f"of which PTX and ptxas {late_s[large].sum():.0f} s")
    print("by stage: " + ", ".join(f"{name} {s:.0f} s" for name, s in zip(STAGES, table[:, 7:].sum(axis=0) / 1e3, strict=True)))
    print(f"one config: median {np.median(seconds):.2f} s, longest {seconds.max():.2f} s")
    print(f"rank correlation of the estimated effort with the seconds: {np.corrcoef(place(compile_costs), place(seconds))[0, 1]:.2f}")


if __name__ == "__main__":
    install_fake_driver()
    print(f"triton {triton.__version__}, torch {torch.__version__}, {os.cpu_count()} cores", flush=True)
    for name in sys.argv[1:]:
        {"stages": stages, "sharing": sharing, "summary": summary}[name]()
