"""Triton's interpreter with less to do, for the fork server of tests, which hands it down to ranks and programs.

Most of its time for a small kernel goes into finding again what it found before: what it sets in triton.language at each launch and at each
call of a device function, and the types of each operation. Here it finds them once. It also computes each sum of integers a second time, to
look for overflows, which GPUs do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language import core


def _patched_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What ``patch`` sets depends on the modules that the kernel's file has, and on whether it is called by an interpreted kernel."""
    found: dict[Any, list[tuple[Any, str, Any]]] = {}

    def patched(fn: Any) -> Any:
        modules = tuple(value for value in fn.__globals__.values() if value is tl or value is core)
        key = (modules, core.is_builtin(tl.load), core.is_builtin(core.load))
        if key not in found:
            scope = patch(fn)
            found[key] = [(owner, name, getattr(owner, name)) for owner, name, _ in scope._changes]
            return scope
        scope = interpreter._LangPatchScope()
        for owner, name, value in found[key]:
            scope.set_attr(owner, name, value)
        return scope

    return patched


def _once(of: Callable[..., Any]) -> Callable[..., Any]:
    """A function of types, not all of which have a hash; their names say all."""
    found: dict[Any, Any] = {}

    def known(*types: Any) -> Any:
        names = tuple(each.name for each in types)
        if names not in found:
            found[names] = of(*types)
        return found[names]

    return known


class _Tuple(core.tuple):  # type: ignore[misc]
    """A tuple that makes its type when that is read: a shape is a tuple, and few shapes are asked for their type."""

    def __init__(self, args: Any, type: Any = None) -> None:
        self.values, self._type = list(args), type

    @property
    def type(self) -> Any:
        given = self._type
        if given is None:
            return core._type_for_tuple_values(self.values)
        return given if isinstance(given, core.tuple_type) else core.tuple_type(given)

    @type.setter
    def type(self, value: Any) -> None:
        self._type = value


interpreter._patch_lang = _patched_once(interpreter._patch_lang)
core.tuple.__init__, core.tuple.type = _Tuple.__init__, _Tuple.type
core.block_type.with_element_ty = _once(core.block_type.with_element_ty)
interpreter._get_np_dtype = _once(interpreter._get_np_dtype)
builder = interpreter.interpreter_builder
builder.options = replace(builder.options, sanitize_overflow=False)
