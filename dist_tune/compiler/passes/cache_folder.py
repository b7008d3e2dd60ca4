"""Triton's cache folder where it cannot be written: kernels go to a temporary folder then, and the tuning goes on.

Knows Triton's ``FileCacheManager``, and nothing of candidates. Other ranks do not find what lies there, and compile it themselves.
"""

from __future__ import annotations

import base64
import errno
import functools
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import triton
from triton.runtime.cache import FileCacheManager

from dist_tune.compiler.passes.patches import SharedContext, replaced
from dist_tune.compiler.subprocesses.leftovers import prefix, suffix
from dist_tune.warn_once import warn_once

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOENT)


def is_cached(key: str) -> bool:
    """True if the kernel of this key, in hex, is complete in Triton's cache folder: the list of its files is written last."""
    name = base64.b32encode(bytes.fromhex(key)).decode().rstrip("=")
    with suppress(OSError):
        return any(each.startswith("__grp__") for each in os.listdir(os.path.join(triton.knobs.cache.dir, name)))
    return False


class _Spare:
    """The temporary folder of one use, made when it is needed."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self._folder = ""

    def put(self, manager: Any, content: Any, name: str, error: OSError) -> str:
        """Write a file that Triton could not write; the path where it lies.

        Raises:
            OSError: that does not work either. Names both folders.
        """
        full = os.path.dirname(manager.cache_dir)
        try:
            if not self._folder:
                self._folder = self.stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix("triton"), suffix=suffix()))
            path = Path(self._folder, manager.key, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else str(content).encode())
        except OSError as second:
            raise OSError(
                error.errno, f"{error.strerror}: Triton's cache folder {full} cannot be written, nor can {tempfile.gettempdir()} ({second})"
            ) from error
        # Told with the folder, as Triton's own error may name none.
        spare.told = (
            f"Triton's cache folder {full} cannot be written ({error.strerror}): this process keeps the kernels of this tuning in "
            f"{tempfile.gettempdir()} until its end. Free some space there, or set TRITON_CACHE_DIR"
        )
        warn_once(f"dist_tune: {spare.told}", topic=f"triton cache {full}")
        return str(path)


class SpareFolder:
    """The use of a temporary folder by all tunings of this process that compile."""

    def __init__(self) -> None:
        self.told = ""
        """The latest message about it, for the log."""
        self.in_use = SharedContext(self._patched)

    def take_told(self) -> str:
        """The message, once."""
        told, self.told = self.told, ""
        return told

    @contextmanager
    def _patched(self) -> Iterator[None]:
        used = _Spare()
        with used.stack, replaced(FileCacheManager, "__init__", _init), replaced(FileCacheManager, "put", functools.partial(_put, used)):
            yield


def _init(own: Any) -> Any:
    @functools.wraps(own)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            own(self, *args, **kwargs)
        except OSError as error:
            # The folder is the last thing that Triton makes there: a later ``put`` finds that there is none.
            if error.errno not in _DISK or getattr(self, "lock_path", None) is None:
                raise

    return init


def _put(used: _Spare, own: Any) -> Any:
    @functools.wraps(own)
    def put(self: Any, data: Any, filename: str, binary: bool = True) -> str:
        try:
            return str(own(self, data, filename, binary))
        except OSError as error:
            if error.errno not in _DISK:
                raise
            return used.put(self, data, filename, error)

    return put


spare = SpareFolder()
"""One per process, as Triton's cache is."""
