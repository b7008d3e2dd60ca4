"""Files that are whole or absent, also when other processes write, crash or run out of disk meanwhile.

Knows files and locks; nothing of their content.
"""

from __future__ import annotations

import os
import re
import socket
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from dist_tune.safe_files import PRIVATE, Rights, set_rights

LOCK_NAME = ".lock"
LOCK_TIMEOUT_S = 5.0
TEMPORARY_SUFFIX = ".tmp"
STALE_S = 3600.0
"""Age from which a temporary file counts as left behind by a process that was killed."""


@contextmanager
def locked(folder: Path, name: str = LOCK_NAME, rights: Rights = PRIVATE) -> Iterator[None]:
    """Hold a lock in a folder against other threads and processes; the system releases it if the process is killed.

    If it is refused (read-only, a file system without locks) or held for more than 5 s (by a stopped process), go on without it:
    it keeps two writers from overlooking each other's changes, and ``write_whole`` alone keeps files whole.
    """
    with ExitStack() as stack:
        with suppress(OSError, NotImplementedError):
            stack.enter_context(FileLock(folder / name, mode=rights.file).acquire(timeout=LOCK_TIMEOUT_S, poll_interval=0.005))
        yield


def write_whole(path: Path, content: bytes, rights: Rights | None = None) -> None:
    """Write a file by renaming a temporary one, so that no reader and no crash sees a part of it. Its folder must exist.

    Without ``rights`` its permissions follow the umask, as of files that are shipped.

    Raises:
        OSError: it could not be written; a file that was there is untouched, and nothing is left behind.
    """
    host = re.sub(r"[^A-Za-z0-9-]", "_", socket.gethostname())[:32]
    temporary = path.with_name(f"{path.stem[:100]}.{host}-{os.getpid()}-{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
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
    with suppress(OSError):  # not every file system can, and the file is in its place
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sweep(folder: Path, now: float) -> None:
    """Delete temporary files that killed processes left an hour ago. ``now`` in seconds, by the clock that dates these files."""
    for temporary in folder.glob(f"*{TEMPORARY_SUFFIX}"):
        with suppress(OSError):
            if temporary.stat().st_mtime < now - STALE_S:
                temporary.unlink()
