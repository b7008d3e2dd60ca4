"""Temporary files of tunings, named after their process, so that those of a process that was killed are found and deleted.

Knows names and /proc, and nothing of what the files hold.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_NAME = re.compile(r"dist_tune-(\d+)-.+-ns(\d+)")
_DAY_S = 86_400.0


def prefix(what: str) -> str:
    """The beginning of the name of a temporary file or folder of this process."""
    return f"dist_tune-{os.getpid()}-{what}-"


def suffix() -> str:
    """The end of such a name: numbers of processes hold in one namespace only, and several may share a temporary folder."""
    with suppress(OSError):
        return f"-ns{os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def sweep(*, is_own: bool = False) -> None:
    """Delete what killed processes of this user have left. A file with what a compiler wrote before it crashed stays for a day.

    ``is_own``: and what this process has made, because it ends now without the ends of its contexts.
    """
    mine = suffix()
    with suppress(OSError):
        folder = tempfile.gettempdir()
        # Names first: a pattern of pathlib's takes a full folder milliseconds.
        for path in [Path(folder, name) for name in os.listdir(folder) if name.startswith("dist_tune-")]:
            found = _NAME.fullmatch(path.name)
            if found is None or f"-ns{found[2]}" != mine or not (is_own if int(found[1]) == os.getpid() else _has_ended(found[1])):
                continue
            with suppress(OSError):  # another process sweeps, too
                status = path.lstat()
                if status.st_uid != os.getuid():
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                elif status.st_size == 0 or time.time() - status.st_mtime > _DAY_S:
                    path.unlink()


def _has_ended(pid: str) -> bool:
    """Also one whose parent has yet to take note of it, as a launcher has when a rank sweeps for the peer that was just killed."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] in b"ZX"  # a program's name may hold any bytes
    except OSError:
        return not Path(f"/proc/{pid}").exists()
