"""How much of a GPU's memory a tuning takes. Needs one.

python -m pytest -m gpu tests/gpu/test_memory.py
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from dist_tune import autotune, contextual_autotune
from dist_tune.measure.differences import difference
from tests.steps import BLOCKS, QUICK, autotuned, failures
from tests.worlds import on_each_rank

pytestmark = pytest.mark.gpu


def test_an_argument_that_no_run_changes_is_not_copied():
    """Nor widened where its bits are summed."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    x = torch.zeros(int(free * 0.3), dtype=torch.uint8, device="cuda")
    torch.cuda.reset_peak_memory_stats()

    @autotune(BLOCKS, None, **QUICK)
    def reads(x: torch.Tensor, block: int) -> torch.Tensor:
        return x[:block].sum()

    reads(x)
    assert torch.cuda.max_memory_allocated() < 1.1 * x.numel()


def test_a_large_comparison_needs_little_memory():
    """Two tensors of 4 GiB are compared with less than 200 MiB beside them."""
    expected = torch.ones(1 << 31, dtype=torch.bfloat16, device="cuda")
    got = expected.clone()
    got[123_456_789] = 3
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert difference(got, expected).startswith("wrong by 2 at [123456789]")
    assert torch.cuda.max_memory_allocated() - before < 200 << 20


def test_a_step_that_needs_most_of_the_memory_is_tuned():
    """The probe copies what it gives to kernels, and leaves the step what its first run has
    needed.
    """
    torch.cuda.empty_cache()
    n_bytes, _ = torch.cuda.mem_get_info()
    kernel, weights = autotuned(), [torch.zeros(n_bytes // 160, device="cuda") for _ in range(12)]

    @contextual_autotune(n_repeat=1, n_warmup=0)
    def step() -> None:
        held = []
        for weight in weights:
            held.append(torch.empty(n_bytes // 22, dtype=torch.int8, device="cuda"))
            kernel[(1,)](weight, torch.zeros(64, device="cuda"), 64)

    step()
    assert len(step.records) == 1
    weights.clear()
    torch.cuda.empty_cache()


@on_each_rank(modes=("gpu",))
def test_a_config_that_needs_too_much_memory_on_one_rank_is_dropped_on_both(rank: int):
    """It fails before its collective, so another config stands in there."""

    @autotune([{"n_bytes": n} for n in (1 << 20, 1 << 50)], None, **QUICK)
    def step(x: torch.Tensor, n_bytes: int = 0) -> torch.Tensor:
        scratch = torch.empty(n_bytes if rank == 1 else 1 << 20, dtype=torch.uint8, device="cuda")
        y = x + scratch[:1].float() * 0
        dist.all_reduce(y)
        return y

    assert step(torch.ones(4, device="cuda"))[0] == 2.0
    right, wrong = failures(step)
    assert right is None
    assert re.match("rank 1: .*OutOfMemoryError", str(wrong))
