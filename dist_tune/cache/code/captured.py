"""Plain values that a function can see: those that it captured or is bound to, and globals that it names.

A fingerprint of code leaves some of them out, because they may change without a change of the computation. Times measured with other
values must not be continued all the same. Runs no code of the user's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from dist_tune.cache.code.code_facts import names_in
from dist_tune.cache.code.inspection import EMPTY, attributes_of
from dist_tune.keys import shared_sizes

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_MAX_DEPTH = 3
"""Functions in functions, and objects in objects."""


def plain_values(function: Any) -> list[str]:
    """Each as "name=value", sorted; tensors by shape and dtype. Lists, dicts and variables that the code assigns to are state: left out."""
    return sorted({f"{name}={text}" for name, text in _seen(function, "", 0)})


def plain_parts(thing: Any) -> Iterator[tuple[str, str]]:
    """Plain attributes of an object by path, and of objects in it."""
    for attribute, each in list(attributes_of(thing).items())[:64]:
        yield from _seen(each, attribute, 1)


def _seen(value: Any, name: str, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, torch.device):
        yield name, value.type  # its index differs between ranks, and which GPU it is belongs to the environment
    elif isinstance(value, _PLAIN):
        yield name, repr(value)
    elif isinstance(value, torch.Tensor):
        yield name, f"{shared_sizes(value) if value.is_nested else tuple(value.shape)} {value.dtype}"
    elif isinstance(value, tuple):
        for k, each in enumerate(value[:16]):
            yield from _seen(each, f"{name}[{k}]", depth + 1)
    elif depth >= _MAX_DEPTH or isinstance(value, type | ModuleType | list | dict | set):
        return
    elif isinstance(value, functools.partial):
        for part, label in ((value.func, "func"), (value.args, "args"), (tuple(sorted(value.keywords.items())), "keywords")):
            yield from _seen(part, f"{name}.{label}", depth)
    elif isinstance(value, MethodType):
        yield from _seen(value.__func__, name, depth)
        yield from _seen(value.__self__, f"{name}.self", depth)
    elif isinstance(value, FunctionType):
        for variable, each in _variables(value).items():
            yield from _seen(each, f"{name}.{variable}", depth + 1)
    elif isinstance(getattr(value, "__dict__", None), dict):
        for attribute, each in list(vars(value).items())[:64]:
            yield from _seen(each, f"{name}.{attribute}", depth + 1)


def _variables(function: FunctionType) -> dict[str, Any]:
    """Globals and captured variables that the code names and does not assign to."""
    names = names_in(function.__code__)
    found = {each: function.__globals__[each] for each in names.read & function.__globals__.keys()}
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != EMPTY:
            found[variable] = cell.cell_contents
    return {variable: value for variable, value in found.items() if variable not in names.written}
