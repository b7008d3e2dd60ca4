"""Compilations that Triton makes inside a launch, because the kernel for its arguments is not in memory.

Such a launch may be refused before anything is compiled, or noted. Knows Triton's ``JITFunction`` and nothing of candidates or replays;
launches of kernels that are in memory run Triton's own code only.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction

from dist_tune.compiler.passes.patches import SharedContext, replaced

_thread = threading.local()
"""``refusal`` of a thread within ``refused``; other threads compile as always."""
_notes: list[Callable[[Any], None]] = []
_compiling: set[int] = set()
"""Threads that compile inside a launch."""


class NotLoaded(BaseException):
    """Raised in place of a compilation inside a launch. Not an ``Exception``, because it must pass the user's own wrappers."""


class Refusal:
    """The answer of one ``refused`` block."""

    is_raised = False
    """True if a launch came to a compilation, also where a wrapper around the kernel has caught the ``NotLoaded``."""


@contextmanager
def refused() -> Iterator[Refusal]:
    """Within ``noted``, launches of this thread raise ``NotLoaded`` where they would compile."""
    before, _thread.refusal = getattr(_thread, "refusal", None), Refusal()
    try:
        yield _thread.refusal
    finally:
        _thread.refusal = before


@contextmanager
def noted(note: Callable[[Any], None]) -> Iterator[None]:
    """Call ``note(kernel)`` before a launch of any thread compiles a kernel, unless it is refused."""
    with _watched():
        _notes.append(note)
        try:
            yield
        finally:
            _notes.remove(note)


def is_compiling(thread: int) -> bool:
    """True if a launch of this thread compiles; known within ``noted`` only."""
    return thread in _compiling


def _wrapped(own: Any) -> Any:
    @functools.wraps(own)
    def do_compile(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if _async_compile.active_mode.get() is None:  # else Triton is asked, or compiles in the user's threads
            refusal: Refusal | None = getattr(_thread, "refusal", None)
            if refusal is not None:
                refusal.is_raised = True
                raise NotLoaded
            for note in list(_notes):
                note(kernel)
        _compiling.add(ident := threading.get_ident())
        try:
            return own(kernel, *args, **kwargs)
        finally:
            _compiling.discard(ident)

    return do_compile


_watched = SharedContext(lambda: replaced(JITFunction, "_do_compile", _wrapped))
