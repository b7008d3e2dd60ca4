"""Fingerprints of code: a function or Triton kernel with all that it calls, as a few hex digits.

By bytecode, so that comments and places do not count, and without running code of the user's. Knows Triton's kernels by their
attributes only, and nothing of configs, keys or records. A change of any digest makes all records on disk useless.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Set
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from dist_tune.cache.code.code_facts import head_and_constants, imports_of, names_in
from dist_tune.cache.code.imports import Import, code_in, is_installed, loaded, source_of

# One name a line would be 21 lines.
# isort: off
from dist_tune.cache.code.inspection import (
    CONTAINERS, EMPTY, SCALARS, WRAPPED, attributes_of, base_of, first_elements, is_code, is_constant, is_library, is_value, is_word,
    label_of, mro_of, name_of, package_of, parts_of, vars_of_class, vars_of_module, wrapped_by,
)  # fmt: skip
# isort: on

_MAX_NODES, _MAX_VALUES = 2_000, 20_000  # functions and classes; constants and captured values of all of them
_MAX_BYTES = 1 << 19  # of files of modules
_MAX_CHARACTERS = 1 << 22  # of one string
_MAX_DEPTH = 32  # containers in containers
_KERNEL_OPTIONS = ("do_not_specialize", "do_not_specialize_on_alignment", "noinline", "debug", "reset_to_zero", "restore_value")


class Code(NamedTuple):
    """The code of a function as far as it was read."""

    digest: str
    """16 hex digits."""
    not_followed: list[str]
    """Imports whose code is not in the digest, as "module.name", sorted."""


def fingerprint(function: object) -> str:
    """16 hex digits of the code of a function, method, class, callable object or Triton kernel, and of all that it calls.

    The same in all processes of one minor version of Python, wherever the files are, and for a kernel under Triton's interpreter.
    Counted are bytecode, arguments, defaults and annotations; captured values, tensors by shape and dtype; of globals, constants in
    UPPER_CASE and Triton's ``constexpr``. Followed are globals, captured functions and attributes of modules that the code
    names, into all packages but the standard library, torch, triton, numpy and dist_tune; so are imports within a function, into
    the user's files as a whole, which are not run, and into other modules that are loaded. Not followed: what an object holds; imports
    of installed packages that are not loaded, and of names that the code computes. A variable that the code itself assigns to is
    state and not counted. Never raises. The work is bounded: code near the function counts first.
    """
    return read_code(function).digest


def read_code(function: object) -> Code:
    """The fingerprint of a function, and what it leaves out."""
    reader = Reader(function)
    return Code(reader.digest(), sorted(reader.not_followed))


@dataclass(frozen=True, eq=False)
class _File:
    """A module that is imported within a function, as it is on disk."""

    code: CodeType
    package: str
    """In which its relative imports are looked up."""


class Reader:
    """Reads functions, classes and objects (nodes) in the order in which they are referenced, the nearest first. Used once."""

    def __init__(self, root: object) -> None:
        self._layers = [root]
        """The function or kernel, and what it wraps."""
        self._nodes: list[Any] = []
        """To be read; kept, so that no id is used twice."""
        self._places: dict[int, int] = {}
        self._files: dict[str, _File | None] = {}
        self._values_left, self._bytes_left = _MAX_VALUES, _MAX_BYTES
        self.not_followed: set[str] = set()
        while (wrapped := wrapped_by(self._layers[-1])) is not None and len(self._layers) < _MAX_DEPTH:
            self._layers.append(wrapped)
        self._opened = package_of(self._layers[-1])
        """Read even if it is a library."""

    def digest(self) -> str:
        """16 hex digits of all that is read."""
        hasher = hashlib.sha256(ascii(self._value(self._layers[0])).encode())
        for node in self._nodes:  # grows
            try:
                hasher.update(ascii(self._read(node)).encode())
            except Exception:  # noqa: BLE001  # descriptors of the user's raise anything: this node is unreadable, others still count
                hasher.update(b"unreadable")
        return hasher.hexdigest()[:16]

    def _reference(self, node: object) -> tuple[str, int]:
        if id(node) not in self._places and len(self._nodes) < _MAX_NODES:
            self._places[id(node)] = len(self._nodes)
            self._nodes.append(node)
        return "node", self._places.get(id(node), -1)

    def _is_foreign(self, value: object) -> bool:
        package = package_of(value)
        return package == "builtins" or (package != self._opened and is_library(package))

    def _read(self, node: Any) -> tuple[Any, ...]:
        kind = type(node)
        if kind is _File:
            return self._code(node.code), self._imports(node.code, node.package)
        if kind is FunctionType:
            return self._foreign_function(node) if self._is_foreign(node) else self._function(node)
        if parts := parts_of(node):
            return name_of(kind), [self._held(name_of(kind), part) for part in parts]
        return self._class(node) if issubclass(kind, type) else self._object(node)

    def _function(self, function: FunctionType) -> tuple[Any, ...]:
        names = names_in(function.__code__)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        captured = {name: cell.cell_contents for name, cell in cells if cell != EMPTY}
        scopes = [function.__globals__, *[vars_of_module(each) for each in captured.values() if issubclass(type(each), ModuleType)]]
        package = dict.get(function.__globals__, "__package__") or ""
        imports = self._imports(function.__code__, package if type(package) is str else "")
        return (
            *([imports] if imports else []),
            self._code(function.__code__),
            self._arguments(function),
            [(name, self._held(name, each)) for name, each in captured.items() if name not in names.written or is_code(each)],
            self._globals(names.read - names.written, names.attributes, scopes),
        )

    def _arguments(self, function: FunctionType) -> Any:
        """Defaults and annotations, and the function that this one wraps."""
        return self._value((function.__defaults__, function.__kwdefaults__, function.__annotations__, function.__dict__.get("__wrapped__")))

    def _held(self, name: str, value: object) -> Any:
        """The meaning of a value that code has under this name."""
        return self._value(value)

    def _imports(self, code: CodeType, package: str) -> list[Any]:
        """Meanings of what some code imports when it runs."""
        found: list[Any] = []
        if not (imports := imports_of(code, package)):
            return found
        attributes = names_in(code).attributes
        unknown = set() if is_installed(code) else self.not_followed  # of installed packages it is their own matter
        for each in imports:
            if not each.module:
                unknown.add(str(each))
            elif not is_library(root := each.module.partition(".")[0]) or root == self._opened:
                found.append((str(each), self._imported(each, attributes, unknown)))
        return found

    def _imported(self, wanted: Import, attributes: Set[str], unknown: set[str]) -> list[Any]:
        """Modules by their files, so that it does not matter whether they are loaded; where that cannot be, by the names in memory."""
        meanings = [self._file(wanted.module)]
        scopes: list[dict[str, Any]] = []
        if meanings[0] is None and (module := loaded(wanted.module)) is not None:
            scopes.append(vars_of_module(module))
        elif meanings[0] is None:
            unknown.add(str(wanted))
        for submodule in (f"{wanted.module}.{name}" for name in wanted.names if not scopes or name not in scopes[0]):
            meanings.append(self._file(submodule))
            if meanings[-1] is None and (module := loaded(submodule)) is not None:
                scopes.append(vars_of_module(module))
            elif meanings[-1] is None and scopes:
                unknown.add(submodule)
        return [*meanings, self._globals(set(wanted.names) or attributes, attributes, scopes) if scopes else []]

    def _file(self, module: str) -> Any:
        """A module by the whole of its file, and what that imports; None if that is not known to be the module's code, or is too much."""
        if module not in self._files:
            path = source_of(module)
            self._bytes_left -= 0 if path is None else path.stat().st_size
            code = None if path is None or self._bytes_left < 0 else code_in(path)
            is_package = path is not None and path.name == "__init__.py"
            self._files[module] = None if code is None else _File(code, module if is_package else module.rpartition(".")[0])
        file = self._files[module]
        return None if file is None else self._reference(file)

    def _foreign_function(self, function: FunctionType) -> tuple[Any, ...]:
        """A library's function by its name and what it wraps."""
        wrapped = function.__dict__.get("__wrapped__")
        held = [cell.cell_contents for cell in function.__closure__ or () if cell != EMPTY] if wrapped is None else [wrapped]
        return package_of(function), function.__code__.co_qualname, [self._reference(each) for each in held if is_code(each)]

    def _code(self, code: CodeType) -> tuple[Any, ...]:
        head, constants = head_and_constants(code)
        return head, [self._value(each) for each in constants]

    def _globals(self, names: Set[str], attributes: Set[str], scopes: list[dict[str, Any]]) -> list[Any]:
        """Meanings of ``names`` in the first scope and of ``attributes`` in the modules found there: more than is used, never less."""
        found = []
        for scope in scopes:  # grows
            for name in sorted(names if scope is scopes[0] else attributes):
                value = dict.get(scope, name)
                if not issubclass(type(value), ModuleType):
                    found.append((name, self._named(name, value)))
                elif not self._is_foreign(value) and all(vars_of_module(value) is not other for other in scopes):
                    scopes.append(vars_of_module(value))
        return [(name, meaning) for name, meaning in found if meaning is not None]

    def _named(self, name: str, value: object) -> Any:
        """The meaning of a global or an attribute of a class; None if it may change while the program runs."""
        kind = type(value)
        if is_code(value):
            return self._reference(value)
        if name_of(kind) == "constexpr" or (name.isupper() and (is_constant(value) or not issubclass(kind, CONTAINERS))):
            return self._held(name, value)
        return None if self._is_foreign(value) else ("object", self._reference(kind))

    def _class(self, cls: type) -> tuple[Any, ...]:
        if self._is_foreign(cls):
            return package_of(cls), name_of(cls)
        members = [(name, self._named(name, value)) for name, value in list(vars_of_class(cls).items())]
        return [self._reference(base) for base in mro_of(cls)[1:]], [(name, meaning) for name, meaning in members if meaning is not None]

    def _object(self, thing: object) -> tuple[Any, ...]:
        held = attributes_of(thing)
        wrapped = [(name, self._reference(held[name])) for name in WRAPPED if is_code(held.get(name))]
        if not wrapped or not self._is_foreign(thing):
            own = [name for name in sorted(held) if is_code(held[name]) and not self._is_foreign(held[name])]
            return self._reference(type(thing)), wrapped, [(name, self._reference(held[name])) for name in own]
        # A layer of a kernel. Its class does not count: the interpreter has another one, with the options in ``kwargs``.
        given = held | held.get("kwargs", {})
        options = [(name, self._value(given[name])) for name in _KERNEL_OPTIONS if given.get(name)]
        hooks = [self._value(held[name]) for name in ("pre_hook", "post_hook") if held.get(f"user_defined_{name}")]
        configs = held.get("configs", [])
        if any(thing is each for each in self._layers):  # its configs are the candidates, which the key counts; only their hooks are code
            found = [attributes_of(config).get("pre_hook") for config in configs]
            configs = list({id(hook): hook for hook in found if hook is not None}.values())  # however many configs there are
        return wrapped, options, hooks, self._value(held.get("values")), self._value(configs)

    def _value(self, value: Any, depth: int = 0) -> Any:
        """A constant, default or captured value in plain terms; an object by its class."""
        kind = type(value)
        try:
            if kind in SCALARS or is_word(value) or (kind is int and -(1 << 64) < value < 1 << 64):
                return value
            return self._composed(value, kind, depth + 1) if self._values_left >= 0 and depth < _MAX_DEPTH else ("beyond", name_of(kind))
        except Exception:  # noqa: BLE001  # as in ``digest``: the value counts as unreadable
            return "unreadable", name_of(kind)

    def _composed(self, value: Any, kind: Any, depth: int) -> Any:
        if kind is CodeType:
            return self._code(value)
        if kind in CONTAINERS:  # most values, and none of what follows
            return name_of(kind), len(value), self._elements(kind, value, depth)
        if issubclass(kind, enum.Enum):
            return "enum", name_of(kind), attributes_of(value).get("_name_"), self._value(attributes_of(value).get("_value_"), depth)
        base = base_of(kind, (int, float, str, bytes, *CONTAINERS))
        if base in (int, float):
            return name_of(base), base.__format__(value, "x" if base is int else "")
        if base in (str, bytes):
            start = ascii(base.__getitem__(value, slice(_MAX_CHARACTERS))).encode()
            self._values_left -= len(start) >> 8
            return name_of(base), base.__len__(value), hashlib.sha256(start).hexdigest()
        if base is not None:
            return name_of(base), base.__len__(value), self._elements(base, value, depth)
        if is_value(kind):
            return name_of(kind), self._value(attributes_of(value) or str(value), depth)
        is_of_numpy = package_of(kind) == "numpy" and hasattr(kind, "dtype")
        if is_of_numpy or issubclass(kind, torch.Tensor):  # a scalar of numpy's is read, a tensor is not: it may be on a device
            return "tensor", tuple(map(int, value.shape)), str(value.dtype), ascii(value) if is_of_numpy and not value.shape else ""
        if is_code(value):
            return self._reference(value)
        return "object", self._reference(kind), value.type if kind is torch.device else ""  # without its index, which differs between ranks

    def _elements(self, base: Any, value: Any, depth: int) -> list[Any]:
        some = first_elements(base, value)
        self._values_left -= len(some)
        if base in (tuple, list):
            return [self._value(each, depth) for each in some]
        # One order for all processes, before functions get their places.
        names = [name for name, _ in some] if base is dict else some
        texts = [ascii(name) if is_word(name) else label_of(name) if is_code(name) else ascii(self._value(name, depth)) for name in names]
        return [self._value(some[at], depth) for at in sorted(range(len(some)), key=texts.__getitem__)]
