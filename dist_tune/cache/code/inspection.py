"""Objects and code read without running any code of the user's: no ``repr``, property, module ``__getattr__`` or metaclass.

Knows Python's types and those of torch, triton and numpy by name; nothing of fingerprints.
"""

from __future__ import annotations

import dis
import enum
import functools
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

MAX_ELEMENTS = 4_096
"""Of one container."""
SCALARS: frozenset[type] = frozenset({bool, float, complex, range, type(None), type(Ellipsis)})
_PLAIN: tuple[type, ...] = (*SCALARS, int, str, bytes, enum.Enum, torch.dtype, torch.device)
CONTAINERS = (tuple, list, dict, set, frozenset)
_NO_CODE = (*_PLAIN, *CONTAINERS)
EMPTY = CellType()
"""Equal to the cell of a variable without a value."""
# Where functools, Triton, numba and torch.library keep what they wrap.
WRAPPED = ("__wrapped__", "fn", "func", "py_func", "_init_fn")
_PARTS = {MethodType: "__func__ __self__", BuiltinFunctionType: "__module__ __qualname__", functools.partial: "func args keywords"}
_PARTS |= {property: "fget fset fdel", staticmethod: "__func__", classmethod: "__func__"}
# A record has the versions of the first four; the others check values or show progress.
_LIBRARIES = frozenset({"torch", "triton", "numpy", "dist_tune", "loguru", "rich", "tqdm", "pydantic"})
_STDLIB = dis.__file__.removesuffix("dis.py")
_READS = {dis.opmap["LOAD_GLOBAL"]: 1, dis.opmap["LOAD_NAME"]: 0}  # and the shift of the name's index
_WRITES_OF_GLOBALS = {dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"]}
_WRITES_OF_CELLS = {dis.opmap["STORE_DEREF"], dis.opmap["DELETE_DEREF"]}
_NAMING = re.compile(b"[" + re.escape(bytes({*_READS, *_WRITES_OF_GLOBALS, *_WRITES_OF_CELLS})) + b"]", re.DOTALL)
# vars(), __mro__ and the like.
vars_of_module = vars(ModuleType)["__dict__"].__get__
vars_of_class, mro_of, name_of, _module_of = (vars(type)[name].__get__ for name in ("__dict__", "__mro__", "__qualname__", "__module__"))


def attributes_of(thing: object) -> dict[str, Any]:
    """The ``__dict__`` of an object; empty for a class."""
    with suppress(Exception):  # no __dict__, or a property of the user's
        held = object.__getattribute__(thing, "__dict__") if not issubclass(type(thing), type) else None
        return held if type(held) is dict else {}
    return {}


def package_of(value: Any) -> str:
    """The package of a function, class or module; of an object, that of its class."""
    kind = type(value)
    names = value.__globals__ if kind is FunctionType else vars_of_module(value) if issubclass(kind, ModuleType) else None
    module = dict.get(names, "__name__") if names is not None else _module_of(value if issubclass(kind, type) else kind)
    return module.partition(".")[0] if type(module) is str else ""


@functools.cache
def is_library(package: str) -> bool:
    """A package that a fingerprint leaves out: its version or Python's is in the record, or it computes nothing."""
    file = vars_of_module(sys.modules.get(package, sys)).get("__file__") or _STDLIB  # a file of the user's may have such a name
    return package in _LIBRARIES or (package in sys.stdlib_module_names and str(file).startswith(_STDLIB))


def label_of(code: Any) -> str:
    """Qualified name of a function or class, or of an object's class."""
    return str(code.__qualname__) if type(code) is FunctionType else name_of(code if issubclass(type(code), type) else type(code))


def parts_of(value: object) -> list[Any]:
    """Parts of a method, builtin, partial, property, staticmethod or classmethod; empty for other objects."""
    kinds = [each for each in _PARTS if issubclass(type(value), each)]
    return [vars(each)[part].__get__(value) for each in kinds for part in _PARTS[each].split()]


def wrapped_by(value: object) -> Any:
    """The function or object that this one wraps, None if it wraps none."""
    held = attributes_of(value)
    inner = [held[name] for name in WRAPPED if name in held and (callable(held[name]) or "fn" in attributes_of(held[name]))]
    return [*parts_of(value), *inner, None][0]


def base_of(kind: type, bases: tuple[type, ...]) -> Any:
    """The first of ``bases`` that a class derives from, or None."""
    for base in bases:
        if issubclass(kind, base):
            return base
    return None


def first_elements(base: Any, value: Any) -> list[Any]:
    """The first elements of a container; none of a large set, because its order differs between processes."""
    is_vast = base in (set, frozenset) and base.__len__(value) > MAX_ELEMENTS
    return [] if is_vast else list(islice((dict.items if base is dict else base.__iter__)(value), MAX_ELEMENTS))


def is_value(kind: type) -> bool:
    """A dtype of a library, or Triton's ``constexpr`` or ``Config``."""
    return package_of(kind) in ("torch", "triton", "numpy") and not {"dtype", "constexpr", "Config"}.isdisjoint(map(name_of, mro_of(kind)))


def is_code(value: object) -> bool:
    """Code, or an object that wraps some."""
    kind = type(value)
    if kind is FunctionType:
        return True
    return not issubclass(kind, _NO_CODE) and not is_value(kind) and (callable(value) or wrapped_by(value) is not None)


def is_word(value: object) -> bool:
    """A text that is short enough to be its own meaning."""
    return type(value) in (str, bytes) and len(value) < 256  # type: ignore[arg-type]


def is_constant(value: object, depth: int = 0) -> bool:
    """Numbers, strings, dtypes, code and containers of these; not an empty container, because it may be filled later."""
    kind = type(value)
    base = base_of(kind, CONTAINERS)
    if base is None:
        return issubclass(kind, _PLAIN) or is_code(value) or is_value(kind)
    return depth < 4 and base.__len__(value) > 0 and all(is_constant(each, depth + 1) for each in first_elements(base, value))


def nested_codes(code: CodeType) -> Iterator[CodeType]:
    """This code and all code within it."""
    yield code
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from nested_codes(constant)


def names_used(codes: list[CodeType]) -> tuple[set[str], set[str]]:
    """Globals that are read, and variables that are assigned to though they are global or captured."""
    read, written = set(), set()
    for code in codes:
        n_own = len({*code.co_varnames, *code.co_cellvars})  # captured variables come after the code's own
        steps, low = code.co_code[::2], code.co_code[1::2]
        for at in (match.start() for match in _NAMING.finditer(steps)):
            step, index, shift, before = steps[at], low[at], 8, at - 1
            while before >= 0 and steps[before] == dis.EXTENDED_ARG:
                index |= low[before] << shift
                shift, before = shift + 8, before - 1
            if step in _READS:
                read.add(code.co_names[index >> _READS[step]])
            elif step in _WRITES_OF_GLOBALS:
                written.add(code.co_names[index])
            elif index >= n_own:
                written.add(code.co_freevars[index - n_own])
    return read, written
