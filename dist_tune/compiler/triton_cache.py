"""Triton's cache folder: which kernels a process of this host compiles now, the temporary folder
where it cannot be written, its digest.

Knows Triton's ``FileCacheManager``, and nothing of candidates.
"""

from __future__ import annotations

import base64
import fcntl
import io
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from typing import IO

import triton
from triton.runtime.cache import FileCacheManager, triton_key

from dist_tune.compiler.processes import temporary_folder
from dist_tune.files import warn_once
from dist_tune.measure import is_interpreted

_ROOM_BYTES = 1 << 20
"""Of a kernel with all its files, which a folder must have room for."""
_LONGEST_S = 10.0
"""Of the wait for the digest: a file system that stands still is Triton's to wait for."""


@contextmanager
def claim(key: str) -> Iterator[IO[bytes] | None]:
    """Hold the right to compile a kernel on this host, with a file beside it; None while another
    process, or thread, has it.

    ``key``: in Triton's disk cache, in hex. Each process has the right where the folder cannot be
    written or has no locks.
    """
    # A cache manager of the user's may be slow, remote, or raise anything; with a hook in the
    # compiler the key is not complete.
    is_plain = (
        triton.knobs.cache.manager_class in (None, FileCacheManager)
        and triton.knobs.runtime.add_stages_inspection_hook is None
    )
    folder = triton.knobs.cache.dir if key and is_plain else ""
    if folder:
        folder = os.path.join(folder, base64.b32encode(bytes.fromhex(key)).decode().rstrip("="))
        with suppress(OSError):
            os.makedirs(folder, exist_ok=True)
    with ExitStack() as stack:
        file: IO[bytes]
        try:
            file = stack.enter_context(
                open(os.path.join(folder or os.devnull, "dist_tune.lock"), "a+b")
            )
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Also where a fork of this process has the file.
            stack.callback(fcntl.flock, file, fcntl.LOCK_UN)
            file.seek(0)
        except BlockingIOError:
            yield None
            return
        except OSError:
            file = io.BytesIO()
        yield file


@contextmanager
def writable_folder() -> Iterator[None]:
    """Give Triton a cache folder that can be written, if there is any.

    Other ranks do not look into a temporary one.
    """
    folder = triton.knobs.cache.dir
    with triton.knobs.cache.scope():
        try:
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, _ROOM_BYTES)
        except OSError as error:
            # If there is none: each compilation says so.
            triton.knobs.cache.dir = os.path.join(temporary_folder() or folder, "triton")
            text = (
                f"dist_tune: Triton's cache folder {folder} cannot be written ({error.strerror}):"
                f" this process keeps the kernels of this tuning in {triton.knobs.cache.dir} until"
                " its end. Free some space there, or set TRITON_CACHE_DIR"
            )
            warn_once(text, topic=f"triton cache {folder}")
        yield


@lru_cache(maxsize=1)
def begin_digest() -> threading.Thread | None:
    """Begin the digest of Triton's own files, a part of each kernel's key, unless this process has.

    Triton makes it in its first launch, of 0.4 GB: 0.2 to 0.4 s, most of a first call that finds
    all else in caches. It is begun when a function is decorated, beside the program's own start,
    and is kept by Triton. Nothing is imported for it.
    """

    def make() -> None:
        with suppress(Exception):  # Triton raises it in its first launch, if there is one
            triton_key()

    if is_interpreted():  # no kernel is compiled
        return None
    thread = threading.Thread(target=make, name="dist_tune digest", daemon=True)
    with suppress(RuntimeError):  # no more threads: it is made when it is asked for
        thread.start()
    return thread


def await_digest() -> None:
    """Wait until it is made, because a second one beside it would take longer."""
    if (thread := begin_digest()) is not None:
        with suppress(RuntimeError):  # not started
            thread.join(_LONGEST_S)
