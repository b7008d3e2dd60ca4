"""Triton's interpreter with less to do, for the fork server of tests, which hands it down to ranks and programs.

It lists all of triton.language at every launch and at every call of a device function, and computes each sum of integers twice, to look for
overflows. The lists stay the same, and GPUs do not look for overflows either.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import triton.runtime.interpreter as interpreter
from triton.language.core import is_builtin


@cache
def _builtins(owner: Any) -> list[str]:
    return [name for name, value in inspect.getmembers(owner) if is_builtin(value)]


def _members(owner: Any) -> list[tuple[str, Any]]:
    return [(name, getattr(owner, name)) for name in _builtins(owner)]


interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": _members})
builder = interpreter.interpreter_builder
builder.options = replace(builder.options, sanitize_overflow=False)
