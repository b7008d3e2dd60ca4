"""Early end of compilations that need more shared memory than the device has; the need is kept on disk.

Triton knows the need when it has made LLVM IR, and checks it when it loads the finished kernel. Assembling such a kernel takes
longer than all steps before (logs/compile-cpu), for nothing.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import triton
from triton.runtime.cache import FileCacheManager, get_cache_manager

from dist_tune.compiler.passes.patches import SharedContext, replaced

_NEED_FILE = "dist_tune.json"
"""In a kernel's folder of Triton's disk cache: the shared memory that it needs, where some device has less."""

_thread = threading.local()
"""``limit_bytes`` of a thread within ``shared_limit``; other threads compile as always."""


@contextmanager
def shared_limit(limit_bytes: int | None) -> Iterator[None]:
    """Within ``early_check``, a compilation on this thread raises ``OutOfResources`` if it needs more. None: no limit."""
    _thread.limit_bytes = limit_bytes
    try:
        yield
    finally:
        _thread.limit_bytes = None


def check_need(metadata: Mapping[str, Any]) -> None:
    """Raise ``OutOfResources`` on a thread with a limit, if the kernel with this metadata needs more."""
    limit, needed = getattr(_thread, "limit_bytes", None), metadata.get("shared")
    if limit is not None and isinstance(needed, int) and needed > limit:
        raise triton.OutOfResources(needed, limit, "shared memory")


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


def _wrapped(own: Any) -> Any:
    @functools.wraps(own)
    def make_ptx(self: Any, src: Any, metadata: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        check_need(metadata)
        return own(self, src, metadata, *args, **kwargs)

    return make_ptx


@contextmanager
def _patched() -> Iterator[None]:
    try:
        from triton.backends.nvidia.compiler import CUDABackend
    except ImportError:  # a Triton without that backend checks its kernels when it loads them
        yield
        return
    with replaced(CUDABackend, "make_ptx", _wrapped):
        yield


early_check = SharedContext(_patched)
"""While entered, Triton checks the thread's limit before it makes PTX."""
