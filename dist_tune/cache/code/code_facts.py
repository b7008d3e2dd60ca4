"""Facts of code objects, each read once in a process: code cannot change, and the kernels of a library share most of what they call.

Kept by identity and with the code, so that no id is used twice; nothing here depends on globals, captured values or files.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple, TypeVar

from dist_tune.cache.code.imports import Import, imports_in
from dist_tune.cache.code.inspection import names_used, nested_codes

_MAX_KEPT = 8_192
"""Code objects; a program that makes functions for ever shall not fill the memory with their code."""
_LOADS_OF_FIRST = [bytes([step, 0]) for step in dis.hasconst]
Fact = TypeVar("Fact")


def once_for_code(fact: Callable[[CodeType], Fact]) -> Callable[[CodeType], Fact]:
    """A function of code and nothing else, called once for each code object."""
    kept: dict[int, tuple[CodeType, Fact]] = {}

    def known(code: CodeType) -> Fact:
        found = kept.get(id(code))
        if found is None:
            if len(kept) >= _MAX_KEPT:
                kept.clear()
            found = kept[id(code)] = code, fact(code)
        return found[1]

    return known


class Names(NamedTuple):
    """Names that a function's code, and all code within it, holds."""

    read: frozenset[str]
    """Globals that are read."""
    written: frozenset[str]
    """Variables that are assigned to though they are global or captured."""
    attributes: frozenset[str]
    """All names that stand in it, of globals, attributes and modules."""


@once_for_code
def names_in(code: CodeType) -> Names:
    """The names in the code of a function."""
    codes = list(nested_codes(code))
    read, written = names_used(codes)
    return Names(frozenset(read), frozenset(written), frozenset(name for each in codes for name in each.co_names))


@once_for_code
def _imports_by_package(code: CodeType) -> dict[str, list[Import]]:
    return {}


def imports_of(code: CodeType, package: str) -> list[Import]:
    """Imports that a function's code makes, if its module is in ``package``."""
    found = _imports_by_package(code)
    if package not in found:
        found[package] = imports_in(nested_codes(code), package)
    return found[package]


class _Spelled:
    """Text in the place of the values that it spells out, so that ``ascii`` of what holds it need not go through them again."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


@once_for_code
def head_and_constants(code: CodeType) -> tuple[object, tuple[Any, ...]]:
    """All of a code object but its constants, spelled out to stand in a tuple; and its constants, less a docstring."""
    stars = bool(code.co_flags & inspect.CO_VARARGS), bool(code.co_flags & inspect.CO_VARKEYWORDS)
    n_args = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, *stars
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + sum(stars)]
    steps, constants = code.co_code, code.co_consts
    # The first constant of a function (not of a class or comprehension) may be a docstring, unless its code uses it.
    if code.co_flags & inspect.CO_OPTIMIZED and code.co_name[:1] != "<" and not any(load in steps for load in _LOADS_OF_FIRST):
        constants = constants[int(str in map(type, constants[:1])) :]
    head = steps, code.co_exceptiontable, n_args, names, code.co_names, code.co_freevars
    return _Spelled(ascii(head)[1:-1]), constants
