"""The temporary folder of a process that compiles: named after it, so that what a killed process leaves is found and deleted.

Knows names and /proc, and nothing of what the files hold.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dist_tune.compiler.patches import SharedContext

LAST_WORDS = "stderr"
"""A file in the folder with what compilers write to descriptor 2: of one that aborts its process, the last words."""
_NAME = re.compile(r"dist_tune-(\d+)-.+-ns(\d+)")
_DAY_S = 86_400.0
_made: list[str] = []
"""The folder, while there is one."""


def temporary_folder() -> str | None:
    """Its path while a tuning of this process compiles; None if none could be made."""
    return _made[0] if _made else None


def sweep(*, is_own: bool = False) -> None:
    """Delete what killed processes of this user have left. A folder with the last words of a compiler stays for a day.

    ``is_own``: and what this process has made, because it ends now without the ends of its contexts.
    """
    with suppress(OSError):
        root = tempfile.gettempdir()
        # Names first: a pattern of pathlib's takes a full folder milliseconds.
        for name in [each for each in os.listdir(root) if each.startswith("dist_tune-")]:
            found = _NAME.fullmatch(name)
            if found and f"-ns{found[2]}" == _suffix() and (is_own if int(found[1]) == os.getpid() else _has_ended(found[1])):
                with suppress(OSError):  # another process sweeps, too
                    path = Path(root, name)
                    if path.lstat().st_uid == os.getuid() and not _has_last_words(path):
                        shutil.rmtree(path, ignore_errors=True)


def _has_last_words(folder: Path) -> bool:
    with suppress(FileNotFoundError):
        status = (folder / LAST_WORDS).lstat()
        return status.st_size > 0 and time.time() - status.st_mtime < _DAY_S
    return False


def _suffix() -> str:
    """The end of a name: numbers of processes hold in one namespace only, and several may share a folder of temporary files."""
    with suppress(OSError):
        return f"-ns{os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def _has_ended(pid: str) -> bool:
    """Also one whose parent has yet to take note of it, as a launcher has when a rank sweeps for the peer that was just killed."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] in b"ZX"  # a program's name may hold any bytes
    except OSError:
        return not Path(f"/proc/{pid}").exists()


@contextmanager
def _folder() -> Iterator[None]:
    sweep()
    with suppress(OSError):  # compilers that need one say so
        _made.append(tempfile.mkdtemp(prefix=f"dist_tune-{os.getpid()}-", suffix=_suffix()))
    try:
        yield
    finally:
        while _made:
            shutil.rmtree(_made.pop(), ignore_errors=True)
        sweep()  # a rank of this host may have been killed meanwhile


in_use = SharedContext(_folder)
"""Entered by each tuning that compiles; the last one to leave deletes the folder."""
