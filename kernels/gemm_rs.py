"""GEMM-ReduceScatter: rows r of the sum over ranks of A[M, K / W] @ B[N, K / W].T on rank r, the
exchange hidden behind the product.

The step, as an object whose kernel `contextual_autotune` tunes (`GemmReduceScatter`), and as a
function whose exchange (push, pull or copy engines, where sums are made, on how many
multiprocessors, chunk by chunk) `autotune` tunes together with that kernel (`gemm_rs`). The memory
and the launches are in partials.py, the kernels in push_gemm.py and sum_parts.py, the command line
in cases.py.

    torchrun --nproc_per_node=2 kernels/gemm_rs.py --case check
    launch/launch.sh kernels/gemm_rs.py --case tune --shape 4096,4096,11008 --tuner function
    launch/launch.sh kernels/gemm_rs.py --case perf --shape 4096,4096,11008 --shape 8192,8192,28672
"""

from __future__ import annotations

import runpy
from pathlib import Path

# First: kernels are loaded once, under the module name that their records carry.
if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("program.py")))

import torch
import triton

from dist_tune import autotune
from kernels.operands import check_operands, key_fn, output_for
from kernels.partials import MOVES, ROW_PARALLEL, Exchange, Plan, RowParallelGemm


class GemmReduceScatter(RowParallelGemm):
    """One step of GEMM-ReduceScatter; M is a multiple of W.

    Products are accumulated and partial results summed in float32; each partial result is rounded
    once, to the type in which it travels (except the own one, where the product sums), and the sum
    once, to the operands' type.
    """

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None = None,
        exchange: Exchange | None = None,
        config: triton.Config | None = None,
    ) -> torch.Tensor:
        """C [M / W, N], written to `out` if given; `a` is [M, K / W], `b` [N, K / W].

        `config`, if given, is used for this call in place of the object's.
        """
        check_operands(a, b, ROW_PARALLEL)
        m, n = len(a), len(b)
        if m % self.n_ranks:
            raise ValueError(
                f"M must be a multiple of the {self.n_ranks} ranks, got A {list(a.shape)}"
            )
        c = output_for(a, (m // self.n_ranks, n), out)
        plan = Plan(
            m=m,
            n=n,
            n_parts=self.n_ranks,
            dtype=c.dtype,
            partial_dtype=self.partial_dtype or c.dtype,
            gathers=False,
        )
        exchange = exchange or exchanges()[0]
        return RowParallelGemm.run(self, plan, a, b, c, exchange=exchange, config=config)


def exchanges() -> list[Exchange]:
    """What a tuner tries: each way to travel and to sum, with two or three amounts of what it
    takes.
    """
    return [
        *(Exchange(move) for move in MOVES[:2]),
        *(
            Exchange("copy", reduction, 0, rows)
            for reduction in ("inside", "behind")
            for rows in (256, 1024)
        ),
        *(Exchange(move, "behind", 0, 128) for move in MOVES[:2]),
        *(Exchange(move, "beside", sms, 256) for move in ("push", "copy") for sms in (4, 8, 16)),
    ]


def config_space() -> list[dict[str, Exchange]]:
    """The exchanges as arguments of `gemm_rs`."""
    return [{"exchange": exchange} for exchange in exchanges()]


@autotune(config_space=config_space(), key_fn=key_fn, n_warmup=3, n_repeat=5)
def gemm_rs(
    a: torch.Tensor,
    b: torch.Tensor,
    ctx: GemmReduceScatter,
    exchange: Exchange | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """C [M / W, N], written to `out` if given, of `a` [M, K / W] and `b` [N, K / W]; the tuner
    chooses `exchange` and the product's config.

    Collective: all ranks of the group of `ctx` call it, and those are to be all ranks, or
    `autotune_pg` names their group. `ctx` holds symmetric memory; it is handed on as it is.
    """
    # Called by its class's name: a record counts for the code that it was made with, and an
    # argument's code is not looked at.
    return GemmReduceScatter.__call__(ctx, a, b, out, exchange)
