"""Candidates that are equal in one variant of their kernel, and candidates that a guided search has not come to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dist_tune import contextual_autotune
from dist_tune.search import SearchName
from dist_tune.testing import FakeH200, values
from tests.cases import further
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once
PATIENT = {"DIST_TUNE_DEADLINE_S": "30"}
STAGE_MS = {1: 6.0, 2: 4.0, 3: 1.0, 4: 2.0}


@triton.jit
def loop_kernel(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr):
    at_m, at_n, at_k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, 32)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, 32):
        total = tl.dot(tl.load(a + at_m[:, None] * 64 + (k + at_k)[None, :]), tl.load(b + (k + at_k)[:, None] * BN + at_n[None, :]), total)
    tl.store(c + at_m[:, None] * BN + at_n[None, :], total)


def tune_variants(rank: int, lengths: tuple[int, ...]) -> Any:
    """K=1 is compiled in, so that the loop is gone and no stage matters; with another K they do."""
    has_loop = loop_kernel.arg_names.index("K")
    FakeH200.launch_ms = lambda src, metadata: 0.2 if (has_loop,) in src.constants else STAGE_MS[metadata.num_stages]
    data = torch.zeros(64, 64, dtype=torch.bfloat16)
    configs = [triton.Config({"BM": 32, "BN": 32}, num_stages=stages) for stages in STAGE_MS]
    kernel = triton.autotune(configs, key=[])(loop_kernel)

    @contextual_autotune(is_dist=False, cache=False, n_warmup=1, n_repeat=3)
    def step() -> None:
        for length in lengths:
            kernel[(1,)](data, data, data.float(), length)

    step()
    FakeH200.launch_ms = lambda src, metadata: 0.0
    return step.records[0].best.fields["num_stages"]


@pytest.mark.parametrize("lengths", [(1, 64), further((64, 1))])
def test_candidates_that_are_equal_in_one_variant_race(lengths: tuple[int, ...]) -> None:
    """The variant that comes first has one kernel for all stages; in the other one three stages are the fastest."""
    assert values(on_ranks(1, tune_variants, lengths, mode="fake", is_dist=False, env=PATIENT)) == [3]


@triton.jit
def padded_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, PAD: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + PAD, mask=at < n)


def tune_again(rank: int) -> Any:
    """All kernels are in memory from another key, also those that a guided search does not come to."""
    blocks, pads, warps = (16, 32, 64, 128), (1, 2, 4), (1, 2, 4)
    configs = [
        triton.Config({"BLOCK": block, "PAD": pad}, num_warps=n, num_stages=stages)
        for stages in (1, 2, 3)
        for block in blocks
        for pad in pads
        for n in warps
    ]
    kernel = triton.autotune(configs, key=["n"])(padded_kernel)
    x, y = torch.zeros(512), torch.zeros(512)
    records = []
    searches: tuple[tuple[SearchName, int], ...] = (("racing", 256), ("guided", 512))
    for search, n in searches:

        @contextual_autotune(is_dist=False, search=search, n_warmup=1, n_repeat=3, cache=False)
        def step(n: int) -> None:
            kernel[(1,)](x, y, n)

        step(n)
        records += step.records
    candidates = records[1].candidates
    behind = [each.index for each in candidates if each.equal_to is not None and candidates[each.equal_to].left is not None]
    untried = {i for i, each in enumerate(candidates) if each.left is not None and "not tried" in each.left}
    return len(untried) > 0, [i for i in behind if candidates[i].equal_to in untried]


def test_no_candidate_stands_behind_one_that_was_not_tried() -> None:
    """A kernel that is known from earlier, but not in this search, races for no other one."""
    assert values(on_ranks(1, tune_again, mode="fake", is_dist=False, env=PATIENT)) == [(True, [])]
