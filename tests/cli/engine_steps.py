"""Steps whose records become files of engines, tuned on the fake driver: a kernel with the fields
of fused_moe_kernel, and one of FLA.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import triton
import triton.language as tl

from dist_tune import contextual_autotune
from dist_tune.testing import FakeH200, install_fake_driver

BLOCKS = {"BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1}


@triton.autotune(
    configs=[
        triton.Config({"BLOCK_SIZE_M": block, **BLOCKS}, num_warps=warps, num_stages=3)
        for block in (16, 32)
        for warps in (4, 8)
    ],
    key=["num_valid_tokens", "N"],
)
@triton.jit
def fused_moe_kernel(
    c_ptr,
    N,
    num_valid_tokens,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    tl.store(
        c_ptr + at * N,
        at.to(tl.float32) + BLOCK_SIZE_N + BLOCK_SIZE_K + GROUP_SIZE_M,
        mask=at < num_valid_tokens,
    )


@contextual_autotune(is_dist=False)
def moe_step(n_tokens: int) -> torch.Tensor:
    """One layer at a number of tokens."""
    c = torch.empty(n_tokens * 8)
    fused_moe_kernel[lambda config: (triton.cdiv(n_tokens, config["BLOCK_SIZE_M"]),)](
        c, 8, n_tokens
    )
    return c


def fla_kernel() -> tuple[Any, Any]:
    """A kernel of FLA that looks into FLA_CONFIG_DIR, and its launch at a length."""
    from fla.ops.utils.cumsum import chunk_local_cumsum_scalar, chunk_local_cumsum_scalar_kernel

    return chunk_local_cumsum_scalar_kernel.fn, lambda n: chunk_local_cumsum_scalar(
        torch.ones(1, n, 4), chunk_size=64
    )


def main() -> None:
    """``moe`` and ``fla`` tune; ``load`` launches the kernel of FLA without dist_tune, and prints
    the config that FLA has found.
    """
    parser = argparse.ArgumentParser(
        description="tune or launch an engine's kernel on the fake driver"
    )
    parser.add_argument("what", choices=("moe", "fla", "load"))
    what = parser.parse_args().what
    # Before the fake driver: FLA would ask for its CUDA.
    kernel, launch = (fused_moe_kernel, moe_step) if what == "moe" else fla_kernel()
    install_fake_driver()
    FakeH200.launch_ms = staticmethod(lambda src, metadata: 0.5 if metadata.num_warps == 8 else 2.0)
    if what == "moe":
        for n_tokens in (16, 64):
            launch(n_tokens)
        return
    if what == "fla":
        contextual_autotune(is_dist=False)(launch)(256)
    else:
        kernel._bench = None  # Triton's tuner would fail here
        launch(256)
        print({key: config.all_kwargs() for key, config in kernel.cache.items()})


if __name__ == "__main__":
    main()
