"""A run is right if it returns what it should and writes all of it, whatever its memory held before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dist_tune import matches
from dist_tune.measure.checks import Checker
from dist_tune.measure.memory import bits_of

pytestmark = pytest.mark.once

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.bool,
    torch.complex64,
]  # fmt: skip


def right(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Powers of two, which all formats hold; half of them, where there are but two values."""
    exponents = torch.arange(32).view(4, 8) % 5
    if dtype == torch.float4_e2m1fn_x2:  # two numbers in a byte, which torch does not compute with
        return (2**exponents).to(torch.uint8).view(dtype)
    return (exponents % 2 == 0) if dtype == torch.bool else (2.0**exponents).to(dtype)


def check(run: Callable[[], Any], ground_truth: Any, tolerance: float = 1e-2) -> str:
    """What is said of a run that is repeated at will, as by ``benchmark_config`` and by tuning scripts on one GPU."""
    checker = Checker(matches(lambda: ground_truth, rtol=tolerance, atol=tolerance), run, is_repeatable=True)
    checker.begin((), {}, is_repeated=False)
    return checker.judge(run(), (), {})


WRITES: dict[str, tuple[int, Callable[[torch.Tensor, torch.Tensor], object]]] = {
    "all": (0, lambda out, result: out.copy_(result)),
    "half": (16, lambda out, result: out[:, :4].copy_(result[:, :4])),
    "all but one": (1, lambda out, result: out.view(-1)[:-1].copy_(result.view(-1)[:-1])),
    "nothing": (32, lambda out, result: None),
}
"""Name -> elements that are left out, and what writes the others."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_what_is_not_written_is_found(dtype: torch.dtype, name: str):
    """Although the right answer is there: it says how much is left out. What is written in full is right."""
    n_left, write = WRITES[name]
    out = right(dtype)
    found = check(lambda: (write(out, right(dtype)), out)[1], right(dtype))
    n_parts = 1 + dtype.is_complex
    assert found.startswith(f"{n_left * n_parts} of {32 * n_parts} elements") if n_left else found == ""
    assert torch.equal(bits_of(out), bits_of(right(dtype)))
    assert check(lambda: right(dtype), right(dtype)) == ""


def test_a_run_that_is_right_once_is_wrong():
    """It adds to its result, or returns something else when it is repeated: with what it found put back it is not right again."""
    total, answers = torch.zeros(4), iter([right(), *(torch.full((4, 8), float(i)) for i in range(100, 110))])
    assert "wrong by" in check(lambda: total.add_(1.0), torch.ones(4))
    assert "wrong by" in check(lambda: next(answers), right())


@pytest.mark.parametrize(
    ("x", "name"),
    [
        *((torch.tensor([-1.5, 0.0, 2.5, float("inf")]), name) for name in ("relu_", "abs_", "ceil_")),
        *((torch.tensor([-2, 0, 3]), name) for name in ("relu_", "abs_", "sign_")),
    ],
)
def test_a_run_in_place_is_right_and_its_tensor_is_left_so(x: torch.Tensor, name: str):
    """What it reads is not lost by the check, also where it leaves some of whatever stood there."""
    expected = getattr(x.clone(), name)()
    x = x.clone()
    assert check(getattr(x, name), expected) == ""
    assert torch.equal(x, expected)


def test_results_whose_elements_share_memory_are_right():
    """An expanded one, a transposed one and a part of one. What an expanded one was made of must be written, too."""
    scale, whole = torch.ones(4, 1), torch.zeros(8, 8)
    assert check(lambda: scale.fill_(1.0).expand(4, 8), torch.ones(4, 8)) == ""
    assert check(lambda: scale.expand(4, 8), torch.ones(4, 8)).startswith("4 of 4 elements are not written")
    assert check(lambda: right().T, right().T) == ""
    assert check(lambda: whole[::2].copy_(right()), right()) == ""
    assert "16 of 32" in check(lambda: (whole[::2, :4].copy_(right()[:, :4]), whole[::2])[1], right())
    assert check(lambda: torch.empty(0, 3), torch.empty(0, 3)) == ""


def test_a_run_of_inference_mode_or_with_gradients_is_right():
    """Neither keeps its result from being checked, nor missing writes to it from being found."""
    weights = torch.nn.Parameter(right())
    with torch.inference_mode():
        made = right()
    assert check(torch.inference_mode()(lambda: made.copy_(right())), right()) == ""
    assert check(torch.inference_mode()(lambda: right()), right()) == ""
    assert check(torch.inference_mode()(lambda: (made[:2].copy_(right()[:2]), made)[1]), right()).startswith("16 of 32 elements")
    assert check(lambda: made, right()).startswith("32 of 32 elements are not written")
    assert check(lambda: weights * 1.0, right()) == ""
    assert check(lambda: weights, right()) != ""
    assert torch.equal(weights, right())


def test_the_ground_truth_itself_is_refused():
    """As it is, as a part of it or in a container: nothing would ever be wrong."""
    expected = right()
    for run in (lambda: expected, lambda: expected.view(-1).view(4, 8), lambda: expected[:]):
        with pytest.raises(TypeError, match="return the same memory, so nothing would ever be wrong"):
            check(run, expected)
    with pytest.raises(TypeError, match="copy one of them"):
        check(lambda: (right(), expected), (expected, right()))


def test_a_random_run_is_repeated_with_the_same_numbers():
    """And leaves the generator as one run of it does."""
    torch.manual_seed(3)
    expected = torch.rand(64)
    after = torch.rand(1)
    torch.manual_seed(3)
    assert check(lambda: torch.rand(64), expected) == ""
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize(("offset", "n_repeats"), [(0, 1), (1, 0)])
def test_a_run_is_repeated_once_if_it_is_right(offset: int, n_repeats: int):
    """And not at all if it is wrong."""
    n_runs = [0]

    def run() -> torch.Tensor:
        n_runs[0] += 1
        return right() + offset

    assert (check(run, right()) == "") == (offset == 0)
    assert n_runs == [1 + n_repeats]
