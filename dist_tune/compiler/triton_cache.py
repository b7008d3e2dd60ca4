"""Triton's cache folder: who shares it, what lies in it, and the temporary one that stands in where it cannot be written.

Knows Triton's ``FileCacheManager``, and nothing of candidates. A kernel that needs more shared memory than the device has is not assembled,
which would take longer than all steps before (logs/compile-cpu); its need is kept in the folder for other ranks and later processes.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import triton
from triton.runtime.cache import FileCacheManager, get_cache_manager, triton_key

from dist_tune.compiler.leftovers import temporary_folder
from dist_tune.compiler.patches import SharedContext
from dist_tune.measure import is_interpreted
from dist_tune.warn_once import warn_once

_NEED_FILE = "dist_tune.json"
"""In a kernel's folder: the shared memory that it needs, where some device has less."""
_ROOM_BYTES = 1 << 20
"""Of a kernel with all its files, which a folder must have room for."""
_LONGEST_S = 10.0
"""Of the wait for it: a file system that stands still is Triton's to wait for."""
_told: list[str] = []
"""What is said of the temporary folder, while it stands in."""


def host_of_cache() -> str:
    """This machine and Triton's cache folder on it: processes with equal answers share compiled kernels."""
    folder = Path(triton.knobs.cache.dir)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        status = folder.stat()
        return f"{socket.gethostname()} {status.st_dev}:{status.st_ino}"
    return f"{socket.gethostname()} process {os.getpid()}"


def is_cached(key: str) -> bool:
    """True if the kernel of this key, in hex, is complete in the folder: the list of its files is written last."""
    name = base64.b32encode(bytes.fromhex(key)).decode().rstrip("=")
    with suppress(OSError):
        return any(each.startswith("__grp__") for each in os.listdir(os.path.join(triton.knobs.cache.dir, name)))
    return False


def known_need(key: str) -> int | None:
    """Bytes of shared memory that a kernel needs, if that was too much for some device. ``key``: in Triton's disk cache."""
    # No such file, or not readable; Triton raises RuntimeError for a cache without a folder.
    with suppress(OSError, RuntimeError, ValueError, TypeError, KeyError):
        path = get_cache_manager(key).get_file(_NEED_FILE) if key and _is_on_disk() else None
        needed = json.loads(Path(path).read_text())["shared_bytes"] if path is not None else None
        return needed if type(needed) is int else None
    return None


def remember_need(key: str, needed_bytes: int) -> None:
    """Write the need to disk for later processes."""
    with suppress(OSError, RuntimeError):  # a cache that cannot be written costs the next process some time
        if key and _is_on_disk():
            get_cache_manager(key).put(json.dumps({"shared_bytes": needed_bytes}), _NEED_FILE, binary=False)


def _is_on_disk() -> bool:
    # A cache manager of the user's may be slow, remote, or raise anything; with a hook in the compiler the key is not complete.
    return triton.knobs.cache.manager_class in (None, FileCacheManager) and triton.knobs.runtime.add_stages_inspection_hook is None


def standing_in() -> str:
    """A sentence about the temporary folder while it stands in for Triton's; empty if that can be written."""
    return "".join(_told)


@contextmanager
def _writable_folder() -> Iterator[None]:
    folder = triton.knobs.cache.dir
    with triton.knobs.cache.scope():
        try:
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, _ROOM_BYTES)
        except OSError as error:
            triton.knobs.cache.dir = os.path.join(temporary_folder() or folder, "triton")  # if none: each compilation says so
            _told.append(
                f"Triton's cache folder {folder} cannot be written ({error.strerror}): this process keeps the kernels of this tuning in "
                f"{triton.knobs.cache.dir} until its end. Free some space there, or set TRITON_CACHE_DIR"
            )
            warn_once(f"dist_tune: {_told[0]}", topic=f"triton cache {folder}")
        yield
    _told.clear()


writable_folder = SharedContext(_writable_folder)
"""While entered, Triton has a cache folder that can be written, if there is any. Other ranks do not look into a temporary one."""


def begin_digest() -> None:
    """Begin the digest of Triton's own files, a part of each kernel's key, unless this process has.

    Triton makes it in its first launch, of 0.4 GB: 0.2 to 0.4 s, most of a first call that finds all else in caches. It is begun when a
    function is decorated, beside the program's own start, and is kept by Triton. Nothing is imported for it.
    """
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
