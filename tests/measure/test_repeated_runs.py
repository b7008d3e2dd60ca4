"""A run is right if it returns what it should and writes all of it, whatever its memory held before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dist_tune import matches
from dist_tune.measure.checks import Checker

pytestmark = pytest.mark.once

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.bool, torch.complex64,
]  # fmt: skip


def right(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Powers of two, which all formats hold; half of them, where there are but two values."""
    exponents = torch.arange(32).view(4, 8) % 5
    return (exponents % 2 == 0) if dtype == torch.bool else (2.0**exponents).to(dtype)


def check(run: Callable[[], Any], ground_truth: Any, tolerance: float = 1e-2) -> str:
    """What is said of a run that is repeated at will, as by ``benchmark_config`` and by tuning scripts on one GPU."""
    checker = Checker(matches(lambda: ground_truth, rtol=tolerance, atol=tolerance), run, is_repeatable=True)
    checker.begin((), {}, is_repeated=False)
    return checker.judge(run(), (), {})


class Into:
    """A run that writes into memory which it keeps, and in which the right answer is already."""

    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor], object], dtype: torch.dtype = torch.float32) -> None:
        self.out, self._right, self._write = right(dtype), right(dtype), write

    def __call__(self) -> torch.Tensor:
        self._write(self.out, self._right)
        return self.out


def all_of_it(out: torch.Tensor, result: torch.Tensor) -> None:
    out.copy_(result)


def half_of_it(out: torch.Tensor, result: torch.Tensor) -> None:
    out[:, :4] = result[:, :4]


def one_short(out: torch.Tensor, result: torch.Tensor) -> None:
    out.view(-1)[:-1] = result.view(-1)[:-1]


def nothing(out: torch.Tensor, result: torch.Tensor) -> None:
    pass


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_written_in_full_is_right(dtype: torch.dtype):
    """Into memory of its own or into new memory; the answer is in it afterwards."""
    run = Into(all_of_it, dtype)
    assert check(run, right(dtype)) == ""
    assert run().tolist() == right(dtype).tolist()
    assert check(lambda: right(dtype), right(dtype)) == ""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("write", "n_left"), [(nothing, 32), (half_of_it, 16), (one_short, 1)])
def test_what_is_not_written_is_found(dtype: torch.dtype, write: Any, n_left: int):
    """Although the right answer is there: it says how much is left out."""
    assert check(Into(write, dtype), right(dtype)).startswith(f"{n_left} of 32 elements")


def test_a_run_that_is_right_once_is_wrong():
    """It adds to its result, or returns something else when it is repeated: with what it found put back it is not right again."""
    total, answers = torch.zeros(4), iter([right(), *(torch.full((4, 8), float(i)) for i in range(100, 110))])
    assert "wrong by" in check(lambda: total.add_(1.0), torch.ones(4))
    assert "wrong by" in check(lambda: next(answers), right())


@pytest.mark.parametrize("name", ["relu_", "abs_", "ceil_"])
def test_a_run_in_place_is_right_and_its_tensor_is_left_so(name: str):
    """What it reads is not lost by the check."""
    x = torch.tensor([-1.5, 0.0, 2.5, float("inf")])
    expected = getattr(x.clone(), name)()
    assert check(getattr(x, name), expected) == ""
    assert torch.equal(x, expected)


@pytest.mark.parametrize("bound", ["min", "max"])
def test_integers_made_of_what_they_were_are_right(bound: str):
    """The larger or the smaller of them and 0, which leaves some of whatever stood there."""
    x = torch.tensor([-2, 0, 3])
    expected = x.clamp(**{bound: 0})
    assert check(lambda: x.clamp_(**{bound: 0}), expected) == ""
    assert torch.equal(x, expected)


def test_results_whose_elements_share_memory_are_right():
    """An expanded one, a transposed one and a part of one. What an expanded one was made of must be written, too."""
    scale, whole = torch.ones(4, 1), torch.zeros(8, 8)
    assert check(lambda: scale.fill_(1.0).expand(4, 8), torch.ones(4, 8)) == ""
    assert check(lambda: scale.expand(4, 8), torch.ones(4, 8)).startswith("4 of 4 elements are not written")
    assert check(lambda: right().T, right().T) == ""
    assert check(lambda: whole[::2].copy_(right()), right()) == ""
    assert "16 of 32" in check(lambda: half_of_it(whole[::2], right()) or whole[::2], right())  # type: ignore[func-returns-value]
    assert check(lambda: torch.empty(0, 3), torch.empty(0, 3)) == ""


def test_a_run_of_inference_mode_or_with_gradients_is_right():
    """Neither keeps its result from being checked, nor missing writes to it from being found."""
    weights = torch.nn.Parameter(right())
    with torch.inference_mode():
        made = right()
    assert check(torch.inference_mode()(lambda: made.copy_(right())), right()) == ""
    assert check(torch.inference_mode()(lambda: right()), right()) == ""
    assert check(torch.inference_mode()(lambda: half_of_it(made, right()) or made), right()).startswith("16 of 32 elements")  # type: ignore[func-returns-value]
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


def test_packed_results_must_be_written():
    """Two 4-bit numbers in a byte, which torch does not compute with."""
    packed = torch.arange(32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    kept = packed.clone()
    assert check(lambda: packed.clone(), packed) == ""
    assert check(lambda: kept, packed).startswith("32 of 32 elements are not written")
