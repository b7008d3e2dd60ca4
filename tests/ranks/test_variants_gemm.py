"""kernels/shard_gemm.py with an epoch that is a plain int, compiled for a GPU that is not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

from dist_tune.testing import FakeH200, values
from kernels import shard_gemm
from tests.cases import further
from tests.ranks.test_variants import result
from tests.ranks.variants import on_fake, tuned, watch

pytestmark = [pytest.mark.once, pytest.mark.processes]


def _gemm(rank: int, n_ranks: int) -> Any:
    seen, epoch = watch(), 0
    FakeH200.launch_ms = lambda src, metadata: 6.0 - 4.0 * (metadata.num_warps == 8)
    blocks = ((64, 64, 4), (128, 64, 4), (128, 64, 8))
    configs = [shard_gemm.make_config(m, n, 64, warps=warps, stages=2) for m, n, warps in blocks]
    kernel = shard_gemm.with_int_epoch()
    shard_gemm.ag_gemm_kernel = triton.autotune(configs=configs, key=["M", "N", "K"])(kernel.fn)
    a, b = torch.zeros(128, 128, dtype=torch.float16), torch.zeros(128, 128, dtype=torch.float16)
    gathered, c = torch.zeros(128 * n_ranks, 128, dtype=torch.float16), torch.zeros(128 * n_ranks, 128, dtype=torch.float16)
    flags = torch.zeros(n_ranks, dtype=torch.int32)

    def step() -> None:
        nonlocal epoch
        epoch += 1
        shard_gemm.multiply_shards(a, gathered, b, c, flags, epoch=epoch, rank=rank)

    run = tuned(step, seen)
    run()
    n_lazy = len(seen.lazy)
    for _ in range(32):
        run()
    (record,) = run.records
    untimed = [(each.index, each.left, each.failure, each.equal_to) for each in record.candidates if each.n_replays == 0]
    return result(run, seen)[0], record.best.fields["num_warps"], record.n_variants, untimed, len(seen.lazy) - n_lazy


@pytest.mark.parametrize("n", [further(1), 2])
def test_a_gemm_with_a_plain_epoch_is_tuned_without_a_compilation_in_timed_replays(n: int) -> None:
    """Descriptors, whose blocks a hook sets, beside an epoch that counts up; a different int `rank` on each rank besides."""
    assert values(on_fake(n, _gemm, n)) == [([], 8, 3, [], 0)] * n
