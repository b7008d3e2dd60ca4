"""Files that are whole or absent, for their owner alone, and files of unknown origin that are read without trust.

Knows the file system; nothing of what files hold.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dist_tune.warn_once import warn_once

MAX_BYTES = 64 * 2**20
"""Of any file that is read; larger ones are refused."""
_TEMPORARY_SUFFIX = ".tmp"
_STALE_S = 3600.0
"""Age from which a temporary file counts as left behind by a process that was killed."""


class Rights(NamedTuple):
    """Permissions of new files and folders; the umask does not change them."""

    file: int
    folder: int


PRIVATE = Rights(0o600, 0o700)
SHARED = Rights(0o660, 0o770)
"""With the group, as DIST_TUNE_CACHE_SHARED=1 asks."""


class RefusedFileError(OSError):
    """A file that is not read or written: a FIFO, a device, a folder, or too large a file. ``strerror`` says which."""


def opener(rights: Rights = PRIVATE, *, follows_links: bool = True) -> Callable[[str, int], int]:
    """An opener for ``open``: of regular files alone, without waiting; a new file gets ``rights``.

    Raises (the opener):
        RefusedFileError: it is a FIFO or a device.
        OSError: it cannot be opened, as a folder; with errno ELOOP if it is a link and ``follows_links`` is false.
    """

    def open_regular(path: str, flags: int) -> int:
        # Without waiting, because opening a FIFO would wait for its other end.
        flags |= os.O_NONBLOCK | os.O_NOCTTY | (0 if follows_links else os.O_NOFOLLOW)
        descriptor = -1
        if flags & os.O_CREAT:
            with suppress(FileExistsError):
                descriptor = os.open(path, flags | os.O_EXCL, rights.file)
                set_rights(descriptor, rights.file)
        if descriptor < 0:
            # A dangling link that may be followed is the one thing that is there for O_EXCL and absent for an ordinary open.
            descriptor = os.open(path, flags, rights.file)
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            os.close(descriptor)
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            raise RefusedFileError(errno.EINVAL, "not a regular file", path)
        return descriptor

    return open_regular


def read_regular(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES, *, follows_links: bool = True) -> bytes:
    """Content of a regular file.

    Raises:
        RefusedFileError: it is no regular file, or larger than ``max_bytes``.
        OSError: the system refuses to open or to read it.
    """
    with open(path, "rb", opener=opener(follows_links=follows_links)) as file:
        n_bytes = os.fstat(file.fileno()).st_size
        content = file.read(n_bytes + 1) if n_bytes <= max_bytes else b""
        if len(content) > n_bytes:  # it has grown, or has no size, as in /proc
            content += file.read(max_bytes + 1 - len(content))
    if n_bytes > max_bytes or len(content) > max_bytes:
        raise RefusedFileError(errno.EFBIG, f"larger than {max_bytes} bytes", os.fspath(path))
    return content


def write_whole(path: Path, content: bytes, rights: Rights | None = None) -> None:
    """Write a file by renaming a temporary one, so that no reader and no crash sees a part of it. Its folder must exist.

    Without ``rights`` its permissions follow the umask, as of files that are shipped.

    Raises:
        OSError: it could not be written; a file that was there is untouched, and nothing is left behind.
    """
    temporary = path.with_name(f"{path.stem[:100]}.{uuid.uuid4().hex}{_TEMPORARY_SUFFIX}")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o666 if rights is None else rights.file)) as file:
            if rights is not None:
                set_rights(file.fileno(), rights.file)
            file.write(content)
            file.flush()
            # Before the rename: after a power cut some file systems have the new name on an empty file.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()


def sweep(folder: Path, now: float) -> None:
    """Delete temporary files that killed processes left an hour ago. ``now`` in seconds, by the clock that dates these files."""
    for temporary in folder.glob(f"*{_TEMPORARY_SUFFIX}"):
        with suppress(OSError):
            if temporary.stat().st_mtime < now - _STALE_S:
                temporary.unlink()


def make_folder(folder: Path, rights: Rights = PRIVATE) -> None:
    """Make a folder and those above it, as far as they are missing. A set-group-ID bit that a new folder inherits stays.

    Raises:
        OSError: it cannot be made, or a file is in its place.
    """
    try:
        _make_one(folder, rights)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_folder(folder.parent, rights)
        with suppress(FileExistsError):  # another process was faster
            _make_one(folder, rights)
    except OSError:  # not FileExistsError alone: a read-only file system may say otherwise of a folder that is there
        if not folder.is_dir():
            raise


def _make_one(folder: Path, rights: Rights) -> None:
    os.mkdir(folder, rights.folder)
    set_rights(folder, rights.folder | os.stat(folder).st_mode & stat.S_ISGID)


def set_rights(file: int | Path, mode: int) -> None:
    """Give a new file or folder its permissions, from which the umask has taken some."""
    with suppress(OSError):  # a file system without permissions
        os.chmod(file, mode)


def warn_of_folder(folder: Path, variable: str, *, is_shared: bool = False) -> None:
    """Warn once of a folder that other users can write, or that belongs to another user; with ``is_shared`` its group may.

    ``variable``: environment variable that names another folder.
    """
    try:
        status = os.stat(folder)
    except (OSError, ValueError):  # absent or unreachable: the code that opens a file there says so
        return
    owner, others = status.st_uid, status.st_mode & (stat.S_IWOTH if is_shared else stat.S_IWOTH | stat.S_IWGRP)
    mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
    if others:
        risk, remedy = f"can be written by other users ({mode})", f"Run chmod {'o' if is_shared else 'go'}-w on it"
    elif owner != os.geteuid() and not is_shared:
        risk, remedy = f"belongs to another user (uid {owner}, this process is uid {os.geteuid()})", "Use a folder of your own"
    else:
        return
    warn_once(
        f"dist_tune: the folder {folder} {risk}, who may change what this program reads there. {remedy}, or name another one by {variable}",
        topic=f"others write {folder}",
    )
