"""The end of a process with compiling threads: they end before the interpreter does."""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol

EXIT_WAIT_S = 10.0
"""Longest wait for compiling threads at the end of the process."""


class HasThreads(Protocol):
    """A compiler."""

    def end(self) -> None:
        """Let the threads end, each after the compilation that it runs."""

    def join(self, timeout_s: float) -> None:
        """Wait for them."""


_known: weakref.WeakSet[HasThreads] = weakref.WeakSet()


def end_at_exit(compiler: HasThreads) -> None:
    """End the threads of this compiler at the end of the process, before what was registered earlier."""
    _known.add(compiler)
    atexit.unregister(_end_all)
    atexit.register(_end_all)


def _end_all() -> None:
    # Python ends daemon threads when they ask for the interpreter's lock again; in a compiler's C++ that aborts the process.
    for compiler in list(_known):
        compiler.end()
        compiler.join(EXIT_WAIT_S)
