"""Folders of records behind URLs, as s3://bucket/records, through fsspec and the package that it
asks for.

No step needs them in order to run: a question is asked on a thread that is left behind when its
time is over, and after the first failure this process asks no more. Knows names and contents of
files, and nothing of what they hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from dist_tune.files import warn_once

LIMIT_S = 5.0
"""Seconds that a process waits for a store in all; at most a quarter of the deadline, because peers
may wait in a collective meanwhile.
"""
_FREE_S = 0.2
"""Of each question, which do not count: no store that answers so soon is slow."""
_REMEDY = ": pip install fsspec and what it needs for this store, s3fs for s3://, gcsfs for gs://"


class RemoteFolder:
    """Files "<folder>/<name>" below a URL. Nothing raises for the state of the store."""

    def __init__(self, url: str, limit_s: float) -> None:
        self.url = url.rstrip("/")
        self._limit_s = self._left_s = limit_s
        self._opened: Any = None
        """The file system, and the URL's path in it."""
        self._is_over = {"read": False, "written": False}

    def read(self, place: str, max_bytes: int) -> bytes | None:
        """Content of a file, of a larger one its beginning; None if it is not there, or the store
        has failed.
        """

        def content(files: Any, path: str) -> Any:
            try:
                return files.cat_file(path, start=0, end=max_bytes)
            except FileNotFoundError:
                return None

        found: bytes | None = self._ask("read", place, content)
        return found

    def write(self, place: str, content: bytes) -> None:
        """Put a file in the place of the one that is there; a store has it whole or not at all."""

        def put(files: Any, path: str) -> None:
            try:
                files.pipe_file(path, content)
            except FileNotFoundError:  # of a store that has folders, as file:// and sftp://
                files.makedirs(path.rpartition("/")[0], exist_ok=True)
                files.pipe_file(path, content)

        self._ask("written", place, put)

    def _ask(self, what: str, place: str, question: Callable[[Any, str], Any]) -> Any:
        if self._is_over[what]:
            return None
        began = time.monotonic()
        try:
            from fsspec.core import get_filesystem_class, url_to_fs

            # Here, because that imports torch, and records are read without it.
            from dist_tune.ranks import (
                within,
            )

            def answer() -> Any:
                if self._opened is None:
                    # Not the program's own, which remembers listings.
                    self._opened = url_to_fs(self.url, skip_instance_cache=True)
                files, root = self._opened
                return question(files, f"{root}/{place}")

            # Imports it, which may take longer than any answer.
            get_filesystem_class(self.url.partition("://")[0])
            began = time.monotonic()
            return within(max(0.0, self._left_s), answer)
        except Exception as error:  # noqa: BLE001  # of whatever package: the record is tuned
            self._is_over |= {what: True, "written": True}
            is_late = isinstance(error, TimeoutError) and not str(error)
            reason = (
                f"it has not answered within {self._limit_s:g} s"
                if is_late
                else f"{type(error).__name__}: {error}".partition("\n")[0]
            )
            told = (
                f"dist_tune: records in {self.url} are not {what} any more by this process, which"
                " goes on with this machine's folders"
            )
            remedy = _REMEDY if isinstance(error, ImportError) else ""
            warn_once(f"{told}: {reason[:300]}{remedy}", topic=f"{self.url} is not {what}")
            return None
        finally:
            self._left_s -= max(0.0, time.monotonic() - began - _FREE_S)


remote_folder = lru_cache(RemoteFolder)  # one for a process: what has failed stays so
