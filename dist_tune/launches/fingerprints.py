"""Digests of code, by which records are found again: of a kernel Triton's own, of a function its
source with what it calls.

A digest that misses a change costs speed, never a result: a record holds the choice of a config
among the program's own candidates, and no code. Knows Triton's kernels, and nothing of configs,
keys or records.
"""

from __future__ import annotations

import hashlib
import inspect
import linecache
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from functools import lru_cache, partial
from itertools import islice
from tokenize import TokenError
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

_MOST = 300
"""Functions, classes and kernels that are read for one digest, the nearest first."""
_MOST_ELEMENTS = 1_000
_LIBRARIES = frozenset({"torch", "triton", "numpy", "dist_tune"}) | sys.stdlib_module_names
"""A record has the versions of Python, torch and Triton; the others compute nothing."""
_WRAPPED = ("__wrapped__", "fn", "func", "py_func", "_init_fn")
"""Where functools, Triton, numba and torch.library keep what they wrap."""
_RULES = ("values", "pre_hook", "post_hook", "reset_to_zero", "restore_value")
"""Of Triton's heuristics and autotuner: functions, and names of arguments."""
_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, tl.dtype)
_EMPTY = CellType()  # equal to the cell of a variable without a value


class Code(NamedTuple):
    """The code of a function or kernel as far as it was read."""

    digest: str
    """16 hex digits."""
    captured: dict[str, str]
    """Name -> text: first "code", a digest without any values; then each value that the code has
    captured, so that two kernels of one factory can be told apart by the one in which they differ.
    Also plain attributes of objects, which ``digest`` leaves out.
    """


class _Part(NamedTuple):
    text: str
    inner: list[Any]
    """What is to be read as well."""
    values: dict[str, Any]
    key: str = ""
    """Triton's, of the kernel with its values."""


def read_code(*things: object, launches: bool = False) -> Code:
    """The code of functions, methods, classes, callable objects or Triton kernels.

    Of a kernel that is launched now (``launches``) it is ``JITFunction.cache_key``: its source, its
    line, what it calls and its constants; with the sources of heuristics and hooks. Of a function
    it is the source, values that it has captured, constants in UPPER_CASE, and the code of kernels,
    functions and classes that it names, but for those of the standard library, torch, triton and
    numpy. Their keys are not asked for, because Triton would keep their constants from then on.
    Code without a source counts as its bytecode; a kernel under Triton's interpreter is another
    one. Never raises.
    """
    texts, keys, values = list[str](), list[str](), dict[str, Any]()
    waiting, seen = list(things), set[int]()
    for thing in waiting:  # grows
        if id(thing) not in seen and len(seen) < _MOST:
            seen.add(id(thing))
            part = _read(thing, launches=launches)
            texts.append(part.text)
            keys.append(part.key)
            waiting += part.inner
            for name, value in part.values.items():
                values[f"{name}@{len(values)}" if name in values else name] = value
    meanings = [f"{name}={_meaning(value)}" for name, value in values.items()]
    captured = {name: _short(_meaning(value, _attributes(value))) for name, value in values.items()}
    return Code(_digest(*texts, *keys, *meanings), {"code": _digest(*texts)[:12], **captured})


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(map(ascii, texts)).encode()).hexdigest()[:16]


def _short(text: str) -> str:
    return text if len(text) <= 24 else _digest(text)[:12]


# -- code ------------------------------------------------------------------------------------------


def _read(thing: Any, *, launches: bool) -> _Part:
    kind = type(thing)
    with suppress(Exception):  # descriptors of the user's raise anything
        if isinstance(thing, JITFunction):
            return _kernel(thing) if launches else _function(thing.fn)
        if kind is FunctionType:
            return _function(thing)
        if isinstance(thing, type):
            members = (*thing.__mro__[1:], *vars(thing).values())
            return _Part(
                _source(thing, thing.__name__),
                [member for member in members if _is_code(member)],
                {},
            )
        if isinstance(thing, partial):
            given = {**{str(k): arg for k, arg in enumerate(thing.args)}, **thing.keywords}
            return _Part("partial", [thing.func], given)
        owner = thing.__self__ if isinstance(thing, MethodType) else thing
        return _Part(
            type(owner).__qualname__, [*_held(thing), *filter(_is_code, [type(owner)])], {"": owner}
        )
    return _Part("unreadable", [], {})


