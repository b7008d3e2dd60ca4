"""Differences between a result and an expected one: nested tuples, lists and dicts of tensors and numbers.

Knows tensors as values and nothing of where they come from. Works through large tensors piece by piece, on their device,
and waits for that device once a tensor, if nothing is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from dist_tune.measure.memory import Path

_Index = tuple[int, ...]
_PIECE = 1 << 22
"""Elements compared at once: a few copies of so many are all the memory that a comparison needs."""
_PACKED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64, torch.float4_e2m1fn_x2: torch.int8}
"""Formats that torch does not compute with, and those that are equal where they are."""
_RTOL = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,  # sums in another order; TF32 is 5e-4
    torch.float16: 4 * torch.finfo(torch.float16).eps,
    torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
    torch.float8_e8m0fnu: 0.0,  # powers of two: the next one is another scale
}


def difference(got: Any, expected: Any, rtol: float | None = None, atol: float | None = None, where: str = "") -> str:
    """Why ``got`` is not what was expected, on one line, with the size of the error; empty if it is.

    Same structure, shapes and dtypes, and every element within ``atol + rtol * |expected|``. ``atol`` is ``rtol`` times the root
    mean square of what is expected, if it is not given; ``rtol`` as in ``tolerance``. ``where``: what ``got`` is a part of, "[0]['c']".

    Raises:
        TypeError: something is neither a tensor nor a number, and cannot say whether it is equal.
    """
    if isinstance(expected, torch.Tensor) or isinstance(got, torch.Tensor):
        if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor) and got.is_nested == expected.is_nested:
            if got.is_nested:
                return difference(got.unbind(), expected.unbind(), rtol, atol, where)
            return _of_tensors(got, expected, rtol, atol, where)
        return f"returned {_kind(got)}{_at(where)}, expected {_kind(expected)}"
    mine, theirs = parts_of(got), parts_of(expected)
    if theirs is not None:
        if mine is None or mine.keys() != theirs.keys():
            return f"returned {_kind(got)}{_at(where)}, expected {_kind(expected)}"
        wrongs = (difference(mine[key], theirs[key], rtol, atol, f"{where}[{key!r}]") for key in theirs)
        return next(filter(None, wrongs), "")
    if _is_number(got) and _is_number(expected) and (isinstance(got, float | complex) or isinstance(expected, float | complex)):
        bound = (1e-5 if rtol is None else rtol) * abs(expected) + (atol or 0.0)
        if got == expected or abs(got - expected) <= bound < math.inf or (got != got and expected != expected):
            return ""
        return f"wrong by {abs(got - expected):.2g}{_at(where)} (got {got:.6g}, expected {expected:.6g})"
    return "" if _is_equal(got, expected) else f"returned {_kind(got)}{_at(where)}, expected {_kind(expected)}"


def tolerance(dtype: torch.dtype) -> float:
    """Error that is right, relative to an element and to the root mean square of all, and 0 for what must be equal.

    4 units in the last place of 16-bit floats; 1 of fp8, where 4 would let zeros through; 1e-5 for float32; 1e-12 for float64.
    """
    if dtype.is_complex:
        return tolerance(dtype.to_real())
    if not dtype.is_floating_point or dtype in _PACKED:
        return 0.0
    return _RTOL.get(dtype) or (0.0 if dtype in _RTOL else torch.finfo(dtype).eps)


def _of_tensors(got: torch.Tensor, expected: torch.Tensor, rtol: float | None, atol: float | None, where: str) -> str:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"returned {_kind(got)}{_at(where)}, expected {_kind(expected)}"
    if got.numel() == 0:
        return ""
    rtol = tolerance(got.dtype) if rtol is None else rtol
    n_dims = got.dim()
    got, expected = _plain(got), _plain(expected)
    pieces = list(_pieces((0,) * got.dim(), got, expected))
    rms = torch.zeros((), dtype=torch.float64, device=got.device)
    if atol is None and rtol and got.is_floating_point():
        for _, _, piece in pieces:
            rms += piece.to(got.device, torch.float64).nan_to_num(0.0, 0.0, 0.0).square_().sum()
        rms = (rms / expected.numel()).sqrt().nan_to_num_(0.0, 0.0, 0.0)  # too large to square: each element counts for itself
    bound = rtol * rms if atol is None else rms + atol
    found = torch.stack([_errors(mine, theirs, rtol, bound) for _, mine, theirs in pieces]).tolist()
    n_wrong, n_nan = (int(sum(counts)) for counts in list(zip(*found, strict=True))[:2])
    if not n_wrong:
        return ""
    (origin, piece, _), (*_, flat) = max(zip(pieces, found, strict=True), key=lambda each: each[1][2])
    index = tuple(start + int(offset) for start, offset in zip(origin, np.unravel_index(int(flat), piece.shape), strict=True))
    count = f"{got.numel()} elements{_at(where)}"
    place = list(index[:n_dims])
    if n_nan:
        return f"{n_nan} of {count} are NaN, the first at {place}: not written?"
    mine, theirs = got[index].item(), expected[index].item()
    error = math.inf if math.isnan(abs(mine - theirs)) else abs(mine - theirs)
    limit = f"beyond {rtol:.2g} * (|expected| + {rms.item():.2g})" if atol is None else f"beyond {atol:.2g} + {rtol:.2g} * |expected|"
    which = limit if got.is_floating_point() else "differ"
    return f"wrong by {error:.2g} at {place} (got {mine:.6g}, expected {theirs:.6g}; {n_wrong} of {count} {which})"


def _errors(got: torch.Tensor, expected: torch.Tensor, rtol: float, bound: torch.Tensor) -> torch.Tensor:
    """Numbers of wrong elements and of NaN that should be none; size and place of the worst error, on the device, as four doubles."""
    expected = expected.to(got.device)
    if got.is_floating_point():
        dtype = torch.float64 if got.dtype == torch.float64 else torch.float32
        got, expected = got.to(dtype), expected.to(dtype)
        error = (got - expected).abs_()
        # Where nothing finite is expected, nothing but the same will do.
        allowed = expected.abs().nan_to_num_(0.0, 0.0, 0.0).mul_(rtol).add_(bound.to(dtype))
        is_right = (error <= allowed).logical_or_(got == expected)
        is_nan = got.isnan().logical_and_(expected.isnan().logical_not_())
        is_right.logical_or_(got.isnan().logical_and_(is_nan.logical_not()))
    else:
        error, is_right = (got.double() - expected.double()).abs_(), got == expected
        is_nan = torch.zeros_like(is_right)
    largest = torch.finfo(error.dtype).max
    # The first NaN counts as the worst, then infinite errors, then the largest one.
    error = error.nan_to_num_(largest, largest).masked_fill_(is_right, -1.0).masked_fill_(is_nan, math.inf).flatten()
    worst = error.argmax()
    return torch.stack([is_right.logical_not_().sum().double(), is_nan.sum().double(), error[worst].double(), worst.double()])


def _pieces(origin: _Index, got: torch.Tensor, expected: torch.Tensor) -> Iterator[tuple[_Index, torch.Tensor, torch.Tensor]]:
    """Both tensors in pieces of few elements, in order, with the index at which each begins."""
    if got.numel() <= _PIECE:
        yield origin, got, expected
        return
    dim = next(k for k, size in enumerate(got.shape) if size > 1)
    half = got.shape[dim] // 2
    for start, size in ((0, half), (half, got.shape[dim] - half)):
        begin = (*origin[:dim], origin[dim] + start, *origin[dim + 1 :])
        yield from _pieces(begin, got.narrow(dim, start, size), expected.narrow(dim, start, size))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a layout and dtype to compute with; complex ones with a last dimension of two."""
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.view(_PACKED[tensor.dtype]) if tensor.dtype in _PACKED else tensor


