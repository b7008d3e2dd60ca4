"""Ends a compilation as soon as it is known to need more shared memory than the device has.

With compile.py the only user of Triton's compiler. Triton knows the need when it has made LLVM IR, and checks it when the
finished kernel is loaded; assembling such a kernel takes longer than all before (logs/compile-cpu), for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton
from triton.backends.nvidia.compiler import CUDABackend

_lock = threading.Lock()
_limits_bytes: dict[int, int] = {}
"""Thread -> its limit. Other threads compile as always."""
_own: list[Any] = []
"""Triton's method while ours is in its place."""


def _make_ptx(self: Any, src: Any, metadata: dict[str, Any], *args: Any) -> Any:
    limit, needed = _limits_bytes.get(threading.get_ident()), metadata.get("shared")
    if limit is not None and isinstance(needed, int) and needed > limit:
        raise triton.OutOfResources(needed, limit, "shared memory")
    return _own[0](self, src, metadata, *args)


@contextmanager
def shared_limit(limit_bytes: int | None) -> Iterator[None]:
    """What this thread compiles meanwhile raises ``OutOfResources`` if it needs more. None: no limit."""
    if limit_bytes is None:
        yield
        return
    with _lock:
        _limits_bytes[threading.get_ident()] = limit_bytes
        if CUDABackend.make_ptx is not _make_ptx:
            _own[:] = [CUDABackend.make_ptx]
            CUDABackend.make_ptx = _make_ptx
    try:
        yield
    finally:
        with _lock:
            del _limits_bytes[threading.get_ident()]
            if not _limits_bytes:
                CUDABackend.make_ptx = _own[0]
