"""A run is right if it returns what it should and writes all of it, whatever its memory held
before.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dist_tune import matches
from dist_tune.measure.checks import Checker
from dist_tune.measure.memory import bits_of
from dist_tune.measure.poison import NANS
from tests.checked_runs import judge

DTYPES = [
    *NANS,
    torch.float4_e2m1fn_x2,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.bool,
    torch.complex64,
]


def right(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Powers of two, which all formats hold; half of them, where there are but two values."""
    exponents = torch.arange(32).view(4, 8) % 5
    if dtype == torch.float4_e2m1fn_x2:  # two numbers in a byte, which torch does not compute with
        return (2**exponents).to(torch.uint8).view(dtype)
    return (exponents % 2 == 0) if dtype == torch.bool else (2.0**exponents).to(dtype)


def check(run: Callable[[], Any], ground_truth: Any) -> str:
    """What is said of a run that no peer takes part in, as by ``benchmark_config`` and by tuning
    scripts on one GPU.
    """
    return judge(
        Checker(matches(lambda: ground_truth, rtol=1e-2, atol=1e-2), run, is_alone=True), run
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_written_is_found(dtype: torch.dtype):
    """Although the right answer is there, in every format; the reason says how much is left out.

    A result written in full is right.
    """
    for n_left in (0, 1, 16, 32):
        out, n_parts = right(dtype), 1 + dtype.is_complex

        def run(n: int = 32 - n_left, out: torch.Tensor = out) -> torch.Tensor:
            out.view(-1)[:n].copy_(right(dtype).view(-1)[:n])
            return out

        found = check(run, right(dtype))
        assert found.endswith("not written?") == (n_left > 0)
        assert (
            f"{n_left * n_parts} of {32 * n_parts} elements" in found
            or n_left == 0
            or dtype == torch.bool
        )
        assert torch.equal(bits_of(out), bits_of(right(dtype)))
    assert check(lambda: right(dtype), right(dtype)) == ""


def test_a_run_that_is_right_once_is_wrong():
    """It adds to its result, or returns something else when it is repeated: with what it found put
    back it is not right again.
    """
    total, answers = (
        torch.zeros(4),
        iter([right(), *(torch.full((4, 8), float(i)) for i in range(100, 110))]),
    )
    assert check(lambda: total.add_(1.0), torch.ones(4)).startswith("when repeated: wrong by 1")
    assert "wrong by" in check(lambda: next(answers), right())


def test_a_run_in_place_is_right_and_its_tensor_is_left_so():
    """What it reads is not lost by the check, also where it leaves some of whatever stood there."""
    floats, ints = torch.tensor([-1.5, 0.0, 2.5, float("inf")]), torch.tensor([-2, 0, 3])
    for given, name in [
        *((floats, name) for name in ("abs_", "ceil_")),
        *((ints, name) for name in ("relu_", "abs_", "sign_")),
    ]:
        x = given.clone()
        expected = getattr(x.clone(), name)()
        assert check(getattr(x, name), expected) == ""
        assert torch.equal(x, expected)


def test_results_of_any_layout_are_right():
    """An expanded one, a part of one, of inference mode, a leaf; missing writes to them are
    found.
    """
    scale, whole, weights = torch.ones(4, 1), torch.zeros(8, 8), torch.nn.Parameter(right())
    with torch.inference_mode():
        made = right()
    for run, expected in (
        (lambda: scale.fill_(1.0).expand(4, 8), torch.ones(4, 8)),
        (lambda: right().T, right().T),
        (lambda: whole[::2].copy_(right()), right()),
        (lambda: torch.empty(0, 3), torch.empty(0, 3)),
        (torch.inference_mode()(lambda: made.copy_(right())), right()),
        (lambda: weights * 1.0, right()),
    ):
        assert check(run, expected) == ""
    assert check(lambda: scale.expand(4, 8), torch.ones(4, 8)).startswith(
        "32 of 32 elements are NaN"
    )
    assert "16 of 32" in check(
        lambda: (whole[::2, :4].copy_(right()[:, :4]), whole[::2])[1], right()
    )
    for unwritten in (made, weights):
        assert check([unwritten].copy, [right()]).startswith(
            "32 of 32 elements in result[0] are NaN"
        )
        assert torch.equal(unwritten, right())


def test_the_ground_truth_itself_is_refused():
    """As it is, as a part of it or in a container: nothing would ever be wrong."""
    expected = right()
    whole, part, pair = (
        (lambda: expected),
        (lambda: expected.view(-1)[:32].view(4, 8)),
        (lambda: (right(), expected)),
    )
    for run, given in ((whole, expected), (part, expected), (pair, (expected, right()))):
        with pytest.raises(
            TypeError,
            match="return the same memory, so nothing would ever be wrong: copy one of them",
        ):
            check(run, given)


def test_a_random_run_is_repeated_with_the_same_numbers():
    """And leaves the generator as one run of it does."""
    torch.manual_seed(3)
    expected = torch.rand(64)
    after = torch.rand(1)
    torch.manual_seed(3)
    assert check(lambda: torch.rand(64), expected) == ""
    assert torch.equal(torch.rand(1), after)
