"""Fingerprints of code: a function or Triton kernel with all that it calls, as a few hex digits.

By bytecode, so that comments and places do not count, and without running or asking anything of the user's. Knows Triton's
kernels by their attributes only, and nothing of configs, keys or records.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import inspect
import sys
from contextlib import suppress
from itertools import islice
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_MOST_NODES, _MOST_VALUES = 2_000, 20_000  # functions and classes; constants and captured values of all of them
_MOST_ELEMENTS, _MOST_CHARACTERS = 4_096, 1 << 22  # of one container; of one string
_DEEPEST = 32  # containers in containers
# A record has the versions of the first four; the others check values or tell people how a run goes.
_LIBRARIES = frozenset({"torch", "triton", "numpy", "dist_tune", "loguru", "rich", "tqdm", "pydantic"})
_STDLIB = dis.__file__.removesuffix("dis.py")
# Where functools, Triton, numba and torch.library keep what they wrap.
_WRAPPED = ("__wrapped__", "fn", "func", "py_func", "_init_fn")
_PARTS = {MethodType: "__func__ __self__", BuiltinFunctionType: "__module__ __qualname__", functools.partial: "func args keywords"}
_PARTS |= {property: "fget fset fdel", staticmethod: "__func__", classmethod: "__func__"}
_KERNEL_OPTIONS = ("do_not_specialize", "do_not_specialize_on_alignment", "noinline", "debug", "reset_to_zero", "restore_value")
_READS = {dis.opmap["LOAD_GLOBAL"]: 1, dis.opmap["LOAD_NAME"]: 0}  # and the lowest bit of the name's index
_WRITES_OF_GLOBALS = {dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"]}
_WRITES_OF_CELLS = {dis.opmap["STORE_DEREF"], dis.opmap["DELETE_DEREF"]}
_LOADS_OF_FIRST = [bytes([step, 0]) for step in dis.hasconst]
_SCALARS: frozenset[type] = frozenset({bool, float, complex, range, type(None), type(Ellipsis)})
_PLAIN: tuple[type, ...] = (*_SCALARS, int, str, bytes, enum.Enum, torch.dtype, torch.device)
_CONTAINERS = (tuple, list, dict, set, frozenset)
_EMPTY = CellType()  # a variable that has no value yet
# vars(), __mro__ and the like, without asking a module that loads itself, or a metaclass.
_vars_of_module = vars(ModuleType)["__dict__"].__get__
_vars_of_class, _mro, _name, _module = (vars(type)[name].__get__ for name in ("__dict__", "__mro__", "__qualname__", "__module__"))


def fingerprint(function: object) -> str:
    """16 hex digits of the code of a function, method, class, callable object or Triton kernel, and of all that it calls.

    The same in all processes of one minor version of Python, wherever the files are, and for a kernel under Triton's interpreter.
    Counted are bytecode, arguments, defaults and annotations; captured values, tensors by shape and dtype; of globals, constants in
    UPPER_CASE and Triton's ``constexpr``. Followed are globals, captured functions and attributes of modules that the code
    names, into all packages but the standard library, torch, triton, numpy and dist_tune. Not followed: imports within a function,
    and what an object holds. A variable that the code itself assigns to is state and not counted. Never raises.
    The work is bounded: what is nearest to the function counts first.
    """
    return _Reader(function).digest()


class _Reader:
    """Reads code node by node, nearest first. ``_reference`` puts a node on the list."""

    def __init__(self, root: object) -> None:
        self._layers = [root]  # and what it wraps
        self._nodes: list[Any] = []  # also holds on to them, so that no id is used twice
        self._places: dict[int, int] = {}
        self._values_left = _MOST_VALUES
        while (wrapped := _wrapped_by(self._layers[-1])) is not None and len(self._layers) < _DEEPEST:
            self._layers.append(wrapped)
        self._opened = _package(self._layers[-1])  # read even if it is a library

    def digest(self) -> str:
        hasher = hashlib.sha256(ascii(self._value(self._layers[0])).encode())
        for node in self._nodes:  # grows
            try:
                hasher.update(ascii(self._read(node)).encode())
            except Exception:  # noqa: BLE001  # properties and metaclasses of the user's raise what they like; all else still counts
                hasher.update(b"unreadable")
        return hasher.hexdigest()[:16]

    def _reference(self, node: object) -> tuple[str, int]:
        if id(node) not in self._places and len(self._nodes) < _MOST_NODES:
            self._places[id(node)] = len(self._nodes)
            self._nodes.append(node)
        return "node", self._places.get(id(node), -1)

    def _is_foreign(self, value: object) -> bool:
        package = _package(value)
        return package == "builtins" or (package != self._opened and _is_library(package))

    def _read(self, node: Any) -> tuple[Any, ...]:
        kind = type(node)
        if kind is FunctionType:
            return self._foreign_function(node) if self._is_foreign(node) else self._function(node)
        if parts := _parts(node):
            return _name(kind), [self._value(part) for part in parts]
        return self._class(node) if issubclass(kind, type) else self._object(node)

    def _function(self, function: FunctionType) -> tuple[Any, ...]:
        codes = [function.__code__]
        for code in codes:  # grows
            codes += [each for each in code.co_consts if type(each) is CodeType]
        read, written = _names_used(codes)
        cells = zip(codes[0].co_freevars, function.__closure__ or (), strict=True)
        captured = {name: cell.cell_contents for name, cell in cells if cell != _EMPTY}
        scopes = [function.__globals__, *[_vars_of_module(each) for each in captured.values() if issubclass(type(each), ModuleType)]]
        return (
            self._code(codes[0]),
            self._value((function.__defaults__, function.__kwdefaults__, function.__annotations__, function.__dict__.get("__wrapped__"))),
            [(name, self._value(each)) for name, each in captured.items() if name not in written or _is_code(each)],
            self._globals(read - written, {name for code in codes for name in code.co_names}, scopes),
        )

    def _foreign_function(self, function: FunctionType) -> tuple[Any, ...]:
        """Of a library's function its name and what it wraps."""
        wrapped = function.__dict__.get("__wrapped__")
        held = [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY] if wrapped is None else [wrapped]
        return _package(function), function.__code__.co_qualname, [self._reference(each) for each in held if _is_code(each)]

    def _code(self, code: CodeType) -> tuple[Any, ...]:
        stars = bool(code.co_flags & inspect.CO_VARARGS), bool(code.co_flags & inspect.CO_VARKEYWORDS)
        n_args = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, *stars
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + sum(stars)]
        steps, constants = code.co_code, code.co_consts
        # Of a function, not of a class or a comprehension, the first constant may be a docstring; unless the code uses it, too.
        if code.co_flags & inspect.CO_OPTIMIZED and code.co_name[:1] != "<" and not any(load in steps for load in _LOADS_OF_FIRST):
            constants = constants[int(str in map(type, constants[:1])) :]
        return steps, code.co_exceptiontable, n_args, names, code.co_names, code.co_freevars, [self._value(each) for each in constants]

    def _globals(self, names: set[str], attributes: set[str], scopes: list[dict[str, Any]]) -> list[Any]:
        """What ``names`` mean in the first scope and ``attributes`` in the modules found there: more than is used, never less."""
        found = []
        for scope in scopes:  # grows
            for name in sorted(names if scope is scopes[0] else attributes):
                value = dict.get(scope, name)
                if not issubclass(type(value), ModuleType):
                    found.append((name, self._named(name, value)))
                elif not self._is_foreign(value) and all(_vars_of_module(value) is not other for other in scopes):
                    scopes.append(_vars_of_module(value))
        return [(name, meaning) for name, meaning in found if meaning is not None]

    def _named(self, name: str, value: object) -> Any:
        """What a global or an attribute of a class means; None for what may change while the program runs."""
        kind = type(value)
        if _is_code(value):
            return self._reference(value)
        if _name(kind) == "constexpr" or (name.isupper() and (_is_constant(value) or not issubclass(kind, _CONTAINERS))):
            return self._value(value)
        return None if self._is_foreign(value) else ("object", self._reference(kind))

    def _class(self, cls: type) -> tuple[Any, ...]:
        if self._is_foreign(cls):
            return _package(cls), _name(cls)
        members = [(name, self._named(name, value)) for name, value in list(_vars_of_class(cls).items())]
        return [self._reference(base) for base in _mro(cls)[1:]], [(name, meaning) for name, meaning in members if meaning is not None]

    def _object(self, thing: object) -> tuple[Any, ...]:
        held = _held(thing)
        wrapped = [(name, self._reference(held[name])) for name in _WRAPPED if _is_code(held.get(name))]
        if not wrapped or not self._is_foreign(thing):
            own = [name for name in sorted(held) if _is_code(held[name]) and not self._is_foreign(held[name])]
            return self._reference(type(thing)), wrapped, [(name, self._reference(held[name])) for name in own]
        # A layer of a kernel. Its class does not count: the interpreter has another one, with the options in ``kwargs``.
        given = held | held.get("kwargs", {})
        options = [(name, self._value(given[name])) for name in _KERNEL_OPTIONS if given.get(name)]
        hooks = [self._value(held[name]) for name in ("pre_hook", "post_hook") if held.get(f"user_defined_{name}")]
        configs = held.get("configs", [])
        if any(thing is each for each in self._layers):  # its configs are the candidates, and counted as such; their hooks only by name
            found = [_held(config).get("pre_hook") for config in configs]
            configs = list({id(hook): hook for hook in found if hook is not None}.values())  # however many configs there are
        return wrapped, options, hooks, self._value(held.get("values")), self._value(configs)

    def _value(self, value: Any, depth: int = 0) -> Any:
        """A constant, default or captured value in plain terms: an object by its class."""
        kind = type(value)
        try:
            if kind in _SCALARS or (kind is int and -(1 << 64) < value < 1 << 64) or (kind in (str, bytes) and len(value) < 256):
                return value
            return self._composed(value, kind, depth + 1) if self._values_left >= 0 and depth < _DEEPEST else ("beyond", _name(kind))
        except Exception:  # noqa: BLE001  # as above
            return "unreadable", _name(kind)

    def _composed(self, value: Any, kind: Any, depth: int) -> Any:
        if kind is CodeType:
            return self._code(value)
        if issubclass(kind, enum.Enum):
            return "enum", _name(kind), _held(value).get("_name_"), self._value(_held(value).get("_value_"), depth)
        base = _base(kind, (int, float, str, bytes, *_CONTAINERS))
        if base in (int, float):
            return _name(base), base.__format__(value, "x" if base is int else "")
        if base in (str, bytes):
            start = ascii(base.__getitem__(value, slice(_MOST_CHARACTERS))).encode()
            self._values_left -= len(start) >> 8
            return _name(base), base.__len__(value), hashlib.sha256(start).hexdigest()
        if base is not None:
            return _name(base), base.__len__(value), self._elements(base, value, depth)
        if _is_value(kind):
            return _name(kind), self._value(_held(value) or str(value), depth)
        is_of_numpy = _package(kind) == "numpy" and hasattr(kind, "dtype")
        if is_of_numpy or issubclass(kind, torch.Tensor):  # a number of numpy's, but no tensor, is read: it may be on a device
            return "tensor", tuple(map(int, value.shape)), str(value.dtype), ascii(value) if is_of_numpy and not value.shape else ""
        if _is_code(value):
            return self._reference(value)
        return "object", self._reference(kind), value.type if kind is torch.device else ""  # its index is another one on each rank

    def _elements(self, base: Any, value: Any, depth: int) -> list[Any]:
        some = _first(base, value)
        self._values_left -= len(some)
        if base in (tuple, list):
            return [self._value(each, depth) for each in some]
        # One order for all processes, before functions get their places.
        names = [name for name, _ in some] if base is dict else some
        texts = [_label(name) if _is_code(name) else ascii(self._value(name, depth)) for name in names]
        return [self._value(some[at], depth) for at in sorted(range(len(some)), key=texts.__getitem__)]


