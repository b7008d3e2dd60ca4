"""Fingerprints of code: a function or Triton kernel with all that it calls, as a few hex digits,
and the values that it sees, by name.

By the syntax tree, so that comments, formatting, places and the version of Python do not count, and
without running code of the user's: no ``repr``, property, module ``__getattr__`` or metaclass.
Knows Triton's kernels by their attributes only, and nothing of configs, keys or records. A change
of any digest makes all records on disk useless.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import linecache
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import resolve_name
from itertools import islice
from pathlib import Path
from tokenize import TokenError
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from dist_tune.errors import parsed

# Values read in one fingerprint; a function or class counts as ten.
_MAX_STEPS, _STEPS_OF_CODE = (20_000, 10)
_MAX_ELEMENTS, _MAX_DEPTH = 4_096, 32  # of one container; of containers in containers
# Age of a file at the start of the process from which on it was not changed since: clocks differ by
# less
_SURELY_LOADED_S = 600.0
_STARTED = time.time()
_EMPTY = CellType()  # equal to the cell of a variable without a value
_SCALARS = (bool, int, float, complex, str, bytes, range, type(None), type(Ellipsis))
_SETS = (set, frozenset)
_CONTAINERS = (tuple, list, dict, *_SETS)
_NO_CODE = (*_SCALARS, *_CONTAINERS, torch.dtype, torch.device)
# What these hold, of which their ``__dict__`` has nothing.
_PARTS = {
    MethodType: "__func__ __self__",
    BuiltinFunctionType: "__module__ __qualname__",
    functools.partial: "func args keywords",
}
_PARTS |= {property: "fget fset fdel", staticmethod: "__func__", classmethod: "__func__"}
# Where functools, Triton, numba and torch.library keep what they wrap; and the options of Triton's
# kernels.
_WRAPPED = ("__wrapped__", "fn", "func", "py_func", "_init_fn")
_OPTIONS = (
    "do_not_specialize",
    "do_not_specialize_on_alignment",
    "noinline",
    "debug",
    "reset_to_zero",
    "restore_value",
    "pre_hook",
    "post_hook",
    "values",
    "configs",
)
# A record has the versions of the first four; the others check values or show progress.
_LIBRARIES = frozenset(
    {"builtins", "torch", "triton", "numpy", "dist_tune", "loguru", "rich", "tqdm", "pydantic"}
)
_STDLIB = os.__file__.removesuffix("os.py")


class Code(NamedTuple):
    """The code of a function as far as it was read."""

    digest: str
    """16 hex digits."""
    not_followed: list[str]
    """Imports whose code is not in the digest, as "module.name", sorted."""
    captured: dict[str, str]
    """Name -> text: first "code", a digest without any values; then each value, so that two kernels
    of one factory can be told apart by the one in which they differ. Also plain attributes of
    objects, and lower-case globals of the function's own module, which ``digest`` leaves
    out. Equal in all processes where code and values are.
    """


def read_code(function: object) -> Code:
    """The code of a function, method, class, callable object or Triton kernel, and of all that it
    calls.

    The same in all processes, wherever the files are; a kernel under Triton's interpreter is
    another one, whose times mean nothing. Counted are statements, arguments and defaults; captured
    values, tensors by shape and dtype; of globals, constants in UPPER_CASE and Triton's
    ``constexpr``. Followed are globals, captured functions, attributes of modules and imports
    within a function, into all packages but the standard library, torch, triton, numpy and
    dist_tune. Not counted are what an object holds, and variables that the code itself assigns to.
    Code without a source (a lambda, what ``exec`` made, a file that has changed since it was
    loaded) counts as its bytecode, which differs between versions of Python. Never raises. The work
    is bounded: code near the function counts first.
    """
    walker = _Walker(function)
    code = walker.digest()
    texts = code, *(f"{name}={meaning}" for name, meaning in walker.values)
    captured = {"code": code[:12]}
    for name, meaning in [*walker.values, *walker.state()]:
        captured[name if name not in captured else f"{name}@{len(captured)}"] = _short(meaning)
    return Code(
        hashlib.sha256("\n".join(map(ascii, texts)).encode()).hexdigest()[:16],
        sorted(walker.not_followed),
        captured,
    )


def _short(meaning: Any) -> str:
    """A short plain value itself; of others a digest of the meaning."""
    text = meaning[1] if len(meaning) == 2 and type(meaning[1]) is str else ""
    return text if 0 < len(text) <= 24 else hashlib.sha256(ascii(meaning).encode()).hexdigest()[:12]


class _Walker:
    """Reads functions, classes and objects (nodes) in the order in which they are referenced, the
    nearest first. Used once.
    """

    def __init__(self, root: object) -> None:
        self.values: list[tuple[str, Any]] = []
        """Name and meaning of each value, apart from the code that has them, in the order in which
        they are found; names repeat.
        """
        self._state: list[tuple[str, Any]] = []  # what may change while the program runs
        self.not_followed: set[str] = set()
        self._nodes: list[Any] = []  # to be read; kept, so that no id is used twice
        self._places: dict[int, int] = {}
        self._sources: dict[int, str] = {}  # of functions that Triton has read, by id
        self._left = _MAX_STEPS
        self._own = [root]  # and what it wraps

    def digest(self) -> str:
        """Hex digits of all code that is read; ``values`` has the rest."""
        hasher = hashlib.sha256(ascii(self._held("root", self._own[0])).encode())
        for node in self._nodes:  # grows
            try:
                hasher.update(ascii(self._read(node)).encode())
            except Exception:  # noqa: BLE001  # descriptors of the user's raise anything: this node is unreadable, others still count
                hasher.update(b"unreadable")
        return hasher.hexdigest()

    def state(self) -> Iterator[tuple[str, Any]]:
        """Name and meaning of what may change while the program runs; after ``digest``, because
        reading it may add code.
        """
        for name, value in self._state:  # grows
            if self._left > 0:
                yield name, self._value(value)

    def _read(self, node: Any) -> Any:
        if type(node) is FunctionType:
            return self._function(node)
        return self._class(node) if issubclass(type(node), type) else self._object(node)

    def _reference(self, node: object) -> tuple[str, int]:
        if id(node) not in self._places and self._left > 0:
            self._left -= _STEPS_OF_CODE
            self._places[id(node)] = len(self._nodes)
            self._nodes.append(node)
        return "node", self._places.get(id(node), -1)

    def _held(self, name: str, value: object) -> Any:
        """The meaning of code that is held under this name; that of another value goes into
        ``values``.
        """
        if _is_code(value):
            return self._reference(value)
        if _name_of(type(value)) == "constexpr":
            value = _attributes_of(value).get("value")
        self.values.append((name, self._value(value)))
        return "value"

    def _named(self, name: str, value: object) -> Any:
        """The meaning of a global or an attribute of a class; None if it may change while the
        program runs.
        """
        kind = type(value)
        is_constant = name.isupper() and (_is_constant(value) or not issubclass(kind, _CONTAINERS))
        if _is_code(value) or is_constant or _name_of(kind) == "constexpr":
            return self._held(name, value)
        return None if _is_foreign(value) else ("object", self._reference(kind))

    # -- code --------------------------------------------------------------------------------------

    def _function(self, function: FunctionType) -> Any:
        code = function.__code__
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        captured = {name: cell.cell_contents for name, cell in cells if cell != _EMPTY}
        if _is_foreign(function):  # by its name, and what it wraps
            return (
                _package_of(function),
                code.co_qualname,
                [self._reference(each) for each in captured.values() if _is_code(each)],
            )
        body = _body_of(code, code.co_filename, self._sources.get(id(function)))
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        modules = [each for each in captured.values() if issubclass(type(each), ModuleType)]
        scopes = [
            function.__globals__,
            *map(_attributes_of, [*modules, *self._imported(function, body)]),
        ]
        return (
            body.text,
            [self._held("default", each) for each in defaults],
            [
                (name, self._held(name, each))
                for name, each in captured.items()
                if name not in body.written or _is_code(each)
            ],
            self._globals(body, scopes, is_own=any(function is each for each in self._own)),
        )

    def _imported(self, function: FunctionType, body: _Body) -> list[ModuleType]:
        """Modules that a function imports when it runs, as far as they are loaded."""
        found = []
        for module, names in body.imports:
            with suppress(ImportError, ValueError):  # beyond the package
                module = resolve_name(module, dict.get(function.__globals__, "__package__") or "")
            loaded = [
                sys.modules[each]
                for each in (module, *(f"{module}.{name}" for name in names))
                if each in sys.modules
            ]
            found += [each for each in loaded if not _is_foreign(each)]
            # What a library imports is its own matter.
            is_installed = "site-packages" in function.__code__.co_filename
            if not loaded and not is_installed and not _is_library(module.partition(".")[0]):
                self.not_followed |= {f"{module}.{name}" for name in names} or {module}
        return found

    def _globals(self, body: _Body, scopes: list[dict[str, Any]], *, is_own: bool) -> list[Any]:
        """Meanings of names in the first scope, and of attributes in the modules found there: more
        than is used, never less.
        """
        found = []
        for scope in scopes:  # grows
            for name in sorted(body.names if scope is scopes[0] else body.attributes):
                value = dict.get(scope, name, _EMPTY)
                if issubclass(type(value), ModuleType):
                    if not _is_foreign(value) and all(
                        _attributes_of(value) is not other for other in scopes
                    ):
                        scopes.append(_attributes_of(value))
                elif value is not _EMPTY:
                    if (meaning := self._named(name, value)) is not None:
                        found.append((name, meaning))
                    elif is_own and scope is scopes[0] and issubclass(type(value), _SCALARS):
                        self._state.append((name, value))
        return found

    def _class(self, cls: type) -> Any:
        if _is_foreign(cls):
            return _package_of(cls), _name_of(cls)
        members = [
            (name, self._named(name, value)) for name, value in dict(_class_dict(cls)).items()
        ]
        return [self._reference(base) for base in _mro_of(cls)[1:]], [
            (name, meaning) for name, meaning in members if meaning is not None
        ]

    def _object(self, thing: object) -> Any:
        """An object by its class and the code that it holds; a library's wrapper by what it wraps,
        and a kernel with its options.
        """
        parts, is_own = _parts_of(thing), any(thing is each for each in self._own)
        held = _attributes_of(thing) | parts
        names = [name for name in dict.fromkeys((*parts, *_WRAPPED, *_OPTIONS)) if name in held]
        if not _is_foreign(thing) or not names:
            names = sorted(name for name, each in held.items() if _is_code(each))
            self._note_state(held)
        elif is_own:
            # Configs of the kernel itself are the candidates, which the key counts; only their
            # hooks are code, however many configs.
            hooks = [_attributes_of(config).get("pre_hook") for config in held.get("configs", ())]
            held["configs"] = list({id(hook): hook for hook in hooks if hook is not None}.values())
        if is_own:
            self._own += [held[name] for name in _WRAPPED if name in held]
        if type(source := held.get("_src", held.get("src"))) is str:
            self._sources |= {id(held[name]): source for name in names}
        return self._reference(type(thing)), [
            (name, self._held(name, held[name])) for name in names
        ]

    # -- values ------------------------------------------------------------------------------------

    def _value(self, value: Any, depth: int = 0) -> Any:
        """A constant, default or captured value in plain terms; an object by its class."""
        kind, depth = type(value), depth + 1
        base = _base_of(kind)
        self._left -= 1
        if self._left <= 0 or depth > _MAX_DEPTH:
            return "beyond", _name_of(kind)
        try:
            if base in _CONTAINERS:
                elements = _first_elements(base, value)
                if base is dict:  # in one order in all processes, as a set
                    elements.sort(key=lambda pair: ascii(self._value(pair[0], depth)))
                texts = [
                    (
                        _qualname_of(each)
                        if base in _SETS and _is_code(each)
                        else self._value(each, depth)
                    )
                    for each in elements
                ]
                return (
                    base.__name__,
                    base.__len__(value),
                    sorted(texts, key=ascii) if base in _SETS else texts,
                )
            if base is not None:
                is_long = base is int and int.bit_length(value) > 99  # its decimal digits take long
                return base.__name__, (
                    int.__format__(value, "x") if is_long else base.__repr__(value)
                )
            if _is_value(kind):
                return _name_of(kind), self._value(_attributes_of(value) or str(value), depth)
            is_of_numpy = _package_of(kind) == "numpy" and hasattr(kind, "dtype")
            # A scalar of numpy's is read, a tensor is not: it may be on a device.
            if is_of_numpy or issubclass(kind, torch.Tensor):
                return (
                    "tensor",
                    tuple(map(int, value.shape)),
                    str(value.dtype),
                    ascii(value) if is_of_numpy and not value.shape else "",
                )
            if _is_code(value):
                return self._reference(value)
            self._note_state(_attributes_of(value))
            return "object", self._reference(kind)
        except Exception:  # noqa: BLE001  # as in ``digest``: the value counts as unreadable
            return "unreadable", _name_of(kind)

    def _note_state(self, held: dict[str, Any]) -> None:
        """Plain attributes of an object, and of objects in it; lists and dicts are no mark of
        it.
        """
        plain = [
            (str(name), each)
            for name, each in islice(held.items(), 64)
            if not issubclass(type(each), (list, dict, set))
        ]
        self._state += [(name, each) for name, each in plain if not _is_code(each)]


# -- a function's own code -------------------------------------------------------------------------


class _Body(NamedTuple):
    """A function's own code, and the names in it and in functions within it."""

    text: str
    names: frozenset[str]
    """Variables that are read, less those that the function itself assigns to."""
    attributes: frozenset[str]
    """Names after a dot, and of imports from modules."""
    written: frozenset[str] = frozenset()
    """Variables that are assigned to though they are global or captured."""
    imports: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Module, maybe with dots before it, and names of each import."""


# Code cannot change, and the kernels of a library share most of what they call.
@functools.lru_cache(maxsize=8_192)
def _body_of(code: CodeType, path: str, source: str | None) -> _Body:
    """The code of a function, from ``source`` or the file that it was loaded from, or from its
    bytecode.
    """
    with suppress(OSError, ValueError, SyntaxError, RecursionError, IndexError, TokenError):
        if source is None and code.co_name[0] != "<" and _is_as_loaded(code, path):
            # Not inspect.getsource, which asks all modules for their files, lazy ones too.
            linecache.checkcache(path)
            source = "".join(inspect.getblock(linecache.getlines(path)[code.co_firstlineno - 1 :]))
        source = source or ""
        text = f"if 1:\n{source}" if source[:1].isspace() else source
        (tree,) = parsed(lambda: ast.parse(text)).body
        if isinstance(tree, ast.If):
            (tree,) = tree.body
        if isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef) and tree.name == code.co_name:
            tree.decorator_list = []  # what they have made of the function is read instead
            return _body_of_tree(tree, {*code.co_varnames, *code.co_cellvars})
    names = frozenset(name for each in _nested(code) for name in each.co_names)
    return _Body(ascii(_spelled(code)), names, names)


def _is_as_loaded(code: CodeType, path: str) -> bool:
    """True if the file of this code still holds it, or there is no file."""
    try:
        status = os.stat(path)
    except OSError:  # as in a notebook
        return True
    # By the time of its last change of any kind: a copy may keep the date of the original.
    return max(status.st_mtime, status.st_ctime) < _STARTED - _SURELY_LOADED_S or code in _codes_in(
        path, status.st_ctime_ns
    )


@functools.lru_cache(maxsize=64)
def _codes_in(path: str, changed_ns: int) -> frozenset[CodeType]:
    return frozenset(_nested(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)))


def _body_of_tree(tree: ast.AST, own: set[str]) -> _Body:
    texts, names = list[str](), set[str]()
    nodes: dict[type, list[Any]] = defaultdict(list)

    def spell(node: Any) -> None:
        kind = type(node)
        if kind is ast.Name:  # half of all nodes: without its context, and at once
            names.add(node.id)
            texts.append(node.id)
            return
        if kind is ast.Expr and type(node.value) is ast.Constant:  # a docstring, or "..."
            return
        nodes[kind].append(node)
        texts.append(f"({kind.__name__}")
        for field in kind._fields:
            value = getattr(node, field, None)
            # A later Python has more fields that are empty.
            if value is None or value == [] or field == "ctx":
                continue
            texts.append(f"{field}:")
            for each in value if type(value) is list else [value]:
                if isinstance(each, ast.AST):
                    spell(each)
                else:
                    texts.append(ascii(each))
        texts.append(")")

    spell(tree)
    imports = [
        ("." * node.level + (node.module or ""), tuple(each.name for each in node.names))
        for node in nodes[ast.ImportFrom]
    ]
    attributes = {node.attr for node in nodes[ast.Attribute]}.union(
        *(members for _, members in imports)
    )
    imports += [(each.name, ()) for node in nodes[ast.Import] for each in node.names]
    if "import_module" in attributes:
        imports.append(("import_module(...)", ()))
    written = {name for node in nodes[ast.Global] + nodes[ast.Nonlocal] for name in node.names}
    return _Body(
        " ".join(texts),
        frozenset(names - own - written),
        frozenset(attributes),
        frozenset(written),
        tuple(imports),
    )


def _spelled(code: CodeType) -> Any:
    """Bytecode without places. The elements of a set have another order in each process."""
    constants = [_spelled(each) if type(each) is CodeType else each for each in code.co_consts]
    constants = [
        sorted(map(ascii, each)) if type(each) is frozenset else each for each in constants
    ]
    arguments = (
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_flags & 0xFF,
    )
    return (
        code.co_code,
        code.co_exceptiontable,
        arguments,
        code.co_varnames,
        code.co_names,
        code.co_freevars,
        constants,
    )


def _nested(code: CodeType) -> Iterator[CodeType]:
    """This code and all code within it."""
    yield code
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from _nested(constant)


# -- objects, read without asking them -------------------------------------------------------------

# __mro__ and the like.
_class_dict, _mro_of, _name_of, _module_of = (
    vars(type)[name].__get__ for name in ("__dict__", "__mro__", "__qualname__", "__module__")
)


def _attributes_of(thing: object) -> dict[str, Any]:
    """The ``__dict__`` of an object or module; empty for a class."""
    with suppress(Exception):  # no __dict__, or a property of the user's
        held = (
            object.__getattribute__(thing, "__dict__")
            if not issubclass(type(thing), type)
            else None
        )
        return held if type(held) is dict else {}
    return {}


def _package_of(value: Any) -> str:
    """The package of a function, class or module; of an object, that of its class."""
    kind = type(value)
    names = (
        value.__globals__
        if kind is FunctionType
        else _attributes_of(value)
        if issubclass(kind, ModuleType)
        else None
    )
    module = (
        dict.get(names, "__name__")
        if names is not None
        else _module_of(value if issubclass(kind, type) else kind)
    )
    return module.partition(".")[0] if type(module) is str else ""


def _is_foreign(value: object) -> bool:
    return _is_library(_package_of(value))


@functools.cache
def _is_library(package: str) -> bool:
    """A package that a fingerprint leaves out: its version or Python's is in the record, or it
    computes nothing.
    """
    # A file of the user's may have such a name.
    file = _attributes_of(sys.modules.get(package, sys)).get("__file__") or _STDLIB
    return package in _LIBRARIES or (
        package in sys.stdlib_module_names and str(file).startswith(_STDLIB)
    )


def _qualname_of(code: Any) -> str:
    return (
        str(code.__qualname__)
        if type(code) is FunctionType
        else _name_of(code if issubclass(type(code), type) else type(code))
    )


def _parts_of(value: object) -> dict[str, Any]:
    """Parts of a method, builtin, partial, property, staticmethod or classmethod; empty for other
    objects.
    """
    kinds = [each for each in _PARTS if issubclass(type(value), each)]
    return {
        part: vars(each)[part].__get__(value) for each in kinds for part in _PARTS[each].split()
    }


def _is_value(kind: type) -> bool:
    """Members of an enum, a dtype of a library, Triton's ``constexpr`` and ``Config``: their
    attributes count.
    """
    names = (
        ("dtype", "constexpr", "Config")
        if _package_of(kind) in ("torch", "triton", "numpy")
        else ("Enum",)
    )
    return any(_name_of(each) in names for each in _mro_of(kind))


def _is_code(value: object) -> bool:
    """Code, or an object that wraps some."""
    kind = type(value)
    if kind is FunctionType:
        return True
    if issubclass(kind, _NO_CODE) or _is_value(kind):
        return False
    return (
        callable(value)
        or issubclass(kind, (*_PARTS,))
        or any(name in _WRAPPED for name in _attributes_of(value))
    )


def _base_of(kind: type) -> Any:
    """The scalar or container that a class is or derives from, None for other classes."""
    return next((each for each in (*_SCALARS, *_CONTAINERS) if issubclass(kind, each)), None)


def _is_constant(value: object, depth: int = 0) -> bool:
    """Numbers, strings, dtypes, code and containers of these; not an empty container, because it
    may be filled later.
    """
    base = _base_of(type(value))
    if base not in _CONTAINERS:
        return issubclass(type(value), _NO_CODE) or _is_code(value) or _is_value(type(value))
    return (
        depth < 4
        and base.__len__(value) > 0
        and all(_is_constant(each, depth + 1) for each in _first_elements(base, value))
    )


def _first_elements(base: Any, value: Any) -> list[Any]:
    """The first elements of a container; none of a large set, because its order differs between
    processes.
    """
    is_vast = base in _SETS and base.__len__(value) > _MAX_ELEMENTS
    return (
        []
        if is_vast
        else list(islice((dict.items if base is dict else base.__iter__)(value), _MAX_ELEMENTS))
    )
