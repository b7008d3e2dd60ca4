"""Differences between a result and an expected one: nested tuples, lists and dicts of tensors and
numbers.

Knows tensors as values and nothing of where they come from. Works through large tensors piece by
piece, on their device, and waits for that device once a tensor, if nothing is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dist_tune.measure.memory import parts_of, plain_tensors

PIECE = 1 << 22
"""Elements compared at once, about: a few copies of so many are all the memory that a comparison
needs.
"""
_PACKED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float4_e2m1fn_x2: torch.int8,
}
"""Formats that torch does not compute with, and those that are equal where they are."""
_RTOL = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,  # sums in another order; TF32 is 5e-4
    torch.float16: 4 * torch.finfo(torch.float16).eps,
    torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
    torch.float8_e8m0fnu: 0.0,  # powers of two: the next one is another scale
    torch.float4_e2m1fn_x2: 0.0,
}


def difference(
    got: Any, expected: Any, rtol: float | None = None, atol: float | None = None, where: str = ""
) -> str:
    """Why ``got`` is not what was expected, on one line, with the size of the error; empty if it
    is.

    Same structure, shapes and dtypes, and every element within ``atol + rtol * |expected|``.
    ``atol`` is ``rtol`` times the root mean square of what is expected, if it is not given;
    ``rtol`` as in ``tolerance``. ``where``: what ``got`` is a part of, "[0]['c']".

    Raises:
        TypeError: something is neither a tensor nor a number, and cannot say whether it is equal.
    """
    if (
        isinstance(got, torch.Tensor)
        and isinstance(expected, torch.Tensor)
        and got.is_nested == expected.is_nested
    ):
        if got.is_nested:
            return difference(got.unbind(), expected.unbind(), rtol, atol, where)
        if (got.shape, got.dtype) == (expected.shape, expected.dtype):
            return _of_tensors(got, expected, rtol, atol, where) if got.numel() else ""
    elif not isinstance(got, torch.Tensor) and not isinstance(expected, torch.Tensor):
        mine, theirs = parts_of(got), parts_of(expected)
        if mine is not None and theirs is not None and mine.keys() == theirs.keys():
            return next(
                filter(
                    None,
                    (
                        difference(mine[key], theirs[key], rtol, atol, f"{where}[{key!r}]")
                        for key in theirs
                    ),
                ),
                "",
            )
        if mine is None and theirs is None:
            if {type(got), type(expected)} & {float, complex} and {type(got), type(expected)} <= {
                int,
                float,
                complex,
            }:
                bound = (1e-5 if rtol is None else rtol) * abs(expected) + (atol or 0.0)
                if (
                    got == expected
                    or abs(got - expected) <= bound < math.inf
                    or (got != got and expected != expected)
                ):
                    return ""
                return (
                    f"wrong by {abs(got - expected):.2g}{_at(where)} (got {got:.6g}, expected"
                    f" {expected:.6g})"
                )
            if _is_equal(got, expected):
                return ""
    return f"returned {_kind(got)}{_at(where)}, expected {_kind(expected)}"


def flat(value: Any, depth: int = 0) -> Any:
    """Tensors and plain values in containers and dataclasses; other objects by their type, because
    a step may make them anew.
    """
    if isinstance(value, torch.Tensor):
        return list(plain_tensors(value))
    if isinstance(value, np.ndarray):
        return value.tolist()
    parts = parts_of(value) if depth < 8 else None  # a container may hold itself
    if parts is not None:
        each = {str(key): flat(part, depth + 1) for key, part in parts.items()}
        return list(each.values()) if isinstance(value, list | tuple) else each
    return (
        value
        if isinstance(value, int | float | complex | str | bytes | None)
        else type(value).__name__
    )


def tolerance(dtype: torch.dtype) -> float:
    """Error that is right, relative to an element and to the root mean square of all, and 0 for
    what must be equal.

    4 units in the last place of 16-bit floats; 1 of fp8, where 4 would let zeros through; 1e-5 for
    float32; 1e-12 for float64.
    """
    if dtype.is_complex:
        return tolerance(dtype.to_real())
    if not dtype.is_floating_point:
        return 0.0
    return _RTOL[dtype] if dtype in _RTOL else torch.finfo(dtype).eps


def _of_tensors(
    got: torch.Tensor, expected: torch.Tensor, rtol: float | None, atol: float | None, where: str
) -> str:
    """Of tensors of one shape and dtype, with at least one element."""
    rtol = tolerance(got.dtype) if rtol is None else rtol
    n_dims = got.dim()
    got, expected = _plain(got.detach()), _plain(expected.detach())
    is_float = got.is_floating_point()
    dim = max(range(got.dim()), key=lambda k: got.shape[k])
    n_rows = max(1, PIECE * got.shape[dim] // got.numel())
    pieces = list(zip(got.split(n_rows, dim), expected.split(n_rows, dim), strict=True))
    rms = 0.0
    if atol is None and rtol and is_float:
        squares = [
            theirs.to(got.device, torch.float64).nan_to_num(0.0, 0.0, 0.0).square_().sum()
            for _, theirs in pieces
        ]
        rms = math.sqrt(float(torch.stack(squares).sum()) / expected.numel())
    # Where the squares are too large to add, each element counts for itself.
    bound = (rtol * rms if math.isfinite(rms) else 0.0) if atol is None else atol
    found = torch.stack(
        [
            _errors(mine, theirs, *((rtol, bound) if is_float else (0.0, 0.0)))
            for mine, theirs in pieces
        ]
    ).tolist()
    n_wrong, n_nan = (int(sum(each[k] for each in found)) for k in (0, 1))
    if not n_wrong:
        return ""
    k = max(range(len(pieces)), key=lambda k: found[k][2])
    place = np.unravel_index(int(found[k][3]), pieces[k][0].shape)
    index = tuple(int(each) + (k * n_rows if axis == dim else 0) for axis, each in enumerate(place))
    count, at = f"{got.numel()} elements{_at(where)}", list(index[:n_dims])
    if n_nan:
        return f"{n_nan} of {count} are NaN, the first at {at}: not written?"
    mine, theirs = got[index].item(), expected[index].item()
    error = math.inf if math.isnan(abs(mine - theirs)) else abs(mine - theirs)
    limit = (
        f"beyond {rtol:.2g} * (|expected| + {rms:.2g})"
        if atol is None
        else f"beyond {atol:.2g} + {rtol:.2g} * |expected|"
    )
    how = limit if is_float else "differ"
    return (
        f"wrong by {error:.2g} at {at} (got {mine:.6g}, expected {theirs:.6g}; {n_wrong} of {count}"
        f" {how})"
    )


def _errors(got: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float) -> torch.Tensor:
    """Numbers of a piece: wrong elements; NaN among them; the worst error and its place: the first
    NaN, an infinite one, the largest.
    """
    dtype = torch.float32 if got.is_floating_point() and got.dtype != torch.float64 else got.dtype
    got, expected = got.to(dtype), expected.to(got.device, dtype)
    is_wrong = torch.isclose(got, expected, rtol, atol, equal_nan=True).logical_not_()
    is_nan = is_wrong & got.isnan()
    error, largest = (got.double() - expected.double()).abs_(), torch.finfo(torch.float64).max
    error = (
        error.nan_to_num_(largest, largest)
        .masked_fill_(~is_wrong, -1.0)
        .masked_fill_(is_nan, math.inf)
        .flatten()
    )
    return torch.stack(
        [each.double() for each in (is_wrong.sum(), is_nan.sum(), error.max(), error.argmax())]
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a layout and dtype to compute with, and a dimension at least; complex ones
    with a last dimension of two.
    """
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.dim() == 0:
        tensor = tensor[None]
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.view(_PACKED[tensor.dtype]) if tensor.dtype in _PACKED else tensor


def _is_equal(got: Any, expected: Any) -> bool:
    try:
        return got is expected or bool(got == expected)
    except Exception as error:  # comparing the user's objects may raise anything
        raise TypeError(
            f"cannot compare a {type(got).__name__} with a {type(expected).__name__}: return"
            " tensors and numbers"
        ) from error


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return (
            f"a nested tensor of {value.dtype}"
            if value.is_nested
            else f"a tensor {list(value.shape)} {value.dtype}"
        )
    parts = parts_of(value)
    if isinstance(value, Mapping) or (parts is not None and not isinstance(value, list | tuple)):
        return f"a {type(value).__name__} of {', '.join(map(repr, parts or ()))}"[:200]
    return (
        f"a {type(value).__name__} of length {len(parts)}"
        if parts is not None
        else f"{value!r}"[:100]
    )


def _at(where: str) -> str:
    return f" in result{where}" if where else ""