def _names_used(codes: list[CodeType]) -> tuple[set[str], set[str]]:
    """Globals that are read, and variables that are assigned to though they are global or captured."""
    read, written = set(), set()
    for code in codes:
        n_own, high = len({*code.co_varnames, *code.co_cellvars}), 0  # captured variables come after the code's own
        for step, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
            index = high | low
            high = index << 8 if step == dis.EXTENDED_ARG else 0
            if step in _READS:
                read.add(code.co_names[index >> _READS[step]])
            elif step in _WRITES_OF_GLOBALS:
                written.add(code.co_names[index])
            elif step in _WRITES_OF_CELLS and index >= n_own:
                written.add(code.co_freevars[index - n_own])
    return read, written


def _is_code(value: object) -> bool:
    """Whether it is code, or an object that wraps some."""
    return not _is_plain(type(value)) and (callable(value) or _wrapped_by(value) is not None)


def _is_plain(kind: type) -> bool:
    return issubclass(kind, _PLAIN) or issubclass(kind, _CONTAINERS) or _is_value(kind)


def _label(code: Any) -> str:
    return str(code.__qualname__) if type(code) is FunctionType else _name(code if issubclass(type(code), type) else type(code))


def _is_constant(value: object, depth: int = 0) -> bool:
    """Whether it is numbers, strings, dtypes, code and containers of these. What is empty, or holds tensors, may be filled later."""
    kind = type(value)
    base = _base(kind, _CONTAINERS)
    if base is None:
        return issubclass(kind, _PLAIN) or _is_code(value) or _is_value(kind)
    return depth < 4 and base.__len__(value) > 0 and all(_is_constant(each, depth + 1) for each in _first(base, value))


