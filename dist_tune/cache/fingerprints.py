"""Fingerprints of code: a function or Triton kernel with all that it calls, as a few hex digits, and the values that it sees, by name.

By the syntax tree, so that comments, formatting, places and the version of Python do not count, and without running code of the user's:
no ``repr``, property, module ``__getattr__`` or metaclass. Knows Triton's kernels by their attributes only, and nothing of configs,
keys or records. A change of any digest makes all records on disk useless.
"""

from __future__ import annotations

import ast
import dis
import enum
import functools
import hashlib
import inspect
import linecache
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import resolve_name
from itertools import islice
from pathlib import Path
from tokenize import TokenError
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

_MAX_STEPS, _STEPS_OF_CODE = 20_000, 10  # values read in one fingerprint; a function or class counts as ten
_MAX_ELEMENTS, _MAX_DEPTH = 4_096, 32  # of one container; of containers in containers
_SURELY_LOADED_S = 600.0  # age of a file at the start of the process from which on it was not changed since: clocks differ by less
_STARTED = time.time()
_EMPTY = CellType()  # equal to the cell of a variable without a value
_SCALARS = (bool, int, float, complex, str, bytes, range, type(None), type(Ellipsis))
_CONTAINERS = (tuple, list, dict, set, frozenset)
_NO_CODE = (*_SCALARS, *_CONTAINERS, enum.Enum, torch.dtype, torch.device)
# Where functools, Triton, numba and torch.library keep what they wrap.
_WRAPPED = ("__wrapped__", "fn", "func", "py_func", "_init_fn")
_PARTS = {MethodType: "__func__ __self__", BuiltinFunctionType: "__module__ __qualname__", functools.partial: "func args keywords"}
_PARTS |= {property: "fget fset fdel", staticmethod: "__func__", classmethod: "__func__"}
_KERNEL_OPTIONS = ("do_not_specialize", "do_not_specialize_on_alignment", "noinline", "debug", "reset_to_zero", "restore_value")
# A record has the versions of the first four; the others check values or show progress.
_LIBRARIES = frozenset({"torch", "triton", "numpy", "dist_tune", "loguru", "rich", "tqdm", "pydantic"})
_STDLIB = dis.__file__.removesuffix("dis.py")


class Code(NamedTuple):
    """The code of a function as far as it was read."""

    digest: str
    """16 hex digits."""
    not_followed: list[str]
    """Imports whose code is not in the digest, as "module.name", sorted."""


def read_code(function: object) -> Code:
    """The code of a function, method, class, callable object or Triton kernel, and of all that it calls.

    The same in all processes, wherever the files are, and for a kernel under Triton's interpreter. Counted are statements, arguments and
    defaults; captured values, tensors by shape and dtype; of globals, constants in UPPER_CASE and Triton's ``constexpr``. Followed are
    globals, captured functions, attributes of modules and imports within a function, into all packages but the standard library, torch,
    triton, numpy and dist_tune. Not counted are what an object holds, and variables that the code itself assigns to. Code without a
    source (a lambda, what ``exec`` made, a file that has changed since it was loaded) counts as its bytecode, which differs between
    versions of Python. Never raises. The work is bounded: code near the function counts first.
    """
    walker = _Walker(function)
    texts = walker.digest(), *(f"{name}={meaning}" for name, _, meaning in walker.values)
    return Code(hashlib.sha256("\n".join(map(ascii, texts)).encode()).hexdigest()[:16], sorted(walker.not_followed))


