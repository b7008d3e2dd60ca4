"""Options of a decorator or a tuning script, judged before anything runs: each error names its
option and what fits there.

Knows callables and plain values; nothing of what options do.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MAX_SPELLED = 80
"""Characters of a value that a message quotes."""
# All functions that contextlib makes of a generator function share one code.
_MAKERS: tuple[Any, ...] = (contextlib.contextmanager, contextlib.asynccontextmanager)
_CONTEXT_CODES = frozenset(make(None).__code__ for make in _MAKERS)


def spelled(value: object) -> str:
    """A value in a message: plain ones as they are written, functions and classes by name, all else
    by type.
    """
    if _is_plain(value):
        text = repr(value)
        return text if len(text) <= _MAX_SPELLED else f"{text[:_MAX_SPELLED]}..."
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"the function {value.__qualname__}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)} values"
    return f"an object of type {type(value).__qualname__}"


def check_function(option: str, value: object, form: str, *, is_needed: bool = False) -> None:
    """Refuse an option that must be a function, or None unless it is needed.

    ``form``: its call, as "key_fn(*args, **kwargs)".

    Raises:
        TypeError: it cannot be called.
    """
    if not callable(value) and (is_needed or value is not None):
        raise TypeError(f"{option} must be a function, {form}, got {spelled(value)}")


def check_number(option: str, value: Any, least: float, kinds: Any = int) -> None:
    """Refuse an option that is no finite number from ``least`` on, of these ``kinds``.

    Raises:
        TypeError: it is none of these kinds.
        ValueError: it is less, or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, kinds):
        kind = "an int" if kinds is int else "a number"
        raise TypeError(f"{option} must be {kind}, got {spelled(value)}")
    if not least <= value < math.inf:
        raise ValueError(f"need {option} >= {least}, got {value}")


def check_online(search: object, max_slowdown: Any, **repeating: object) -> None:
    """Refuse a share that is none, and options that have no meaning where no call is repeated (name
    -> value) with ``search="online"``.

    Raises:
        TypeError: the share is no number.
        ValueError: it is not from 0 to 1, or these are given.
    """
    check_number("max_slowdown", max_slowdown, 0, (int, float))
    if max_slowdown > 1:
        raise ValueError(f"need max_slowdown <= 1, a share of the job's time, got {max_slowdown}")
    if search == "online":
        if given := [name for name, value in repeating.items() if value is not None]:
            raise ValueError(
                f'{given[0]}= is given, and search="online" repeats no call and judges no result:'
                " leave one of them out"
            )
        if max_slowdown == 0:
            raise ValueError('search="online" cannot try anything with max_slowdown=0')


def check_space(option: str, value: object) -> list[Any]:
    """A config space as a list.

    Raises:
        TypeError: it cannot be iterated, or is one config.
    """
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        one = f"; of one config write {option}=[...]" if isinstance(value, Mapping) else ""
        call = ": pass the list that it returns" if callable(value) else ""
        raise TypeError(f"{option} must be a list of configs, got {spelled(value)}{one}{call}")
    return list(value)


def check_names(option: str, config: Mapping[Any, Any]) -> None:
    """Refuse a config whose names are no strings.

    Raises:
        TypeError: a name is no string.
    """
    for name in config:
        if not isinstance(name, str):
            raise TypeError(
                f"{option} holds a config with the name {spelled(name)}: names of config values are"
                " strings"
            )


def check_ordinary(function: object, decorator: str) -> None:
    """Refuse to decorate what has not run when it returns.

    Raises:
        TypeError: a static or class method, a coroutine, a generator, a context manager, or nothing
            callable.
    """
    if isinstance(function, staticmethod | classmethod):
        raise TypeError(f"put @{type(function).__name__} above @{decorator}(...), not below it")
    kind = _deferred_kind(function)
    if kind or not callable(function):
        got = (
            f"{spelled(function)}, which makes a {kind}. {within(kind)}"
            if kind
            else spelled(function)
        )
        raise TypeError(
            f"{decorator} decorates ordinary functions, which have run when they return; got {got}"
        )


def within(kind: str) -> str:
    """What to do instead of decorating what makes a value of this kind, see ``deferred_value``."""
    return (
        "Put what launches the kernels into a function of its own, decorate that one, and call it"
        f" within the {kind}"
    )


def deferred_value(value: object) -> str:
    """Kind of a returned value whose body has yet to run, "generator"; empty for all else."""
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        return "generator"
    if inspect.iscoroutine(value):
        return "coroutine"
    return (
        "context manager"
        if isinstance(
            value, contextlib._GeneratorContextManager | contextlib._AsyncGeneratorContextManager
        )
        else ""
    )


def _deferred_kind(function: Any) -> str:
    """Kind of the value of a callable that returns before its body has run; empty for ordinary
    ones.
    """
    if not callable(function):
        return ""
    for body in (function, type(function).__call__):
        if inspect.iscoroutinefunction(body):
            return "coroutine"
        if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
            return "generator"
        if getattr(body, "__code__", None) in _CONTEXT_CODES:
            return "context manager"
    return ""


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, _PLAIN)