def _is_value(kind: type) -> bool:
    """Whether it is a dtype of a library, or Triton's ``constexpr`` or ``Config``."""
    return _package(kind) in ("torch", "triton", "numpy") and not {"dtype", "constexpr", "Config"}.isdisjoint(map(_name, _mro(kind)))


def _base(kind: type, bases: tuple[type, ...]) -> Any:
    return next((base for base in bases if issubclass(kind, base)), None)


def _first(base: Any, value: Any) -> list[Any]:
    """The first elements of a container; of a large set none, for which come first differs between processes."""
    is_vast = base in (set, frozenset) and base.__len__(value) > _MOST_ELEMENTS
    return [] if is_vast else list(islice((dict.items if base is dict else base.__iter__)(value), _MOST_ELEMENTS))


def _wrapped_by(value: object) -> Any:
    held = _held(value)
    inner = [held[name] for name in _WRAPPED if name in held and (callable(held[name]) or "fn" in _held(held[name]))]
    return [*_parts(value), *inner, None][0]


def _parts(value: object) -> list[Any]:
    kinds = [each for each in _PARTS if issubclass(type(value), each)]
    return [vars(each)[part].__get__(value) for each in kinds for part in _PARTS[each].split()]


def _held(thing: object) -> dict[str, Any]:
    """What an object has in its ``__dict__``, without asking it."""
    with suppress(Exception):  # there is no __dict__, or it is a property of the user's
        held = object.__getattribute__(thing, "__dict__") if not issubclass(type(thing), type) else None
        return held if type(held) is dict else {}
    return {}


def _package(value: Any) -> str:
    """The package that a function, class or module is in; of an object, that its class is in."""
    kind = type(value)
    names = value.__globals__ if kind is FunctionType else _vars_of_module(value) if issubclass(kind, ModuleType) else None
    module = dict.get(names, "__name__") if names is not None else _module(value if issubclass(kind, type) else kind)
    return module.partition(".")[0] if type(module) is str else ""


@functools.cache
def _is_library(package: str) -> bool:
    file = _vars_of_module(sys.modules.get(package, sys)).get("__file__") or _STDLIB  # a file of the user's may have such a name
    return package in _LIBRARIES or (package in sys.stdlib_module_names and str(file).startswith(_STDLIB))
