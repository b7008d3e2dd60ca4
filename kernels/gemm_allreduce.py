"""GEMM-AllReduce: the sum over ranks of A[M, K / W] @ B[N, K / W].T on all ranks, the exchange
hidden behind the product.

One-shot: each rank gets all partial results and sums all rows; least latency, for few rows.
Two-shot: each rank sums its part of the rows, as in gemm_rs.py, and sends the sum to all; least
bytes. The step is an object whose kernel `contextual_autotune` tunes (`GemmAllReduce`), and a
function for which `autotune` chooses algorithm and exchange together with that kernel
(`gemm_allreduce`).

    torchrun --nproc_per_node=2 kernels/gemm_allreduce.py --case check
    launch/launch.sh kernels/gemm_allreduce.py --case tune --shape 16,8192,8192 --tuner function
    launch/launch.sh kernels/gemm_allreduce.py --case perf --shape 16,8192,8192
"""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

# First: kernels are loaded once, under the module name that their records carry.
if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("program.py")))

import torch
import triton

from dist_tune import autotune
from kernels.operands import check_operands, key_fn, output_for
from kernels.partials import ROW_PARALLEL, Exchange, Plan, RowParallelGemm

Algorithm = Literal["one_shot", "two_shot"]
ONE_SHOT_ROWS = 128
"""Rows up to which one-shot is taken where a call does not say."""
ONE_SHOT_MAX_ROWS = 512
"""Rows up to which a tuner tries one-shot: beyond, its W times as many bytes are hopeless, and it
needs memory for all of them.
"""


class GemmAllReduce(RowParallelGemm):
    """One step of GEMM-AllReduce, with the same algorithm and the same exchange on all ranks.

    Products are accumulated and partial results summed in float32, by one rank or in the same order
    by all: all ranks get the same bits.
    """

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None = None,
        algorithm: Algorithm | None = None,
        exchange: Exchange | None = None,
        config: triton.Config | None = None,
    ) -> torch.Tensor:
        """C [M, N], written to `out` if given; `a` is [M, K / W], `b` [N, K / W].

        Where `algorithm` is not given, the number of rows says which. `config`, if given, is used
        for this call in place of the object's.
        """
        check_operands(a, b, ROW_PARALLEL)
        m, n = len(a), len(b)
        c = output_for(a, (m, n), out)
        algorithm = algorithm or ("one_shot" if m <= ONE_SHOT_ROWS else "two_shot")
        n_parts = self.n_ranks if algorithm == "two_shot" else 1
        plan = Plan(
            m=m,
            n=n,
            n_parts=n_parts,
            dtype=c.dtype,
            partial_dtype=self.partial_dtype or c.dtype,
            gathers=n_parts > 1,
        )
        exchange = exchange or exchanges(algorithm)[0]
        return RowParallelGemm.run(self, plan, a, b, c, exchange=exchange, config=config)


def exchanges(algorithm: Algorithm) -> list[Exchange]:
    """What a tuner tries with an algorithm; the first one is what an untuned step uses."""
    if algorithm == "one_shot":
        behind = [
            Exchange(move, "behind", 0, rows) for move in ("push", "pull") for rows in (8, 64)
        ]
        return [*behind, *(Exchange("push", "beside", sms, 8) for sms in (4, 16))]
    inside = [
        *(Exchange(move, "inside") for move in ("push", "pull")),
        *(Exchange("copy", "inside", 0, rows) for rows in (256, 512)),
    ]
    behind = [Exchange(move, "behind", 0, 128) for move in ("push", "pull", "copy")]
    return [
        *inside,
        *behind,
        *(Exchange(move, "beside", sms, 128) for move in ("push", "copy") for sms in (8, 16)),
    ]


def config_space() -> list[dict[str, Any]]:
    """Algorithms and exchanges, as arguments of `gemm_allreduce`."""
    return [
        {"algorithm": algorithm, "exchange": each}
        for algorithm in ("one_shot", "two_shot")
        for each in exchanges(algorithm)
    ]


def prune_fn(config: Mapping[str, Any], a: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    """One-shot for few rows alone, two-shot where each rank has a row to sum."""
    return len(a) <= ONE_SHOT_MAX_ROWS if config["algorithm"] == "one_shot" else len(a) > 1


@autotune(config_space=config_space(), key_fn=key_fn, prune_fn=prune_fn, n_warmup=3, n_repeat=5)
def gemm_allreduce(
    a: torch.Tensor,
    b: torch.Tensor,
    ctx: GemmAllReduce,
    algorithm: Algorithm | None = None,
    exchange: Exchange | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """C [M, N], written to `out` if given, of `a` [M, K / W] and `b` [N, K / W]; the tuner chooses
    all else.

    Collective: all ranks of the group of `ctx` call it, and those are to be all ranks, or
    `autotune_pg` names their group. `ctx` holds symmetric memory; it is handed on as it is.
    """
    # Called by its class's name: a record counts for the code that it was made with, and an
    # argument's code is not looked at.
    return GemmAllReduce.__call__(ctx, a, b, out, algorithm=algorithm, exchange=exchange)
