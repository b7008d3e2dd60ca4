"""kernels/gemm_allreduce.py: two gloo ranks that store into each other's memory under the interpreter."""

from __future__ import annotations

import pytest

from dist_tune.testing import on_ranks, values
from tests.row_parallel_ranks import errors, failed_then_right

pytestmark = pytest.mark.processes

ODD = (11, 12, 24)
"""M is no multiple of the ranks, so that their parts differ; N is none of 8, K / W none of a block."""


@pytest.mark.once
def test_sums_are_right_on_all_ranks_where_no_block_divides_the_shape():
    """One-shot by pushes and two-shot with sums in the product: five fresh inputs each, outputs full of NaN."""
    found = values(on_ranks(2, errors, "gemm_allreduce", [(0, False), (2, True)], ODD))
    assert max(one_shot for one_shot, _ in found) < 2 * 2**-7
    assert max(two_shot for _, two_shot in found) < 2**-7


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sabotage", "exchange"), [("flag before tile", 0), ("flag before tile", 2), ("skipped rank", 0), ("skipped rank", 2)]
)
def test_a_wrong_exchange_is_found(sabotage: str, exchange: int):
    """A flag that is raised before its tile is stored, and a sum without one rank, with each algorithm."""
    for (error,) in values(on_ranks(2, errors, "gemm_allreduce", [(exchange, False)], (16, 8, 16), sabotage)):
        assert error > 0.1


@pytest.mark.once
@pytest.mark.slow
def test_a_sum_that_cannot_be_launched_leaves_flags_that_the_next_step_understands():
    """A candidate whose sum does not compile fails on all ranks; the next one must not wait for the sums that were never made."""
    for message, error in values(on_ranks(2, failed_then_right, timeout_s=30)):
        assert message == "does not compile"
        assert error < 2 * 2**-7


@pytest.mark.once
def test_a_tuner_tries_one_shot_for_few_rows_and_two_shot_for_several():
    """Both algorithms between, as their bytes and latencies are close there."""
    import torch

    from kernels.gemm_allreduce import config_space, prune_fn

    def tried(m: int) -> set[str]:
        return {config["algorithm"] for config in config_space() if prune_fn(config, torch.empty(m, 1))}

    assert [tried(m) for m in (1, 16, 2048)] == [{"one_shot"}, {"one_shot", "two_shot"}, {"two_shot"}]
