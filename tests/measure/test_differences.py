"""How far a result is from what was expected."""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.measure import differences
from dist_tune.measure.differences import difference, tolerance
from dist_tune.measure.memory import bits_of

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, *FP8]
EXACT = [
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.bool,
]
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Outputs:
    hidden: torch.Tensor
    n_tokens: int


def gaussian(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rounding_is_right_and_nothing_is_wrong(dtype: torch.dtype):
    """A result rounded the other way passes; zeros, and one element that is off by twice the root
    mean square, do not.
    """
    exact = gaussian(64, 64).double()
    expected = exact.to(dtype)
    before = expected.clone()
    ulp = torch.finfo(dtype).eps
    rounded = (expected.double() * (1 + (0.6 * ulp if dtype != torch.float64 else 1e-13))).to(dtype)
    assert difference(rounded, expected) == ""
    assert "of 4096 elements beyond" in difference(torch.zeros(64, 64).to(dtype), expected)
    off = expected.double().clone()
    off[5, 7] += 2.0
    found = difference(off.to(dtype), expected)
    assert "at [5, 7]" in found
    assert "; 1 of 4096 elements beyond" in found
    # Also where the dtype to compute with needs no copy.
    assert torch.equal(bits_of(expected), bits_of(before))


@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_integers_and_bools_must_be_equal(dtype: torch.dtype):
    """Off by one is wrong, and the unsigned ones of torch that cannot compute compare as well."""
    expected = torch.arange(6).remainder(2).to(dtype).reshape(2, 3)
    got = expected.clone()
    assert difference(got, expected) == ""
    got[1, 2] = 0
    assert (
        difference(got, expected, rtol=1.0, atol=1.0)
        == "wrong by 1 at [1, 2] (got 0, expected 1; 1 of 6 elements differ)"
    )
    large = torch.tensor([2**62, 2**62 + 1])
    assert difference(large, large + 1).startswith("wrong by")


def test_other_formats_are_compared_by_their_parts():
    """Both parts of a complex number; packed formats and scales to the bit: the next power of two
    is wrong by a factor of two.
    """
    expected = torch.complex(gaussian(4, 5), gaussian(4, 5).flip(0))
    assert difference(expected.conj().resolve_conj(), expected.conj()) == ""
    got = expected.clone()
    got[2, 3] += 4j
    assert "at [2, 3]" in difference(got, expected)
    scales = torch.tensor([126, 127, 128], dtype=torch.uint8)
    for dtype, said in (
        (torch.float8_e8m0fnu, "3 of 3 elements beyond"),
        (torch.float4_e2m1fn_x2, "3 of 3 elements differ)"),
    ):
        assert difference(scales.view(dtype), scales.clone().view(dtype)) == ""
        assert said in difference((scales + 1).view(dtype), scales.view(dtype))
    assert (tolerance(torch.complex64), tolerance(torch.float8_e5m2), tolerance(torch.int32)) == (
        tolerance(torch.float32),
        0.25,
        0.0,
    )


def test_nan_is_wrong_unless_it_is_expected():
    """The count and the first place are said; where NaN is expected, a number is wrong."""
    expected = gaussian(8, 8)
    got = expected.clone()
    got[3, 4:] = math.nan
    assert (
        difference(got, expected) == "4 of 64 elements are NaN, the first at [3, 4]: not written?"
    )
    assert difference(got, got.clone()) == ""
    assert "at [3, 4]" in difference(expected, got)


def test_infinity_is_wrong_unless_it_is_expected():
    """Of either sign."""
    for value in (math.inf, -math.inf):
        expected = gaussian(8, 8)
        got = expected.clone()
        got[7, 7] = value
        assert "wrong by inf at [7, 7]" in difference(got, expected)
        assert difference(got, got.clone()) == ""
        assert all(
            "at [7, 7]" in each for each in (difference(expected, got), difference(-got, got))
        )


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float32, 3e38), (torch.float64, 1e300), (torch.bfloat16, 3e38)]
)
def test_large_numbers_do_not_make_everything_right(dtype: torch.dtype, value: float):
    """Their squares are infinite, and an infinite tolerance would let anything through."""
    expected = torch.full((16,), value, dtype=dtype)
    assert difference(expected.clone(), expected) == ""
    assert "16 of 16" in difference(expected * 0.5, expected)
    assert "16 of 16" in difference(-expected, expected)


def test_tolerances_can_be_given():
    """``atol`` alone leaves the relative one as it is; ``rtol`` alone counts for the root mean
    square, too; zeros ask for equality.
    """
    expected = torch.tensor([1.0, 100.0])
    assert difference(expected + 0.01, expected).startswith("wrong by 0.01 at [")
    assert difference(expected + 0.01, expected, atol=0.02) == ""
    assert difference(expected * 1.01, expected, rtol=0.02) == ""
    assert difference(expected * 1.01, expected, rtol=0.02, atol=0.0) == ""
    assert "beyond 0 + 0 * |expected|" in difference(
        expected.nextafter(2 * expected), expected, rtol=0.0, atol=0.0
    )
    small = torch.tensor([0.0, 1000.0])  # beside large ones: cancellation
    assert difference(small + torch.tensor([1e-3, 0.0]), small) == ""
    assert difference(small + torch.tensor([1e-1, 0.0]), small) != ""


