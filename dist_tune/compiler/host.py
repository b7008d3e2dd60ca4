"""This machine: who shares compiled kernels on it, and how many threads a rank compiles with."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import triton


def host_of_cache() -> str:
    """This machine and Triton's cache folder on it: processes with equal answers share compiled kernels."""
    folder = Path(triton.knobs.cache.dir)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        status = folder.stat()
        return f"{socket.gethostname()} {status.st_dev}:{status.st_ino}"
    return f"{socket.gethostname()} process {os.getpid()}"


def n_compile_threads(n_ranks_of_host: int) -> int:
    """This process's part of the cores that it may run on. Ranks of the job that take no part in the tuning count as well."""
    n_ranks = max(n_ranks_of_host, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return max(1, len(os.sched_getaffinity(0)) // n_ranks)
