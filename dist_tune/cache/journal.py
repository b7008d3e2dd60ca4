"""Files in the cache folder of which a restart makes use: the journal of a tuning under way, and configs in quarantine.

A journal holds lines of ``rank-<i>.jsonl``, written by the same writer. Knows files and lines; nothing of what follows from them. Lines
are not synced: the system's page cache survives a process that is killed, and a machine that loses its power measures again.
"""

from __future__ import annotations

import errno
import faulthandler
import fcntl
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Annotated

from pydantic import BaseModel, ConfigDict, Field

from dist_tune.output import LineFile
from dist_tune.safe_files import PRIVATE, Rights, make_folder, opener, read_regular
from dist_tune.warn_once import warn_once

JOURNALS = "journals"
"""Subfolder for the journals of tunings under way."""
QUARANTINE = "quarantine"
"""Subfolder for configs that ended their process: a file for each cache key."""
LINES_SUFFIX = ".jsonl"
MAX_BYTES = 16 * 2**20
"""Of a file that is read."""
_STALE_S = 14 * 86400.0
"""Age from which a journal counts as given up."""


class Journal(LineFile):
    """A file of lines that this process holds until it is closed, or the process ends. A failure costs a warning and the journal.

    While it is held, the stacks of all threads are written to it when SIGTERM comes, by which launchers and schedulers end a process from
    outside: what was under way is not the cause then. That is faulthandler's, because a handler in Python waits for the end of C code.
    """

    def __init__(self, path: Path, rights: Rights = PRIVATE) -> None:
        super().__init__(path)
        self.lines: list[bytes] = []
        """What it held when it was opened."""
        self._rights = rights
        self.write(b"")

    def close(self, *, delete: bool = False) -> None:
        """Leave the file to other processes, or ``delete`` it."""
        if self._file is not None:
            if signal.getsignal(signal.SIGTERM) is self._handler:  # else the program's new one would be lost
                faulthandler.unregister(signal.SIGTERM)
            with suppress(OSError):
                if delete:
                    self.path.unlink(missing_ok=True)
        super().close()

    def _open(self, rights: Rights = PRIVATE) -> IO[bytes]:
        file = super()._open(self._rights)
        try:
            _sweep(self.path.parent)
            # A record lock and no flock: a forked loader or compiler process that outlives this one does not keep it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.seek(0)
            content = file.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                warn_once(f"journal {self.path} is larger than {MAX_BYTES} bytes: it is begun anew")
                file.truncate(0)
                content = b""
        except BaseException:  # an interrupt, too, must not leave the file locked
            file.close()
            raise
        self.lines, self._handler = content.splitlines(), signal.getsignal(signal.SIGTERM)
        with suppress(OSError, RuntimeError):  # a system that refuses: a death from outside counts as one from inside
            faulthandler.register(signal.SIGTERM, file=file.fileno(), all_threads=True, chain=True)
        return file

    def _warn(self, error: OSError | ValueError) -> None:
        is_held = isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EAGAIN) and os.access(self.path, os.W_OK)
        reason = "another process is tuning the same" if is_held else f"it cannot be written: {getattr(error, 'strerror', None) or error}"
        warn_once(f"tuning goes on without its journal {self.path}: {reason}", f"journal {reason}")


def _sweep(folder: Path) -> None:
    """Delete journals that no process has gone on with for two weeks."""
    with suppress(OSError):
        for each in folder.glob(f"*{LINES_SUFFIX}"):
            if each.lstat().st_mtime < time.time() - _STALE_S:
                each.unlink()


class QuarantinedConfig(BaseModel):
    """A config that was under way at two deaths of its process, or alone at one."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    kernel: str
    key: str
    config: str
    """Described, as in a record."""
    rank: Annotated[int, Field(ge=0)]
    """On which the process ended."""
    since: Annotated[float, Field(gt=0)]
    """Seconds since 1970."""


def read_quarantine(path: Path) -> list[QuarantinedConfig]:
    """The configs in a file; none if there is no such file, and without lines that are damaged."""
    found = {}
    with suppress(OSError):
        for line in read_regular(path, MAX_BYTES, follows_links=False).splitlines():
            with suppress(ValueError, RecursionError):
                each = QuarantinedConfig.model_validate_json(line)
                found[each.config] = each
    return [*found.values()]


def quarantine(path: Path, config: QuarantinedConfig, rights: Rights = PRIVATE) -> None:
    """Add a config to a file; without effect but a warning if it cannot be written."""
    try:
        make_folder(path.parent, rights)
        with open(path, "ab", opener=opener(rights, follows_links=False)) as file:
            file.write(config.model_dump_json().encode() + b"\n")
    except (OSError, ValueError) as error:
        warn_once(f"the quarantine of {config.kernel} {config.config} is not kept: {path} cannot be written: {error}")
