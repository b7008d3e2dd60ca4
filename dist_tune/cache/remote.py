"""Folders of records behind URLs, as s3://bucket/records, through fsspec and the package that it asks for.

No step needs them in order to run: a question is asked on a thread that is left behind when its time is over, and after the first failure
this process asks no more. Knows names and contents of files, and nothing of what they hold.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from functools import lru_cache
from math import inf
from typing import Any, TypeVar

from dist_tune.files import RefusedFileError, warn_once

LIMIT_S = 5.0
"""Seconds that a process waits for a store in all; at most a quarter of the deadline, because peers may wait in a collective meanwhile."""
_FREE_S = 0.2
"""Of each question, which do not count: no store that answers so soon is slow."""
_FRESH_S = 60.0
"""Age up to which a listing without a file counts."""
_REMEDY = ": pip install fsspec and what it needs for this store, s3fs for s3://, gcsfs for gs://"
Answer = TypeVar("Answer")


class RemoteFolder:
    """Files "<folder>/<name>" below a URL. Nothing raises for the state of the store."""

    def __init__(self, url: str, limit_s: float) -> None:
        self.url = url.rstrip("/")
        self._limit_s = self._left_s = limit_s
        self._files: Any = None
        """The file system, and the URL's path in it."""
        self._sizes: dict[str, tuple[float, dict[str, int]]] = {}
        """Folder -> when it was listed, on the monotonic clock in seconds, and name -> bytes: one listing for all keys of a kernel."""
        self._is_over = {"read": False, "written": False}

    def read(self, place: str, max_bytes: int) -> bytes | None:
        """Content of a file; None if it is not there, or the store has failed.

        Raises:
            RefusedFileError: it is larger than ``max_bytes``.
        """

        def content() -> bytes | None:
            files, root = self._opened()
            folder, _, name = place.partition("/")
            listed_at, sizes = self._sizes.get(folder, (-inf, {}))
            try:
                if name not in sizes and time.monotonic() - listed_at > _FRESH_S:
                    self._sizes[folder] = time.monotonic(), sizes
                    files.invalidate_cache()  # fsspec's own, which does not age
                    sizes.update({each["name"].rpartition("/")[2]: each["size"] for each in files.ls(f"{root}/{folder}", detail=True)})
                if sizes.get(name, 0) > max_bytes:
                    raise RefusedFileError(errno.EFBIG, f"larger than {max_bytes} bytes", place)
                found: bytes | None = files.cat_file(f"{root}/{place}") if name in sizes else None
            except FileNotFoundError:
                return None
            return found

        return self._ask("read", content)

    def write(self, place: str, content: bytes) -> None:
        """Put a file in the place of the one that is there; a store has it whole or not at all."""

        def put() -> None:
            files, root = self._opened()
            files.pipe_file(f"{root}/{place}", content)

        self._ask("written", put)

    def _opened(self) -> tuple[Any, str]:
        if self._files is None:
            from fsspec.core import url_to_fs

            self._files = url_to_fs(self.url, skip_instance_cache=True)  # not the program's own, whose listings we drop
        files, root = self._files
        return files, root

    def _ask(self, what: str, question: Callable[[], Answer]) -> Answer | None:
        if self._is_over[what]:
            return None
        began = time.monotonic()
        try:
            from fsspec import get_filesystem_class

            from dist_tune.distributed import within  # here, because that imports torch, and records are read without it

            get_filesystem_class(self.url.partition("://")[0])  # imports it, which may take longer than any answer
            began = time.monotonic()
            return within(max(0.0, self._left_s), question)
        except RefusedFileError:
            raise
        except Exception as error:  # noqa: BLE001  # of whatever package: the record is tuned
            self._is_over |= {what: True, "written": True}
            late = f"it has not answered within {self._limit_s:g} s"
            reason = (str(error).partition("\n")[0] or late if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}")[
                :300
            ]
            told = (
                f"dist_tune: records in {self.url} are not {what} any more by this process, which goes on with the folders of its machine"
            )
            warn_once(f"{told}: {reason}{_REMEDY if isinstance(error, ImportError) else ''}", topic=f"{self.url} is not {what}")
            return None
        finally:
            self._left_s -= max(0.0, time.monotonic() - began - _FREE_S)


remote_folder = lru_cache(RemoteFolder)  # one for a process: what has failed stays so, and listings are shared
