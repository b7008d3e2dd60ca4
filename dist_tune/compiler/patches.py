"""What is changed in Triton while it is needed, for the first of several users and until the last;
and launches that would compile.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction


class SharedContext:
    """A context that the first of several users enters and the last one leaves, on any threads."""

    def __init__(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._n_users = 0
        self._exit = ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Be one of the users meanwhile."""
        with self._lock:
            if self._n_users == 0:
                self._exit.enter_context(self._context())
            self._n_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._n_users -= 1
                if self._n_users == 0:
                    self._exit.close()


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """A method of a class or object, or a name of a module, wrapped meanwhile.

    If the user has put a wrapper around ours, that stays.
    """
    before, ours = vars(owner).get(name), wrap(getattr(owner, name, None))
    setattr(owner, name, ours)
    try:
        yield
    finally:
        if getattr(owner, name) is ours:
            delattr(owner, name) if before is None else setattr(owner, name, before)


# -- launches --------------------------------------------------------------------------------------

_notes: list[Callable[[Any], None]] = []
_compiling: set[int] = set()
"""Threads that compile inside a launch."""


class NotLoaded(BaseException):
    """Raised in place of a compilation inside a launch.

    Not an ``Exception``, because it must pass the user's own wrappers.
    """


class Refusal:
    """The answer of one ``refused`` block."""

    is_raised = False
    """True if a launch came to a compilation, also where a wrapper around the kernel has caught the
    ``NotLoaded``.
    """


@contextmanager
def noted(note: Callable[[Any], None]) -> Iterator[None]:
    """Call ``note(kernel)`` before a launch of any thread compiles a kernel that is not in memory;
    the latest first, which may raise.
    """
    with _watched():
        _notes.insert(0, note)
        try:
            yield
        finally:
            _notes.remove(note)


@contextmanager
def refused() -> Iterator[Refusal]:
    """Launches of this thread raise ``NotLoaded`` where they would compile."""
    refusal, thread = Refusal(), threading.get_ident()

    def refuse(kernel: Any) -> None:
        if threading.get_ident() == thread:
            refusal.is_raised = True
            raise NotLoaded

    with noted(refuse):
        yield refusal


def is_compiling(thread: int) -> bool:
    """True if a launch of this thread compiles; known within ``noted`` only."""
    return thread in _compiling


def _do_compile(own: Any) -> Any:
    @functools.wraps(own)
    def do_compile(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        # Else Triton is asked, or compiles in the user's threads.
        if _async_compile.active_mode.get() is None:
            for note in list(_notes):
                note(kernel)
        _compiling.add(ident := threading.get_ident())
        try:
            return own(kernel, *args, **kwargs)
        finally:
            _compiling.discard(ident)

    return do_compile


_watched = SharedContext(lambda: replaced(JITFunction, "_do_compile", _do_compile))
