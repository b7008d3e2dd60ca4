"""The plain values that a function can see: what it captured, what it is bound to, the globals that it names.

A fingerprint of code leaves some of them out, for they may change without a change of what is computed. What was measured with others
is not to be gone on from all the same. Runs nothing of the user's.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_WRITES = {dis.opmap["STORE_GLOBAL"], dis.opmap["STORE_DEREF"]}
_DEPTH = 3
"""Functions in functions, and objects in objects."""


def plain_values(function: Any) -> list[str]:
    """Each as "name=value", in an order of their own; tensors by shape and dtype.

    Lists, dicts and what the code assigns to is state, and left out.
    """
    return sorted({f"{name}={text}" for name, text in _seen(function, "", 0)})


def _seen(value: Any, name: str, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, _PLAIN):
        yield name, repr(value)
    elif isinstance(value, torch.Tensor):
        yield name, f"{tuple(value.shape)} {value.dtype}"
    elif isinstance(value, tuple):
        for k, each in enumerate(value[:16]):
            yield from _seen(each, f"{name}[{k}]", depth + 1)
    elif depth >= _DEPTH or isinstance(value, type | ModuleType | list | dict | set):
        return
    elif isinstance(value, functools.partial):
        for part, label in ((value.func, "func"), (value.args, "args"), (tuple(sorted(value.keywords.items())), "keywords")):
            yield from _seen(part, f"{name}.{label}", depth)
    elif isinstance(value, MethodType):
        yield from _seen(value.__func__, name, depth)
        yield from _seen(value.__self__, f"{name}.self", depth)
    elif isinstance(value, FunctionType):
        yield from _of_function(value, name, depth)
    elif isinstance(getattr(value, "__dict__", None), dict):
        for attribute, each in list(vars(value).items())[:64]:
            yield from _seen(each, f"{name}.{attribute}", depth + 1)


def _of_function(function: FunctionType, name: str, depth: int) -> Iterator[tuple[str, str]]:
    codes = list(_codes(function.__code__))
    written = {step.argval for code in codes for step in dis.get_instructions(code) if step.opcode in _WRITES}
    read = {each for code in codes for each in code.co_names if each not in written and each in function.__globals__}
    found = {each: function.__globals__[each] for each in read}
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if variable not in written:
            try:
                found[variable] = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
    for each, value in found.items():
        yield from _seen(value, f"{name}.{each}", depth + 1)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