def _kernel(kernel: Any) -> _Part:
    """A kernel's constants are told by name as well, because some are each rank's own number."""
    key = ""
    with kernel._hash_lock:
        try:
            key = kernel.cache_key
        except Exception:  # noqa: BLE001  # it calls what is no kernel: its compilation shall say so
            _forget(kernel)
    constants = {name: value for (name, _), (value, _) in kernel.used_global_vals.items()}
    if not all(isinstance(getattr(each, "value", each), _SCALARS) for each in constants.values()):
        key = ""  # an object in it has its address
    return _Part(kernel.src, _callees(kernel), constants, key)


def _callees(kernel: Any) -> list[Any]:
    return [each for each in _named(kernel.fn)[0] if isinstance(each, JITFunction)]


def _forget(kernel: Any) -> None:
    """Take back the key of a kernel, and of those that it calls, for which Triton has put another
    text meanwhile and leaves it after an error: kernels of one name would share it.
    """
    if str(kernel.hash).startswith("recursion:"):
        kernel.hash = None
        for each in _callees(kernel):
            _forget(each)


def _function(function: FunctionType) -> _Part:
    code, (inner, constants) = function.__code__, _named(function)
    source = _source(code, function.__name__, code.co_filename)
    return _Part(source, [*_held(function), *inner], constants)


def _held(thing: Any) -> Iterator[Any]:
    """What a wrapper wraps, and a kernel's heuristics and hooks; its configs are the candidates."""
    if isinstance(thing, MethodType):
        yield thing.__func__
    if isinstance(thing, partial):
        yield thing.func
    held = _attributes(thing)
    yield from (held[name] for name in _WRAPPED if name in held)
    for name, rule in _rules(held).items():
        yield name
        yield from rule.values() if isinstance(rule, dict) else [rule]
    hooks = [getattr(each, "pre_hook", None) for each in held.get("configs") or ()]
    yield from (hook for hook in hooks if hook is not None)


def _rules(held: dict[str, Any]) -> dict[str, Any]:
    """Those of the user's, without the hooks that Triton has put there itself."""
    found = {name: held[name] for name in _RULES if held.get(name)}
    return {name: rule for name, rule in found.items() if not callable(rule) or _is_followed(rule)}


def _named(function: FunctionType) -> tuple[list[Any], dict[str, Any]]:
    """Code and constants that a function has captured or names, as globals or as attributes of
    modules: more than it uses, never less.
    """
    code, cells = function.__code__, function.__closure__ or ()
    captured = {
        name: cell.cell_contents
        for name, cell in zip(code.co_freevars, cells, strict=True)
        if cell != _EMPTY
    }
    names = {name for each in _nested(code) for name in each.co_names}
    scopes = [captured, function.__globals__]
    inner, constants = list[Any](), dict[str, Any]()
    for scope in scopes:  # grows
        for name in sorted(scope if scope is captured else names & scope.keys()):
            value = scope[name]
            if issubclass(type(value), ModuleType):
                if _is_followed(value) and not any(vars(value) is each for each in scopes):
                    scopes.append(vars(value))
            elif _is_code(value):
                inner.append(value)
            elif scope is captured or (name.isupper() and _is_constant(value)):
                constants[name] = value
    return inner, constants