def parts_of(value: Any) -> dict[Any, Any] | None:
    """The items of a container, by name or index; None for anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
    return None


def tensors_of(result: Any) -> dict[Path, torch.Tensor]:
    """The tensors in all parts of a result, in fields of dataclasses, too. A container is searched once: it may hold itself."""
    found: dict[Path, torch.Tensor] = {}
    seen: dict[int, Any] = {}  # by identity, and kept alive, because an identity that is free may be given to another
    waiting: list[tuple[Path, Any]] = [((), result)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found[path] = value
        elif id(value) not in seen and (parts := parts_of(value)):
            seen[id(value)] = value
            waiting += [((*path, key), each) for key, each in reversed(parts.items())]
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


def _is_equal(got: Any, expected: Any) -> bool:
    try:
        return got is expected or bool(got == expected)
    except Exception as error:  # comparing the user's objects may raise anything
        raise TypeError(f"cannot compare a {type(got).__name__} with a {type(expected).__name__}: return tensors and numbers") from error


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a nested tensor of {value.dtype}" if value.is_nested else f"a tensor {list(value.shape)} {value.dtype}"
    parts = parts_of(value)
    if isinstance(value, Mapping) or (parts is not None and not isinstance(value, list | tuple)):
        return f"a {type(value).__name__} of {', '.join(map(repr, parts or ()))}"[:200]
    return f"a {type(value).__name__} of length {len(parts)}" if parts is not None else f"{value!r}"[:100]


def _at(where: str) -> str:
    return f" in result{where}" if where else ""
