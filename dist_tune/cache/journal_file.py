"""Append-only files of checked lines: journals of tunings under way, and configs in quarantine.

One line per event: its CRC-32, and JSON. Knows lines and files; nothing of what follows from them. Lines are synced where that is asked
for: the system's page cache survives a process that is killed, and a machine that loses its power measures again. A failure of the disk
costs a warning and the journal, never the tuning.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from dist_tune.cache.digests import sealed_line, text_of
from dist_tune.json_bytes import json_bytes
from dist_tune.output import first_mistake
from dist_tune.safe_files import PRIVATE, Rights, make_folder, opener
from dist_tune.warn_once import warn_once

JOURNALS = "journals"
"""Subfolder for the journals of tunings under way."""
QUARANTINE = "quarantine"
"""Subfolder for configs that ended their process: a file for each cache key."""
LINES_SUFFIX = ".jsonl"
MAX_BYTES = 16 * 2**20
"""Of a file; no line is written beyond, and a larger file is not read."""
_STALE_S = 14 * 86400.0
"""Age from which a journal counts as given up."""
_OF_ONE = ("begun", "ran", "measured", "dropped", "quarantined")
_STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)
_Index = Annotated[int, Field(ge=0)]
_Milliseconds = Annotated[float, Field(gt=0)]
_Model = TypeVar("_Model", bound=BaseModel)
_open: set[str] = set()
_guard = threading.Lock()


class JournalFile(Generic[_Model]):
    """A file of lines, held by this process until it is closed or the process ends. Children that it forks do not hold it.

    ``model``: of a line; lines that do not fit it, or that ``validate`` raises a ``ValueError`` for, are passed over with a warning.
    """

    def __init__(
        self, path: Path, model: type[_Model], rights: Rights = PRIVATE, *, validate: Callable[[_Model], object] | None = None
    ) -> None:
        self.lines: list[_Model] = []
        """What the file held when it was opened."""
        self.path = path
        self._model, self._validate = model, validate
        self._rights = rights
        self._descriptor: int | None = None
        self._n_bytes = 0
        with _guard:
            if _real(path) in _open:  # another thread tunes the same; the lock below keeps out other processes only
                return
            try:
                self._open()
                _open.add(_real(path))
            except OSError as error:
                self._fail(error)

    @property
    def is_open(self) -> bool:
        """True if the file is this process's, and can be written."""
        return self._descriptor is not None

    def begin_anew(self) -> None:
        """Forget what the file held."""
        self.lines = []
        if self._descriptor is not None:
            with suppress(OSError):
                os.ftruncate(self._descriptor, 0)
                self._n_bytes = 0

    def append(self, line: dict[str, Any], *, is_synced: bool = False) -> None:
        """Add a line; one of the model as JSON has it. ``is_synced``: also for a machine that loses its power."""
        if self._descriptor is None:
            return
        content = sealed_line(json_bytes(line))
        try:
            if self._n_bytes + len(content) > MAX_BYTES:
                raise OSError(f"larger than {MAX_BYTES} bytes")  # one way out
            if os.write(self._descriptor, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._n_bytes += len(content)
            if is_synced:
                os.fsync(self._descriptor)
        except OSError as error:
            self._fail(error)

    def close(self, *, delete: bool = False) -> None:
        """Leave the file to other processes, or delete it."""
        if self._descriptor is None:
            return
        with suppress(OSError):
            if delete:
                self.path.unlink(missing_ok=True)
        with suppress(OSError):
            os.close(self._descriptor)
        self._descriptor = None
        with _guard:
            _open.discard(_real(self.path))

    def _open(self) -> None:
        folder = self.path.parent
        make_folder(folder, self._rights)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = opener(self._rights, follows_links=False)(str(self.path), flags)
        try:
            status = os.fstat(descriptor)
            # A record lock and no flock: a forked loader or compiler process that outlives this one does not keep it.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            content = b"" if status.st_size > MAX_BYTES else os.pread(descriptor, MAX_BYTES, 0)
            if wrong := [f"the file is larger than {MAX_BYTES} bytes"] if status.st_size > MAX_BYTES else self._read(content):
                what = f"journal {self.path}: damaged lines are passed over ({wrong[0]}"
                warn_once(f"{what}{', and others' * (len(wrong) > 1)}), and what they told of is measured again")
            if not self.lines:
                os.ftruncate(descriptor, 0)
                content = b""
            if cut_off := content.rpartition(b"\n")[2]:  # the process died in the middle of it
                if text_of(cut_off) is None:
                    content = content.removesuffix(cut_off)
                    os.ftruncate(descriptor, len(content))
                else:
                    os.write(descriptor, b"\n")
        except BaseException:  # an interrupt, too, must not leave the file open and locked
            os.close(descriptor)
            raise
        self._descriptor, self._n_bytes = descriptor, len(content)

    def _read(self, content: bytes) -> list[str]:
        """Fill ``lines``; what is wrong with the others. A last line that the end of its process has cut off is not one of them."""
        wrong = []
        *lines, cut_off = content.split(b"\n")
        for number, line in enumerate([*lines, *([cut_off] if text_of(cut_off) else [])], 1):
            try:
                if line:
                    each = _line(line, self._model)
                    if self._validate is not None:
                        self._validate(each)
                    self.lines.append(each)
            except ValueError as error:
                wrong.append(f"line {number}: {first_mistake(error)}")
        return wrong

    def _fail(self, error: OSError) -> None:
        self.close()
        is_held = error.errno in (errno.EACCES, errno.EAGAIN) and self.path.exists() and os.access(self.path, os.W_OK)
        reason = "another process is tuning the same" if is_held else f"it cannot be written: {error.strerror or error}"
        warn_once(f"tuning goes on without its journal {self.path}: {reason}", f"journal {reason}")


def is_held(path: Path) -> bool:
    """True of a journal that this process holds: its lock would be released by reading it, at the end of that."""
    with _guard:
        return _real(path) in _open


def _line(content: bytes, model: type[_Model]) -> _Model:
    """Raises ``ValueError`` for what is none."""
    if (text := text_of(content)) is None:
        raise ValueError("its checksum is another one")
    try:
        return model.model_validate_json(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _real(path: Path) -> str:
    """One name of a file in a folder that has several; a link in its own place is refused when it is opened."""
    return os.path.join(os.path.realpath(path.parent), path.name)
