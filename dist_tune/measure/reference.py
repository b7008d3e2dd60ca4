"""Checks as users give them: a reference, ``matches`` of one, or a function that looks at the result.

Knows how to call them and what they say; nothing of the function that is tuned.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from dist_tune.measure.compare import difference, parts_of
from dist_tune.measure.inputs import name_of
from dist_tune.measure.memory import Path, memory_of, shares_memory, tensors_in, version_of
from dist_tune.validation import check_function


@dataclass(frozen=True)
class Matches:
    """A check: the result must be what ``reference`` returns for the same arguments. Made by ``matches``."""

    reference: Callable[..., Any]
    rtol: float | None = None
    atol: float | None = None

    def __call__(self, result: Any, *args: Any, **kwargs: Any) -> None:
        """Raise ``AssertionError``, saying where and by how much ``result`` is wrong."""
        with torch.no_grad():
            if wrong := self.difference(result, self.reference(*args, **kwargs)):
                raise AssertionError(wrong)

    def difference(self, result: Any, expected: Any) -> str:
        """Why ``result`` is wrong; empty if it is right."""
        return difference(result, expected, self.rtol, self.atol)


def matches(reference: Callable[..., Any], *, rtol: float | None = None, atol: float | None = None) -> Matches:
    """A check: the result must be what ``reference(*args, **kwargs)`` returns.

    Equal are nested tuples, lists and dicts of tensors with the same shapes and dtypes, where every element differs by at most
    ``atol + rtol * |expected|``. ``atol`` is ``rtol`` times the root mean square of what is expected, if it is not given; ``rtol`` is 4
    units in the last place for 16-bit floats, 1 for fp8, 1e-5 for float32 and 1e-12 for float64. Matrix products of float32 are
    TF32 in Triton, unless it is told otherwise, and need ``rtol=1e-3``. Integers and bools must be equal.

    Raises:
        TypeError: ``reference`` is no function.
        ValueError: a tolerance is negative, infinite or NaN.
    """
    check_function("reference", reference, "reference(*args, **kwargs)", is_needed=True)
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value}, need a number from 0")
    return Matches(reference, rtol, atol)


def ask(reference: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], written: set[Path] | None = None) -> Any:
    """The result of a reference, in memory that no argument shares; what torch has written to arguments meanwhile is undone.

    With ``out=`` it writes the right answer there, where a candidate that then writes nothing would find it. Needs memory for a copy of the
    arguments while it runs; those that do not fit are left as the reference leaves them. ``written`` gets the positions of what it wrote.
    """
    arguments = tensors_in((args, kwargs))
    kept = []
    for path, each in arguments.items():
        if (memory := memory_of(each)) is not None:
            with suppress(torch.OutOfMemoryError):
                kept.append((path, each, version_of(each), memory, memory.clone()))
    try:
        return _own(reference(*args, **kwargs), list(arguments.values()))
    finally:
        for path, argument, version, memory, copy in reversed(kept):
            if version is None or version_of(argument) != version:  # peers may write to symmetric memory meanwhile: that stays
                memory.copy_(copy)
                if written is not None and version is not None:
                    written.add(path)


def _own(value: Any, others: list[torch.Tensor]) -> Any:
    """The value, with copies of tensors that share memory with others."""
    if isinstance(value, torch.Tensor):
        return value.clone() if shares_memory(value, others) else value
    if isinstance(value, list | tuple):
        return [_own(each, others) for each in value]
    parts = parts_of(value)
    return value if parts is None else {key: _own(each, others) for key, each in parts.items()}


def as_reference(check: Callable[..., Any], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Matches | None:
    """A check as a reference, if it is one."""
    if isinstance(check, Matches):
        return check
    parameters = _signature(check.forward if isinstance(check, torch.nn.Module) else check)
    if parameters is None:  # an operator of torch: what looks at results is written in Python
        return Matches(check)
    is_check, is_reference = _fits(parameters, (None, *args), kwargs), _fits(parameters, args, kwargs)
    if not is_check and not is_reference:
        raise TypeError(
            f"{name_of(check)}{parameters} can be called neither as a check, with the result and then {len(args)} positional "
            f"arguments and {sorted(kwargs)}, nor as a reference, without the result"
        )
    if is_check and is_reference:
        own = _signature(function)
        is_reference = own is not None and next(iter(own.parameters), None) == next(iter(parameters.parameters), "")
    return Matches(check) if is_reference else None


def answer_of(check: Callable[..., Any], result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Reason of a user's check why the result is wrong; empty if it is right."""
    try:
        answer = check(result, *args, **kwargs)
    except AssertionError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [f"{frame.line} (line {frame.lineno})"]
        return "; ".join(lines[:3])[:400]
    if answer is None:
        return ""
    is_one = getattr(answer, "dtype", None) is not None and math.prod(answer.shape) == 1 and "bool" in str(answer.dtype)
    if not is_one and not isinstance(answer, bool):
        raise TypeError(
            f"the check {name_of(check)} returned {type(answer).__name__}, need None or a bool, or an AssertionError. If it returns what "
            f"the result should be, say so: matches({name_of(check)})"
        )
    return "" if bool(answer) else f"{name_of(check)} returned False"


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (ValueError, TypeError):
        return None


def _fits(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
