"""Files in the cache folder of which a restart makes use: the journal of a tuning under way, and
configs in quarantine.

A journal has a JSON object on each line: what ranks had agreed on, what failed, and what runs.
Sites go by the digest of their cache key, so that another name is no other site. Knows files and
lines; nothing of what follows from them. Lines are not synced: the system's page cache survives a
process that is killed, and a machine that loses its power measures again.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from threading import RLock
from typing import IO, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from dist_tune.files import (
    PRIVATE,
    Rights,
    json_bytes,
    make_folder,
    opener,
    read_regular,
    warn_once,
)

JOURNALS = "journals"
"""Subfolder for the journals of tunings under way."""
QUARANTINE = "quarantine"
"""Subfolder for configs that ended their process: a file for each cache key."""
LINES_SUFFIX = ".jsonl"
MAX_BYTES = 16 * 2**20
"""Of a file that is read."""
_STALE_S = 14 * 86400.0
"""Age from which a journal counts as given up."""
_STACKS = b"Stack (most recent call first)"
"""Beginning of what faulthandler writes when SIGTERM ends the process from outside."""


_NO_JOURNAL = "tuning goes on without its journal"
_VERSION: Literal[2] = 2
SiteKey = str
"""Digest of the cache key of a site."""


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    v: Literal[2]


class Attempt(_Line):
    """A process begins here."""

    kind: Literal["attempt"]


class Dropped(_Line):
    """A candidate cannot run, or may not win."""

    kind: Literal["dropped"]
    site: SiteKey
    candidate: int
    failure: str
    """A ``FailureKind``."""
    reason: str


class Agreed(_Line):
    """Times that all ranks have agreed on after a batch of replays: totals so far."""

    kind: Literal["agreed"]
    site: SiteKey
    times: dict[int, tuple[tuple[Annotated[float, Field(gt=0)], float, float], int]]
    """Candidate to ``[[kernel, step, spread of the kernel], replays]``, in milliseconds on the
    slowest rank; the spread is the median absolute deviation.
    """


class UnderWay(_Line):
    """From here on these candidates run, and no others: if the process ends by itself, one of them
    is the cause.
    """

    kind: Literal["under way"]
    candidates: list[tuple[SiteKey, int]]


class Died(_Line):
    """Processes have ended, on some rank, while candidates of a site were under way."""

    kind: Literal["died"]
    site: SiteKey
    deaths: dict[int, int]
    """Candidate to deaths in all attempts, on the rank with the most; 0 once it is in quarantine.
    """


AnyLine = Annotated[Attempt | Dropped | Agreed | UnderWay | Died, Field(discriminator="kind")]
_LINE: TypeAdapter[AnyLine] = TypeAdapter(AnyLine)


class Journal:
    """A file that this process holds until it is closed, or the process ends.

    A failure costs a warning and the journal.

    While it is held, the stack of the main thread is written to it when SIGTERM comes, by which
    launchers and schedulers end a process from outside: what was under way is not the cause then.
    That is faulthandler's, because a handler in Python waits for the end of C code.
    """

    def __init__(self, path: Path, rights: Rights = PRIVATE) -> None:
        self.path, self._rights = path, rights
        self.lines: list[AnyLine] = []
        """What it held when it was opened, up to the first damaged line.

        After stacks nothing is under way.
        """
        self.is_taken = False
        """Another process holds it, and is tuning the same."""
        self._file: IO[bytes] | None = None
        self._lock = RLock()
        """Lines come from any thread."""
        try:
            self._file = self._opened()
        except BlockingIOError:
            self.is_taken = True  # of which the tuning tells, if it goes on
        except (OSError, ValueError) as error:  # a full disk; a path with a null character
            folder = path.parent
            if os.path.isdir(folder) and os.access(folder, os.W_OK):
                _warn(_NO_JOURNAL, path, error)
            else:
                warn_not_kept(path, error)  # no record can be kept either

    @property
    def is_over(self) -> bool:
        """It takes no lines."""
        return self._file is None

    def add(self, kind: str, **fields: Any) -> None:
        """Add a line, which outlives this process.

        Not by its model, because validation would take longer than the rest of it.
        """
        line = json_bytes({"v": _VERSION, "kind": kind, **fields})
        if b"NaN" in line or b"Infinity" in line:  # within a text, or of a time that is no number
            try:
                _LINE.validate_json(line)
            except ValueError:
                return
        with self._lock:
            try:
                if self._file is not None:
                    _write(self._file, line + b"\n")
            except OSError as error:
                _warn(_NO_JOURNAL, self.path, error)
                self.close()

    def close(self, *, delete: bool = False) -> None:
        """Leave the file to other processes, or ``delete`` it; later lines go nowhere."""
        with self._lock:
            file, self._file = self._file, None
            if file is None:
                return
            # Else the program's new one would be lost.
            if signal.getsignal(signal.SIGTERM) is self._handler:
                faulthandler.unregister(signal.SIGTERM)
            with suppress(OSError):
                if delete:
                    self.path.unlink(missing_ok=True)
                file.close()

    def _opened(self) -> IO[bytes]:
        file = _open(self.path, self._rights)
        try:
            with suppress(OSError):
                for each in self.path.parent.glob(f"*{LINES_SUFFIX}"):
                    if each.lstat().st_mtime < time.time() - _STALE_S:
                        each.unlink()
            # A record lock and no flock: a forked loader or compiler process that outlives this one
            # does not keep it.
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                # And no others, as where a file system has no locks.
                raise BlockingIOError(error.errno, "another process is tuning the same") from error
            self._read(file)
        except BaseException:  # an interrupt, too, must not leave the file locked
            file.close()
            raise
        self._handler = signal.getsignal(signal.SIGTERM)
        # A system that refuses: a death from outside counts as one from inside.
        with suppress(OSError, RuntimeError):
            # Of one thread: those of others run meanwhile, and reading them has ended processes
            # with a signal of its own.
            faulthandler.register(signal.SIGTERM, file=file.fileno(), all_threads=False, chain=True)
        return file

    def _read(self, file: IO[bytes]) -> None:
        """Read up to the first damaged line, from which on the file is cut off."""
        n_read, is_in_stacks = 0, False
        file.seek(0)
        for line in file.read(MAX_BYTES).splitlines(keepends=True):
            is_in_stacks = line.startswith(_STACKS) or (is_in_stacks and not line.startswith(b"{"))
            try:
                if line.startswith(_STACKS):
                    self.lines.append(UnderWay(v=2, kind="under way", candidates=[]))
                elif line.strip() and not is_in_stacks:
                    self.lines.append(_LINE.validate_json(line))
            except (ValueError, RecursionError):
                told = (
                    "line is damaged or of another version: what was measured from there on is"
                    " measured again"
                )
                warn_once(
                    f"journal {self.path}: its {len(self.lines) + 1}. {told}",
                    f"journal {self.path}",
                )
                break
            n_read += len(line)
        file.truncate(n_read)


def _open(path: Path, rights: Rights) -> IO[bytes]:
    """A file that lines are added to, in a folder that is made."""
    make_folder(path.parent, rights)
    # A link is not followed: in a folder that others write it may lead to any file of this user's.
    file = open(path, "a+b", buffering=0, opener=opener(rights, follows_links=False))  # noqa: SIM115  # for its caller
    with suppress(OSError):  # an earlier process may have been killed in the midst of a line
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file


def _write(file: IO[bytes], lines: bytes) -> None:
    while lines:
        lines = lines[file.write(lines) :]


class QuarantinedConfig(BaseModel):
    """A config that was under way at two deaths of its process."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    kernel: str
    key: str
    config: str
    """Described, as in a record."""
    rank: Annotated[int, Field(ge=0)]
    """On which the process ended."""
    since: Annotated[float, Field(gt=0)]
    """Seconds since 1970."""


def warn_not_kept(path: Path, error: Exception) -> None:
    """Warn that a file in a subfolder of the cache folder cannot be written, once for that
    folder.
    """
    _warn("dist_tune: tunings are not kept and will be repeated", path, error, path.parent.parent)


def _warn(lost: str, path: Path, error: Exception, folder: Path | None = None) -> None:
    """Warn once of what is lost in a folder, by default that of the file."""
    reason = getattr(error, "strerror", None) or error
    text = f"{lost}: {path} cannot be written: {reason}. DIST_TUNE_CACHE_DIR names another folder"
    warn_once(text, topic=f"{lost} {folder or path.parent}")


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
        with _open(path, rights) as file:
            _write(file, config.model_dump_json().encode() + b"\n")
    except (OSError, ValueError) as error:
        _warn(f"the quarantine of {config.kernel} {config.config} is not kept", path, error)
