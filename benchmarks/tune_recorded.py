# ruff: noqa: D103  # a script that prints
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Seconds of a tuning of 216 configs by racing and by guided search: real compilation, launches of
the recorded times. No GPU.

python benchmarks/tune_recorded.py

The kernel is a plain GEMM with the configs of the recorded AllGather-GEMM; each launch takes the
time recorded for its config, and fails where that one did not fit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
import triton.language as tl

from benchmarks.timing_tables import load_tables
from dist_tune import contextual_autotune
from dist_tune.search import NOT_TRIED
from dist_tune.testing import FakeH200, on_ranks, values

TABLE = "tuning-4xH200-8192x7168x8192"


@triton.jit
def gemm_kernel(
    a, b, c, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    row, col, k = (
        tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M),
        tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N),
        tl.arange(0, BLOCK_K),
    )
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        acc = tl.dot(
            tl.load(a + row[:, None] * K + start + k[None, :]),
            tl.load(b + (start + k)[:, None] * N + col[None, :]),
            acc,
        )
    tl.store(c + row[:, None] * N + col[None, :], acc.to(tl.bfloat16))


def recorded() -> tuple[list[triton.Config], dict[tuple[int, ...], float]]:
    """The configs of the table in its order, and milliseconds by block sizes, warps and stages."""
    configs, ms = [], {}
    for row in load_tables()[TABLE].rows:
        fields = dict(word.split("=") for word in row.config.split())
        blocks = {name: int(fields[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")}
        warps, stages = int(fields["num_warps"]), int(fields["num_stages"])
        configs.append(triton.Config(blocks, num_warps=warps, num_stages=stages))
        if row.ranks_ms:
            ms[*blocks.values(), warps, stages] = max(row.ranks_ms)
    return configs, ms


def tuned(rank: int, search: Any) -> Any:
    configs, known_ms = recorded()

    def launch_ms(src: Any, metadata: Any) -> float:
        constants = {src.fn.arg_names[place]: value for (place,), value in src.constants.items()}
        place = (
            *(constants[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")),
            metadata.num_warps,
            metadata.num_stages,
        )
        if place not in known_ms:
            raise triton.OutOfResources(
                FakeH200.shared_limit_bytes + 1, FakeH200.shared_limit_bytes, "shared memory"
            )
        return known_ms[place]

    FakeH200.launch_ms = staticmethod(launch_ms)
    kernel = triton.autotune(configs=configs, key=["M", "N", "K"])(gemm_kernel)
    a, b, c = (torch.zeros(256, 256, dtype=torch.bfloat16) for _ in range(3))
    step = contextual_autotune(is_dist=True, search=search, cache=False)(
        lambda: kernel[(1,)](a, b, c, 256, 256, 256)
    )
    step()
    (record,) = step.records
    # At least to the need of shared memory.
    n_compiled = sum(each.left != NOT_TRIED for each in record.candidates)
    return (
        record.seconds,
        record.spent.model_dump(),
        n_compiled,
        record.n_replays,
        record.best.latency_ms,
        record.best.config,
    )


def main() -> None:
    best_ms = min(max(row.ranks_ms) for row in load_tables()[TABLE].rows if row.ranks_ms)
    for search in ("guided", "racing"):
        env = {"TRITON_DEFAULT_FP_FUSION": "1", "DIST_TUNE_DEADLINE_S": "60"}
        seconds, spent, n_compiled, n_replays, latency_ms, config = values(
            on_ranks(2, tuned, search, mode="fake", timeout_s=500.0, env=env)
        )[0]
        phases = " ".join(
            f"{name}={spent[name]:.1f}" for name in ("discover", "compile", "race", "finals")
        )
        print(
            f"{search}: {seconds:.1f} s ({phases}), {n_compiled} of 216 compiled, {n_replays}"
            f" replays, winner {latency_ms:.3f} ms (best recorded {best_ms:.3f}): {config}",
            flush=True,
        )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    main()
