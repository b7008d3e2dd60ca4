"""Processes as others of the same host see them: whether one has ended, or is stopped.

Knows Linux's /proc, and nothing of ranks. A rank that answers no more may be dead, stopped or cut off: on its own host that can be seen.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

UNKNOWN, GONE, RUNS, STOPPED = "", "gone", "runs", "stopped"


def process_name() -> str:
    """This process among all of all hosts: boot, namespace of process numbers, number, and start; empty where that cannot be read."""
    return _name_of(os.getpid())  # a forked child has another


def state_of(name: str) -> str:
    """``GONE``, ``RUNS`` or ``STOPPED`` of a ``process_name``; ``UNKNOWN`` on another host or in another namespace."""
    here, pid, start = [*name.rsplit(" ", 2), "", ""][:3]
    if not here or here != _namespace() or not pid.isdecimal():
        return UNKNOWN
    try:
        fields = _fields(int(pid))
    except OSError:  # no descriptor is left to look
        return UNKNOWN
    if not fields or fields[19] != start or fields[0] in "ZX":
        return GONE
    return STOPPED if fields[0] in "Tt" else RUNS


def _fields(pid: int) -> list[str]:
    """Of /proc/PID/stat, from the state on; empty if there is no such process."""
    try:
        # The second field is a program's name in parentheses, which may hold any character.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].decode().split()
    except (FileNotFoundError, ProcessLookupError):
        return []


@cache
def _name_of(pid: int) -> str:
    try:
        here, fields = _namespace(), _fields(pid)
    except OSError:
        return ""
    return f"{here} {pid} {fields[19]}" if here and fields else ""


@cache
def _namespace() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


process_name()  # read at import: in a first beat it costs a call that finds all in the cache a tenth of a millisecond
