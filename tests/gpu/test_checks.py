"""What only a real GPU shows of checks: its allocator, its NaN, its memory. Needs one.

python -m pytest -m gpu tests/gpu/test_checks.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton

from dist_tune import contextual_autotune, matches, pruning
from dist_tune.measure.checks import Checker
from dist_tune.measure.compare import difference
from dist_tune.measure.poison import NANS
from tests.checked_runs import judge, run
from tests.steps import accumulate_kernel, add_kernel, autotuned

pytestmark = pytest.mark.gpu


def _shift(x: torch.Tensor, out: torch.Tensor, n: int) -> torch.Tensor:
    """Write x + 1 to the first n elements."""
    if n:
        add_kernel[(triton.cdiv(n, 256),)](x, out, n, BLOCK=256)
    return out


@pytest.mark.parametrize("n", [33, 1 << 18, 1 << 20, 100_000_003])
@pytest.mark.parametrize("kind", ["reference", "check"])
def test_the_allocator_saves_nobody(n: int, kind: str):
    """It gives a kernel that writes nothing the memory of the last result: without a checker that one would be right."""
    x = torch.randn(n, device="cuda")

    def writes(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: _shift(x, torch.empty_like(x), count)

    writes(n)(x)
    control = writes(0)(x)
    assert torch.equal(control, x + 1)
    del control
    checker = Checker((lambda x: x + 1) if kind == "reference" else (lambda result, x: torch.equal(result, x + 1)), writes(n))
    for _ in range(2):
        assert judge(checker, writes(n), x) == ""
        assert judge(checker, writes(0), x) != ""
        assert judge(checker, writes(n - 1), x) != ""
        assert judge(checker, writes(n), x) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
def test_the_allocator_saves_no_run(dtype: torch.dtype):
    """Of a tuning script, which may be repeated: neither one that writes nothing nor one that leaves an element out."""
    x = torch.arange(1 << 16, device="cuda", dtype=dtype)

    def run(count: int) -> torch.Tensor:
        return _shift(x, torch.empty_like(x), count)

    for count, is_right in ((x.numel(), True), (0, False), (x.numel() - 1, False), (x.numel(), True)):
        result = run(x.numel())
        del result
        checker = Checker(matches(lambda count: x + 1, rtol=0.0, atol=0.0), run, is_alone=True)
        assert (judge(checker, run, count) == "") == is_right


@pytest.mark.parametrize("dtype", NANS, ids=str)
def test_what_was_not_written_is_seen_in_every_format(dtype: torch.dtype):
    """Its NaN goes through this device's copies unchanged."""
    source, out = (
        torch.arange(1, 1001, device="cuda").remainder(7).add(1).to(torch.float32).to(dtype),
        torch.zeros(1000, device="cuda").to(dtype),
    )
    checker = Checker(lambda source, out: source.clone(), lambda source, out: out)
    assert judge(checker, lambda source, out: out.copy_(source), source, out) == ""
    assert judge(checker, lambda source, out: out, source, out).startswith("1000 of 1000 elements are NaN")
    assert judge(checker, lambda source, out: out.copy_(source), source, out) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_what_is_added_to_is_put_back(dtype: torch.dtype):
    """NaN that a kernel has added to is another NaN, which is no verdict."""
    x, out = torch.randn(1000, device="cuda").to(dtype), torch.zeros(1000, device="cuda", dtype=dtype)

    def add(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        accumulate_kernel[(4,)](x, out, 1000, BLOCK=256)
        return out

    checker = Checker(lambda x, out: x.clone(), add)
    for k in range(4):
        out.zero_()
        assert run(checker, add, x, out, is_repeated=k % 2 > 0) == ""
        assert not out.isnan().any()
    out.zero_()
    assert judge(checker, lambda x, out: out, x, out) != ""


def test_a_reference_may_compute_on_the_host():
    """What it expects is compared on the device of the result."""
    x = torch.randn(1000, device="cuda")
    checker = Checker(lambda x: x.cpu() * 2, lambda x: x)
    assert judge(checker, lambda x: x * 2, x) == ""
    assert "at [7]" in judge(checker, lambda x: x * 2 + torch.nn.functional.one_hot(torch.tensor(7, device="cuda"), 1000), x)


def test_a_large_comparison_needs_little_memory():
    """Two tensors of 4 GiB are compared with less than 200 MiB beside them."""
    expected = torch.ones(1 << 31, dtype=torch.bfloat16, device="cuda")
    got = expected.clone()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert difference(got, expected) == ""
    got[123_456_789] = 3
    assert difference(got, expected).startswith("wrong by 2 at [123456789] (got 3, expected 1; 1 of 2147483648 elements")
    assert torch.cuda.max_memory_allocated() - before < 200 << 20


def test_the_shared_memory_of_this_device_is_known():
    limit = pruning._shared_limit_bytes()
    assert limit is not None
    assert 64 << 10 < limit < 512 << 10


def test_a_step_that_needs_most_of_the_memory_is_tuned():
    """The probe copies what it gives to kernels, and leaves the step what its first run has needed."""
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
