"""Files that are whole or absent, files of unknown origin that are read without trust, and warnings
of what does not end a job.

Knows the file system, Python's warnings and the terminal; nothing of what files hold.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import os
import stat
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import to_json

MAX_BYTES = 64 * 2**20
"""Of any file that is read; larger ones are refused."""
_TEMPORARIES = "*." + "[0-9a-f]" * 32 + ".tmp"
_STALE_S = 3600.0
"""Age from which a temporary file counts as left behind by a process that was killed."""
_PASSED_OVER = {
    "dist_tune",
    "triton",
    "torch",
    "concurrent",
    "contextlib",
    "functools",
    "threading",
}
"""Packages whose lines tell nothing to a reader of a warning."""


class Told:
    """What is told once: the topics of one holder, as a process, a decorated object or a log."""

    def __init__(self) -> None:
        self.topics: set[Any] = set()

    def is_new(self, topic: object) -> bool:
        """True the first time that it is asked of a topic."""
        is_new = topic not in self.topics
        self.topics.add(topic)
        return is_new


_told = Told()
"""Topics of the warnings of this process, as digests: a text may hold a path that is none."""
_held: dict[str, str] = {}
"""Topic -> text, of warnings of a rank that is not the first of its job, until it is known whether
another rank has told the same.
"""
_unlogged: list[str] = []
"""Texts that no log has yet."""
_MAX_TOPICS = 1000
"""Of those that peers hear of."""


class Rights(NamedTuple):
    """Permissions of new files and folders; the umask does not change them."""

    file: int
    folder: int


PRIVATE = Rights(0o600, 0o700)
SHARED = Rights(0o660, 0o770)
"""With the group, as DIST_TUNE_CACHE_SHARED=1 asks."""


class RefusedFileError(OSError):
    """A file that is not read or written: a FIFO, a device, a folder, or too large a file.

    ``strerror`` says which.
    """


def opener(rights: Rights = PRIVATE, *, follows_links: bool = True) -> Callable[[str, int], int]:
    """An opener for ``open``: of regular files alone, without waiting; a new file gets ``rights``.

    Raises (the opener, or ``open``):
        RefusedFileError: it is a FIFO or a device.
        OSError: it cannot be opened, as a folder; with errno ELOOP if it is a link and
        ``follows_links`` is false.
    """

    def open_regular(path: str, flags: int) -> int:
        # Without waiting, because opening a FIFO would wait for its other end.
        descriptor = os.open(
            path,
            flags | os.O_NONBLOCK | os.O_NOCTTY | (0 if follows_links else os.O_NOFOLLOW),
            rights.file,
        )
        status = os.fstat(descriptor)
        # Folders ``open`` refuses by itself.
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            os.close(descriptor)
            raise RefusedFileError(errno.EINVAL, "not a regular file", path)
        if flags & os.O_CREAT and status.st_size == 0:
            set_rights(descriptor, rights.file)
        return descriptor

    return open_regular


def read_regular(
    path: str | os.PathLike[str], max_bytes: int = MAX_BYTES, *, follows_links: bool = True
) -> bytes:
    """Content of a regular file.

    Raises:
        RefusedFileError: it is no regular file, or larger than ``max_bytes``.
        OSError: the system refuses to open or to read it.
    """
    with open(path, "rb", opener=opener(follows_links=follows_links)) as file:
        if os.fstat(file.fileno()).st_size <= max_bytes:
            # It may grow meanwhile, or have no size, as in /proc.
            content = file.read(max_bytes + 1)
            if len(content) <= max_bytes:
                return content
    raise RefusedFileError(errno.EFBIG, f"larger than {max_bytes} bytes", os.fspath(path))


def write_whole(
    path: Path, content: bytes, rights: Rights | None = None, *, keeps_old: bool = False
) -> Path | None:
    """Write a file by renaming a temporary one, so that no reader and no crash sees a part of it.

    Its folder must exist.

    Without ``rights`` its permissions follow the umask, as of files that are shipped.
    ``keeps_old``: what was in its place, unless that is a folder, stays under the name that is
    returned; None if nothing was there.

    Raises:
        OSError: it could not be written; a file that was there is untouched, and nothing is left
            behind.
    """
    temporary = path.with_name(f"{path.stem[:100]}.{uuid.uuid4().hex}.tmp")
    is_kept = keeps_old and os.path.lexists(path) and not path.is_dir()
    copy = path.with_name(f"{path.name[:100]}.{uuid.uuid4().hex[:8]}.bak") if is_kept else None
    try:
        with open(
            temporary,
            "xb",
            opener=lambda name, flags: os.open(
                name, flags, 0o666 if rights is None else rights.file
            ),
        ) as file:
            if rights is not None:
                set_rights(file.fileno(), rights.file)
            file.write(content)
            file.flush()
            # Before the rename: after a power cut some file systems have the new name on an empty
            # file.
            os.fsync(file.fileno())
        if copy is not None:
            try:
                os.link(path, copy, follow_symlinks=False)
            except OSError:  # a file system without links
                os.rename(path, copy)
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()
    for temporary in path.parent.glob(_TEMPORARIES):  # of processes that were killed
        with suppress(OSError):
            if temporary.stat().st_mtime < time.time() - _STALE_S:
                temporary.unlink()
    return copy


def make_folder(folder: Path, rights: Rights = PRIVATE) -> None:
    """Make a folder and those above it, as far as they are missing.

    A set-group-ID bit that a new folder inherits stays.

    Raises:
        OSError: it cannot be made, or a file is in its place.
    """
    missing = [*takewhile(lambda each: not os.path.isdir(each), (folder, *folder.parents))]
    for each in reversed(missing):
        try:
            os.mkdir(each, rights.folder)
            set_rights(each, rights.folder | os.stat(each).st_mode & stat.S_ISGID)
        except FileExistsError:
            if not os.path.isdir(each):  # else another process was faster
                raise FileExistsError(
                    errno.EEXIST, "a file is in the folder's place", str(each)
                ) from None


def set_rights(file: int | Path, mode: int) -> None:
    """Give a new file or folder its permissions, from which the umask has taken some."""
    with suppress(OSError):  # a file system without permissions
        os.chmod(file, mode)


def json_bytes(values: Any) -> bytes:
    """Compact JSON in UTF-8, without a line end, five times as fast as ``json`` makes it.

    NaN and Infinity read as ``json`` writes them.
    """
    try:
        return to_json(values, fallback=str)
    except ValueError:  # a lone surrogate, as in a file name that is no text
        return json.dumps(values, ensure_ascii=False, separators=(",", ":"), default=str).encode(
            "utf-8", "replace"
        )


def warn_once(text: str, topic: str = "") -> None:
    """Warn, unless this process has warned of the topic (by default the text) before.

    Of a job the first rank warns at once, and the others in ``tell_held``. Each has the text in its
    log.
    """
    topic = hashlib.sha256((topic or text).encode(errors="replace")).hexdigest()[:16]
    if not _told.is_new(topic):
        return
    _unlogged.append(text)
    if rank_of_job() == 0:
        _warn(text)
    else:
        if not _held:
            atexit.register(tell_held)  # where ranks do not meet any more
        _held[topic] = text


def topics_told() -> list[str]:
    """Topics that this process has warned of, also if it holds the warning; for peers."""
    return sorted(_told.topics)[:_MAX_TOPICS]


def tell_held(tellers: Mapping[str, int] | None = None) -> None:
    """Give the warnings that this rank holds and no other tells.

    ``tellers``: topic -> the first rank that has it; None: all of them.
    """
    rank = rank_of_job()
    for topic in list(_held):
        teller = rank if tellers is None else tellers.get(topic)
        # Another thread may have been faster.
        text = _held.pop(topic, "") if teller is not None else ""
        if text and teller == rank:
            _warn(f"rank {rank}: {text}")


def texts_to_log() -> list[str]:
    """Warnings since the last time that this was asked."""
    texts = []
    with suppress(IndexError):  # another thread has been faster
        while _unlogged:
            texts.append(_unlogged.pop(0))
    return texts


def rank_of_job() -> int:
    """Rank of this process: by its process group, or before there is one by its launcher's
    variable.
    """
    group: Any = sys.modules.get("torch.distributed")
    if group is not None and group.is_available() and group.is_initialized():
        return int(group.get_rank())
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def _warn(text: str) -> None:
    try:
        warnings.warn(text, stacklevel=callers_level())
    except Warning:  # the program turns warnings into errors
        to_terminal(f"{text}\n")


def callers_level() -> int:
    """The ``stacklevel`` of a warning that the caller of this function gives: a line of the program
    says more than one of this package.
    """
    level, frame = 1, sys._getframe(1)
    while (
        frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_OVER
    ):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    return level if frame is not None else 2


def to_terminal(text: str) -> None:
    """Write to stderr, where there is one."""
    with suppress(OSError, ValueError, AttributeError):  # full or gone, closed, None
        sys.stderr.write(text)