@lru_cache(maxsize=8_192)  # the kernels of a library share most of what they call
def _source(thing: Any, name: str, file: str = "") -> str:
    """The source of code or of a class, without decorators: what they have made is read instead.

    ``file``: of code, because code of two files may be equal.
    """
    with suppress(OSError, TypeError, SyntaxError, IndexError, TokenError):
        if isinstance(thing, CodeType):
            # Not inspect.getsource, which asks all modules for their files: 17 ms at first.
            linecache.checkcache(file)
            lines = linecache.getlines(file)[thing.co_firstlineno - 1 :]
            source = "".join(inspect.getblock(lines))
        else:
            source = inspect.getsource(thing)
        begin = re.search(rf"^\s*(async def|def|class) {re.escape(name)}\b", source, re.MULTILINE)
        if begin is not None:  # not of a lambda, whose lines may hold more
            return source[begin.start() :]
    codes = _nested(thing) if isinstance(thing, CodeType) else ()
    return f"{name} {[_bytecode(code) for code in codes]}"


def _bytecode(code: CodeType) -> str:
    plain = [constant for constant in code.co_consts if isinstance(constant, _SCALARS)]
    return f"{code.co_code.hex()} {code.co_argcount} {code.co_flags} {code.co_names} {plain}"


def _nested(code: CodeType) -> Iterator[CodeType]:
    """This code and all code within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _is_code(value: Any) -> bool:
    """A kernel, or what can be called and is no library's."""
    with suppress(Exception):  # as in ``_read``
        if isinstance(value, (tl.constexpr, torch.Tensor, *_SCALARS)):
            return False
        return (callable(value) and _is_followed(value)) or any(True for _ in _held(value))
    return False


def _is_followed(thing: Any) -> bool:
    of = thing if isinstance(thing, type | FunctionType | ModuleType | JITFunction) else type(thing)
    module = of.__name__ if isinstance(of, ModuleType) else of.__module__
    return module.partition(".")[0] not in _LIBRARIES


def _attributes(thing: Any) -> dict[str, Any]:
    with suppress(Exception):  # as in ``_read``
        return {} if isinstance(thing, type) else dict(object.__getattribute__(thing, "__dict__"))
    return {}


# -- values ----------------------------------------------------------------------------------------


def _is_constant(value: Any, depth: int = 0) -> bool:
    """No empty container, and none of objects: it may be filled while the program runs."""
    if isinstance(value, dict | list | tuple | set | frozenset) and depth < 4:
        elements = [*value.values()] if isinstance(value, dict) else [*value]
        return bool(elements) and all(_is_constant(each, depth + 1) for each in elements)
    return isinstance(value, (tl.constexpr, Enum, *_SCALARS)) or _is_code(value)


def _meaning(value: Any, attributes: dict[str, Any] | None = None, depth: int = 0) -> str:
    """A value as text, equal in all processes: an object by its class, with its plain
    ``attributes``.
    """
    kind = type(value)
    with suppress(Exception):  # as in ``_read``; and an int of more than 4,300 digits
        if isinstance(value, tl.constexpr):
            return _meaning(value.value)
        if isinstance(value, Enum):
            return str(value)
        if isinstance(value, _SCALARS):
            return repr(value)
        if isinstance(value, torch.Tensor):
            return f"tensor {[*value.shape]} {value.dtype}"
        if isinstance(value, dict | list | tuple | set | frozenset) and depth < 4:
            is_ordered = isinstance(value, list | tuple)
            elements = value.items() if isinstance(value, dict) else value
            if not is_ordered and len(value) > _MOST_ELEMENTS:
                elements = ()  # their order is another one in each process
            texts = [_meaning(each, None, depth + 1) for each in islice(elements, _MOST_ELEMENTS)]
            if not is_ordered:
                texts.sort()
            return f"{kind.__name__}{len(value)}{texts}"
        plain = {
            name: attribute
            for name, attribute in (attributes or {}).items()
            if type(attribute) in _SCALARS
        }
        name = getattr(value, "__qualname__", "") if _is_code(value) else ""
        return f"{name or kind.__qualname__}{plain or ''}"
    return "unreadable"
