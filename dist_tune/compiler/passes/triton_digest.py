"""The digest of Triton's own files, a part of each compiled kernel's key: made by a thread ahead of the first launch.

Triton makes it in its first launch, of 0.4 GB: 0.2 to 0.4 s, most of a first call that finds all else in caches. It is begun when a
function is decorated, beside the program's own start, and is kept by Triton. Nothing is imported for it.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from functools import lru_cache

from triton.runtime.cache import triton_key

from dist_tune.measure import is_interpreted

_LONGEST_S = 10.0
"""Of the wait for it: a file system that stands still is Triton's to wait for."""


def begin_digest() -> None:
    """Begin the digest, unless this process has."""
    if not is_interpreted():  # no kernel is compiled
        thread_of(os.getpid())


def await_digest() -> None:
    """Wait until it is made, because a second one beside it would take longer."""
    if not is_interpreted():
        thread = thread_of(os.getpid())
        if thread.ident is not None:
            thread.join(_LONGEST_S)


@lru_cache(maxsize=1)
def thread_of(process: int) -> threading.Thread:
    """The thread that makes it, started once in a process, of which a forked child is another."""
    thread = threading.Thread(target=_make, name="dist_tune digest", daemon=True)
    with suppress(RuntimeError):  # no more threads: it is made when it is asked for
        thread.start()
    return thread


def _make() -> None:
    with suppress(Exception):  # Triton raises it in its first launch, if there is one
        triton_key()
