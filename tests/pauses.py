"""Pauses of ranks and programs at random, for `make test-pauses`: what they agree on must not
depend on who is late.

The fork server of tests imports this. With ``PAUSES`` set, each process that it forks is stopped
and goes on again and again; both last exponentially distributed times of ``PAUSES`` seconds in the
mean, a pause 0.4 s at most, far below all deadlines.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

_PAUSING = """
import os, random, signal, sys, time
pid, mean_s = int(sys.argv[1]), float(sys.argv[2])
try:
    while True:
        time.sleep(random.expovariate(1 / mean_s))
        os.kill(pid, signal.SIGSTOP)
        time.sleep(min(0.4, random.expovariate(1 / mean_s)))
        os.kill(pid, signal.SIGCONT)
except ProcessLookupError:
    pass
"""


def _pause(mean_s: str) -> None:
    # Not a thread: it would stop with its process.
    subprocess.Popen(
        [sys.executable, "-S", "-c", _PAUSING, f"{os.getpid()}", mean_s], stdout=subprocess.DEVNULL
    )


if mean := os.environ.get("PAUSES"):
    os.register_at_fork(after_in_child=partial(_pause, mean))