@pytest.mark.parametrize(
    ("got", "expected", "said"),
    [
        (
            torch.zeros(2, 3),
            torch.zeros(3, 2),
            "returned a tensor [2, 3] torch.float32, expected a tensor [3, 2] torch.float32",
        ),
        (
            torch.zeros(2).half(),
            torch.zeros(2),
            "returned a tensor [2] torch.float16, expected a tensor [2] torch.float32",
        ),
        (None, torch.zeros(2), "returned None, expected a tensor [2] torch.float32"),
        (torch.zeros(()), 0.0, "returned a tensor [] torch.float32, expected 0.0"),
        (
            (torch.zeros(2),),
            torch.zeros(2),
            "returned a tuple of length 1, expected a tensor [2] torch.float32",
        ),
        ([1, 2], [1, 2, 3], "returned a list of length 2, expected a list of length 3"),
        ({"a": 1}, {"b": 1}, "returned a dict of 'a', expected a dict of 'b'"),
        (
            (1, {"x": [torch.ones(1)]}),
            (1, {"x": [torch.zeros(1)]}),
            "wrong by 1 at [0] (got 1, expected 0; 1 of 1 elements in result[1]['x'][0] ",
        ),
        ({"n": 3}, {"n": 4}, "returned 3 in result['n'], expected 4"),
        (0.5, 0.25, "wrong by 0.25 (got 0.5, expected 0.25)"),
        ("left", "right", "returned 'left', expected 'right'"),
    ],
)
def test_what_differs_is_said(got: Any, expected: Any, said: str):
    assert difference(got, expected).startswith(said)
    assert difference(got, got) == ""
    assert difference(expected, expected) == ""


def test_equal_structures_are_right():
    """A tuple is as good as a list, a named one too; a dataclass is compared by its fields."""
    tensor = gaussian(3)
    for got, expected in [
        ((tensor, [None, 2]), [tensor.clone(), (None, 2)]),
        (Pair(tensor, 1), (tensor.clone(), 1)),
        (OrderedDict(a=tensor, b=2.0), {"b": 2.0 + 1e-7, "a": tensor.clone()}),
        (Outputs(tensor, 3), Outputs(tensor.clone(), 3)),
        (float("nan"), float("nan")),
        (math.inf, math.inf),
        (1 + 2j, 1 + 2j),
        (torch.empty(0, 5), torch.empty(0, 5)),
        (torch.tensor(2.5), torch.tensor(2.5)),
        (tensor.to_sparse(), tensor.to_sparse()),
        ((), ()),
    ]:
        assert difference(got, expected) == ""
    assert "in result['hidden']" in difference(Outputs(tensor + 1, 3), Outputs(tensor, 3))
    with pytest.raises(
        TypeError, match="cannot compare a ndarray with a ndarray: return tensors and numbers"
    ):
        difference(np.ones(2), np.ones(2) + 1)


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    piece=st.sampled_from([20, 33, 1000]),
    is_expanded=st.booleans(),
)
def test_one_wrong_element_is_found_in_any_layout(
    shape: list[int], order: Any, piece: int, is_expanded: bool
):
    """Permuted, strided or expanded, and in pieces of any size."""
    expected = torch.arange(math.prod(shape) * 2, dtype=torch.float32)[::2].reshape(shape)
    dims = list(range(len(shape)))
    order.shuffle(dims)
    expected = expected.permute(dims)
    if is_expanded:
        expected = expected[..., None].expand(*expected.shape, 3)
    got = expected.clone()
    place = tuple(order.randrange(size) for size in got.shape)
    got[place] += 1000.0
    with mock.patch.object(differences, "PIECE", piece):
        found = difference(got, expected)
        assert found.startswith(f"wrong by 1e+03 at {list(place)} ")
        assert f"; 1 of {got.numel()} elements beyond" in found
        got[place] = math.nan
        assert (
            difference(got, expected)
            == f"1 of {got.numel()} elements are NaN, the first at {list(place)}: not written?"
        )


def test_memory_is_that_of_a_piece():
    """No more is compared at once."""
    expected = torch.ones(128, 128, dtype=torch.bfloat16)
    with (
        mock.patch.object(differences, "PIECE", 1 << 10),
        mock.patch.object(torch, "isclose", wraps=torch.isclose) as isclose,
    ):
        assert difference(expected.t(), expected) == ""
    assert {call.args[0].numel() for call in isclose.call_args_list} == {1 << 10}