def anatomy(parts: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text, of each part and of each value that its code has; digests are 12 hex digits.

    ``Code.digest`` is one digest of that. Here two kernels of one factory can be told apart by the value in which they differ, and plain
    attributes of objects and lower-case globals of a part's own module count as well. Equal in all processes where code and values are.
    A part is code, a tuple of code, or text.
    """
    found: dict[str, str] = {}
    for part, thing in parts.items():
        values = [(part, _short(thing, thing))]
        if _is_code(thing) or isinstance(thing, tuple):
            walker = _Walker(thing, is_deep=True)
            values = [(part, walker.digest()[:12]), *((name, _short(value, meaning)) for name, value, meaning in walker.values)]
        for name, text in values:
            free = name if name not in found else next(f"{name}@{k}" for k in range(2, len(found) + 2) if f"{name}@{k}" not in found)
            found[free] = text
    return found


def _short(value: object, meaning: object) -> str:
    """A short plain value itself; of others a digest of the meaning."""
    text = ascii(value) if type(value) in (bool, int, float, str, type(None)) else ""
    return text if 0 < len(text) <= 24 else hashlib.sha256(ascii(meaning).encode()).hexdigest()[:12]


class _Walker:
    """Reads functions, classes and objects (nodes) in the order in which they are referenced, the nearest first. Used once.

    ``values`` are kept apart from the code that has them. ``is_deep``: as ``anatomy`` needs it.
    """

    def __init__(self, root: object, *, is_deep: bool = False) -> None:
        self._is_deep = is_deep
        self.values: list[tuple[str, Any, Any]] = []
        """Name, value and meaning, in the order in which they are found, which follows from the code; names repeat."""
        self.not_followed: set[str] = set()
        self._nodes: list[Any] = []  # to be read; kept, so that no id is used twice
        self._places: dict[int, int] = {}
        self._sources: dict[int, str] = {}  # of functions that Triton has read, by id
        self._left = _MAX_STEPS
        self._layers = [root]  # the function or kernel, and what it wraps
        while (wrapped := _wrapped_by(self._layers[-1])) is not None and len(self._layers) < _MAX_DEPTH:
            self._layers.append(wrapped)
        self._opened = _package_of(self._layers[-1])  # read even if it is a library
        self._home = self._layers[-1].__globals__ if type(self._layers[-1]) is FunctionType else None

    def digest(self) -> str:
        """Hex digits of all code that is read; ``values`` has the rest."""
        hasher = hashlib.sha256(ascii(self._held("root", self._layers[0])).encode())
        for node in self._nodes:  # grows
            try:
                hasher.update(ascii(self._read(node)).encode())
            except Exception:  # noqa: BLE001  # descriptors of the user's raise anything: this node is unreadable, others still count
                hasher.update(b"unreadable")
        return hasher.hexdigest()

    def _reference(self, node: object) -> tuple[str, int]:
        if id(node) not in self._places and self._left > 0:
            self._left -= _STEPS_OF_CODE
            self._places[id(node)] = len(self._nodes)
            self._nodes.append(node)
        return "node", self._places.get(id(node), -1)

    def _is_foreign(self, value: object) -> bool:
        package = _package_of(value)
        return package == "builtins" or (package != self._opened and _is_library(package))

    def _held(self, name: str, value: object) -> Any:
        """The meaning of code that is held under this name; that of another value goes into ``values``."""
        if _is_code(value):
            return self._reference(value)
        if _name_of(type(value)) == "constexpr":
            value = _attributes_of(value).get("value")
        self.values.append((name, value, self._value(value)))
        return "value"

    def _read(self, node: Any) -> tuple[Any, ...]:
        kind = type(node)
        if kind is FunctionType:
            return self._function(node)
        if parts := _parts_of(node):
            return _name_of(kind), [self._held(_name_of(kind), part) for part in parts]
        return self._class(node) if issubclass(kind, type) else self._object(node)

    def _function(self, function: FunctionType) -> tuple[Any, ...]:
        code, wrapped = function.__code__, function.__dict__.get("__wrapped__")
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        captured = {name: cell.cell_contents for name, cell in cells if cell != _EMPTY}
        inner = [self._reference(wrapped)] if wrapped is not None else []
        if self._is_foreign(function):  # by its name, and what it wraps
            return _package_of(function), code.co_qualname, inner or [self._reference(each) for each in captured.values() if _is_code(each)]
        body = _body_of(code, code.co_filename, self._sources.get(id(function)))
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        modules = [_attributes_of(each) for each in captured.values() if issubclass(type(each), ModuleType)]
        return (
            body.text,
            [self._held("default", each) for each in defaults],
            inner,
            [(name, self._held(name, each)) for name, each in captured.items() if name not in body.written or _is_code(each)],
            self._globals(body, [function.__globals__, *modules, *self._imported(function, body)]),
        )

    def _imported(self, function: FunctionType, body: _Body) -> list[dict[str, Any]]:
        """What modules hold that a function imports when it runs, as far as they are loaded."""
        found = []
        for module, names in body.imports:
            with suppress(ImportError, ValueError):  # beyond the package
                module = resolve_name(module, dict.get(function.__globals__, "__package__") or "")
            loaded = [sys.modules[each] for each in (module, *(f"{module}.{name}" for name in names)) if each in sys.modules]
            found += [_attributes_of(each) for each in loaded if not self._is_foreign(each)]
            is_installed = "site-packages" in function.__code__.co_filename  # what a library imports is its own matter
            if not loaded and not is_installed and not _is_library(module.partition(".")[0]):
                self.not_followed |= {f"{module}.{name}" for name in names} or {module}
        return found

    def _globals(self, body: _Body, scopes: list[dict[str, Any]]) -> list[Any]:
        """Meanings of names in the first scope, and of attributes in the modules found there: more than is used, never less."""
        found = []
        for scope in scopes:  # grows
            annotations = dict.get(scope, "__annotations__", {})
            for name in sorted(body.names - body.written if scope is scopes[0] else body.attributes):
                value = dict.get(scope, name, scope)
                if issubclass(type(value), ModuleType):
                    if not self._is_foreign(value) and all(_attributes_of(value) is not other for other in scopes):
                        scopes.append(_attributes_of(value))
                elif value is not scope:
                    meaning = self._named(name, value, is_constant="constexpr" in str(annotations.get(name)))
                    if meaning is not None:
                        found.append((name, meaning))
                    elif self._is_deep and scope is self._home and issubclass(type(value), _SCALARS):
                        self.values.append((name, value, self._value(value)))
        return found

    def _named(self, name: str, value: object, *, is_constant: bool = False) -> Any:
        """The meaning of a global or an attribute of a class; None if it may change while the program runs."""
        kind = type(value)
        if _is_code(value):
            return self._reference(value)
        if is_constant or _name_of(kind) == "constexpr" or (name.isupper() and (_is_constant(value) or not issubclass(kind, _CONTAINERS))):
            return self._held(name, value)
        return None if self._is_foreign(value) else ("object", self._reference(kind))

    def _class(self, cls: type) -> tuple[Any, ...]:
        if self._is_foreign(cls):
            return _package_of(cls), _name_of(cls)
        own = [pair for pair in dict(_class_dict(cls)).items() if pair[0] != "_generate_next_value_"]  # of enums, and of Python's version
        members = [(name, self._named(name, value)) for name, value in own]
        return [self._reference(base) for base in _mro_of(cls)[1:]], [(name, meaning) for name, meaning in members if meaning is not None]

    def _object(self, thing: object) -> tuple[Any, ...]:
        held = _attributes_of(thing)
        wrapped = [(name, self._reference(held[name])) for name in _WRAPPED if _is_code(held.get(name))]
        if not wrapped or not self._is_foreign(thing):
            self.values += self._parts(held)
            own = [name for name in sorted(held) if _is_code(held[name]) and not self._is_foreign(held[name])]
            return self._reference(type(thing)), wrapped, [(name, self._reference(held[name])) for name in own]
        if type(source := held.get("_src", held.get("src"))) is str:
            self._sources |= {id(held[name]): source for name in _WRAPPED if type(held.get(name)) is FunctionType}
        # A layer of a kernel. Its class does not count: the interpreter has another one, with the options in ``kwargs``.
        given = held | held.get("kwargs", {})
        options = [(name, self._value(given[name])) for name in _KERNEL_OPTIONS if given.get(name)]
        hooks = [self._value(held[name]) for name in ("pre_hook", "post_hook") if held.get(f"user_defined_{name}")]
        configs = held.get("configs", [])
        if any(thing is each for each in self._layers):  # its configs are the candidates, which the key counts; only their hooks are code
            found = [_attributes_of(config).get("pre_hook") for config in configs]
            configs = list({id(hook): hook for hook in found if hook is not None}.values())  # however many configs there are
        return wrapped, options, hooks, self._value(held.get("values")), self._value(configs)

    def _value(self, value: Any, depth: int = 0) -> Any:
        """A constant, default or captured value in plain terms; an object by its class."""
        kind = type(value)
        self._left -= 1
        if self._left <= 0 or depth >= _MAX_DEPTH:
            return "beyond", _name_of(kind)
        try:
            return self._plain_value(value, kind, depth + 1)
        except Exception:  # noqa: BLE001  # as in ``digest``: the value counts as unreadable
            return "unreadable", _name_of(kind)

    def _plain_value(self, value: Any, kind: Any, depth: int) -> Any:
        if issubclass(kind, enum.Enum):
            held = _attributes_of(value)
            return "enum", _name_of(kind), held.get("_name_"), self._value(held.get("_value_"), depth)
        base: Any = next((each for each in (*_SCALARS, *_CONTAINERS) if issubclass(kind, each)), None)
        if base in _CONTAINERS:
            elements = _first_elements(base, value)
            if base not in (tuple, list):  # one order for all processes, before functions get their places
                names = [each[0] if base is dict else each for each in elements]
                texts = [_qualname_of(name) if _is_code(name) else ascii(self._value(name, depth)) for name in names]
                elements = [elements[at] for at in sorted(range(len(elements)), key=texts.__getitem__)]
            return base.__name__, base.__len__(value), [self._value(each, depth) for each in elements]
        if base is not None:
            return base.__name__, int.__format__(value, "x") if base is int else base.__repr__(value)
        if _is_value(kind):
            return _name_of(kind), self._value(_attributes_of(value) or str(value), depth)
        is_of_numpy = _package_of(kind) == "numpy" and hasattr(kind, "dtype")
        if is_of_numpy or issubclass(kind, torch.Tensor):  # a scalar of numpy's is read, a tensor is not: it may be on a device
            return "tensor", tuple(map(int, value.shape)), str(value.dtype), ascii(value) if is_of_numpy and not value.shape else ""
        if _is_code(value):
            return self._reference(value)
        if kind is torch.device:
            return "device", value.type  # without its index, which differs between ranks
        return "object", self._reference(kind), *([self._parts(_attributes_of(value), depth)] if depth < 4 else [])

    def _parts(self, held: dict[str, Any], depth: int = 0) -> list[tuple[str, Any, Any]]:
        """Plain attributes of an object, and of objects in it, if they count; lists and dicts of objects are state."""
        plain = {name: each for name, each in islice(held.items(), 64) if not _is_code(each) and type(each) not in (list, dict, set)}
        shown = plain.items() if self._is_deep else ()
        return [(str(name), each if type(each) in _SCALARS else None, self._value(each, depth)) for name, each in shown]


class _Body(NamedTuple):
    """A function's own code, and the names in it and in functions within it."""

    text: str
    names: frozenset[str]
    """Variables that are read, less the function's own."""
    attributes: frozenset[str]
    """Names after a dot, and of imports from modules."""
    written: frozenset[str] = frozenset()
    """Variables that are assigned to though they are global or captured."""
    imports: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Module, maybe with dots before it, and names of each import."""


@functools.lru_cache(maxsize=8_192)  # code cannot change, and the kernels of a library share most of what they call
def _body_of(code: CodeType, path: str, source: str | None) -> _Body:
    """The code of a function, from ``source`` or the file that it was loaded from, or from its bytecode."""
    with suppress(OSError, ValueError, SyntaxError, RecursionError, IndexError, TokenError):
        if source is None and code.co_name[0] != "<" and _is_as_loaded(code, path):
            # Not inspect.getsource, which asks all modules for their files, lazy ones too.
            linecache.checkcache(path)
            source = "".join(inspect.getblock(linecache.getlines(path)[code.co_firstlineno - 1 :]))
        source = source or ""
        (tree,) = ast.parse(f"if 1:\n{source}" if source[:1].isspace() else source).body
        if isinstance(tree, ast.If):
            (tree,) = tree.body
        if isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef) and tree.name == code.co_name:
            tree.decorator_list = []  # what they have made of the function is read instead
            return _body_of_tree(tree, {*code.co_varnames, *code.co_cellvars})
    nested = [*_nested(code)]
    names = {step.argval for each in nested for step in dis.get_instructions(each) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return _Body(ascii(_spelled(code)), frozenset(names), frozenset(name for each in nested for name in each.co_names))


def _is_as_loaded(code: CodeType, path: str) -> bool:
    """True if the file of this code still holds it, or there is no file."""
    try:
        status = os.stat(path)
    except OSError:  # as in a notebook
        return True
    # By the time of its last change of any kind: a copy may keep the date of the original.
    return max(status.st_mtime, status.st_ctime) < _STARTED - _SURELY_LOADED_S or code in _codes_in(path, status.st_ctime_ns)


@functools.lru_cache(maxsize=64)
def _codes_in(path: str, changed_ns: int) -> frozenset[CodeType]:
    return frozenset(_nested(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)))


def _body_of_tree(tree: ast.AST, own: set[str]) -> _Body:
    texts: list[str] = []
    names, written, attributes = set[str](), set[str](), set[str]()
    imports: dict[tuple[str, tuple[str, ...]], None] = {}

    def spell(node: Any) -> None:
        kind = type(node)
        if kind is ast.Name:  # half of all nodes: without its context, and at once
            names.add(node.id)
            texts.append(node.id)
            return
        if kind is ast.Expr and type(node.value) is ast.Constant:  # a docstring, or "..."
            return
        if kind is ast.Attribute:
            attributes.add(node.attr)
            imports.update({("import_module(...)", ()): None} if node.attr == "import_module" else {})
        elif kind in (ast.Global, ast.Nonlocal):
            written.update(node.names)
        elif kind is ast.Import:
            imports.update({(each.name, ()): None for each in node.names})
        elif kind is ast.ImportFrom:
            members = tuple(each.name for each in node.names)
            imports["." * node.level + (node.module or ""), members] = None
            attributes.update(members)
        texts.append(f"({kind.__name__}")
        for field in kind._fields:  # without those that are empty: a later Python has more of them
            value = getattr(node, field, None)
            if value is None or value == [] or field in ("ctx", "kind", "type_comment"):
                continue
            if kind is ast.JoinedStr:  # Python 3.12 has empty texts there
                value = [each for each in value if type(each) is not ast.Constant or each.value]
            texts.append(f"{field}:")
            for each in value if type(value) is list else [value]:
                if isinstance(each, ast.AST):
                    spell(each)
                else:
                    texts.append(ascii(each))
        texts.append(")")

    spell(tree)
    return _Body(" ".join(texts), frozenset(names - own), frozenset(attributes), frozenset(written), tuple(imports))


def _spelled(constant: Any) -> Any:
    if type(constant) is CodeType:
        arguments = constant.co_argcount, constant.co_posonlyargcount, constant.co_kwonlyargcount, constant.co_flags & 0xFF
        names = constant.co_varnames, constant.co_names, constant.co_freevars
        return constant.co_code, constant.co_exceptiontable, arguments, names, list(map(_spelled, constant.co_consts))
    return sorted(map(ascii, constant)) if type(constant) is frozenset else constant


def _nested(code: CodeType) -> Iterator[CodeType]:
    """This code and all code within it."""
    yield code
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from _nested(constant)


# -- objects, read without asking them ---------------------------------------------------------------------------------

# __mro__ and the like.
_class_dict, _mro_of, _name_of, _module_of = (vars(type)[name].__get__ for name in ("__dict__", "__mro__", "__qualname__", "__module__"))


def _attributes_of(thing: object) -> dict[str, Any]:
    """The ``__dict__`` of an object or module; empty for a class."""
    with suppress(Exception):  # no __dict__, or a property of the user's
        held = object.__getattribute__(thing, "__dict__") if not issubclass(type(thing), type) else None
        return held if type(held) is dict else {}
    return {}


def _package_of(value: Any) -> str:
    """The package of a function, class or module; of an object, that of its class."""
    kind = type(value)
    names = value.__globals__ if kind is FunctionType else _attributes_of(value) if issubclass(kind, ModuleType) else None
    module = dict.get(names, "__name__") if names is not None else _module_of(value if issubclass(kind, type) else kind)
    return module.partition(".")[0] if type(module) is str else ""


@functools.cache
def _is_library(package: str) -> bool:
    """A package that a fingerprint leaves out: its version or Python's is in the record, or it computes nothing."""
    file = _attributes_of(sys.modules.get(package, sys)).get("__file__") or _STDLIB  # a file of the user's may have such a name
    return package in _LIBRARIES or (package in sys.stdlib_module_names and str(file).startswith(_STDLIB))


def _qualname_of(code: Any) -> str:
    return str(code.__qualname__) if type(code) is FunctionType else _name_of(code if issubclass(type(code), type) else type(code))


def _parts_of(value: object) -> list[Any]:
    """Parts of a method, builtin, partial, property, staticmethod or classmethod; empty for other objects."""
    kinds = [each for each in _PARTS if issubclass(type(value), each)]
    return [vars(each)[part].__get__(value) for each in kinds for part in _PARTS[each].split()]


def _wrapped_by(value: object) -> Any:
    """The function or object that this one wraps, None if it wraps none."""
    held = _attributes_of(value)
    inner = [held[name] for name in _WRAPPED if name in held and (callable(held[name]) or "fn" in _attributes_of(held[name]))]
    return [*_parts_of(value), *inner, None][0]


def _is_value(kind: type) -> bool:
    """A dtype of a library, or Triton's ``constexpr`` or ``Config``."""
    is_named = any(_name_of(each) in ("dtype", "constexpr", "Config") for each in _mro_of(kind))
    return is_named and _package_of(kind) in ("torch", "triton", "numpy")


def _is_code(value: object) -> bool:
    """Code, or an object that wraps some."""
    kind = type(value)
    if kind is FunctionType:
        return True
    return not issubclass(kind, _NO_CODE) and not _is_value(kind) and (callable(value) or _wrapped_by(value) is not None)


def _is_constant(value: object, depth: int = 0) -> bool:
    """Numbers, strings, dtypes, code and containers of these; not an empty container, because it may be filled later."""
    kind = type(value)
    base: Any = next((each for each in _CONTAINERS if issubclass(kind, each)), None)
    if base is None:
        return issubclass(kind, _NO_CODE) or _is_code(value) or _is_value(kind)
    return depth < 4 and base.__len__(value) > 0 and all(_is_constant(each, depth + 1) for each in _first_elements(base, value))


def _first_elements(base: Any, value: Any) -> list[Any]:
    """The first elements of a container; none of a large set, because its order differs between processes."""
    is_vast = base in (set, frozenset) and base.__len__(value) > _MAX_ELEMENTS
    return [] if is_vast else list(islice((dict.items if base is dict else base.__iter__)(value), _MAX_ELEMENTS))
