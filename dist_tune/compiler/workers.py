"""The processes in which ``worker`` runs: started, given out, and used again.

Knows processes, pipes and priorities; nothing of what is compiled.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

import triton

from dist_tune.compiler import worker

IDLE_S = 20.0
"""A process without work ends after this time."""
NICENESS = 10
"""Of processes that no launch waits for."""


class WorkerDiedError(RuntimeError):
    """The process that compiled a kernel has ended: a crash of the compiler, or no memory left."""


WorkerDiedError.__name__ = "CompilerCrashError"


class CannotStartError(RuntimeError):
    """No such process can be started here; this one compiles."""


class Worker:
    """One process, used by one thread at a time."""

    def __init__(self, *, is_urgent: bool) -> None:
        self.niceness = 0 if is_urgent else NICENESS
        self.environment = dict(os.environ)
        self.is_used = False
        # All of it, in order, so that the process imports what this one would. An empty entry is the current folder.
        paths = [path or os.getcwd() for path in sys.path]
        self._process = subprocess.Popen(  # this interpreter, and a file of ours
            [sys.executable, "-P", worker.__file__, str(IDLE_S), str(self.niceness)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=self.environment | {"PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
        self._is_greeted = False

    @property
    def is_alive(self) -> bool:
        """True if the process has not ended."""
        return self._process.poll() is None

    def ask(self, request: object) -> Any:
        """The reply to one request.

        Raises:
            WorkerDiedError: it has no reply to give any more.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._greet()
        try:
            worker.send(self._process.stdin, request)
            return worker.receive(self._process.stdout)
        except (EOFError, OSError) as error:
            self.end()
            raise WorkerDiedError(
                f"the compiler's process ended with exit code {self._process.wait()} (negative: by that signal)"
            ) from error

    def _greet(self) -> None:
        """Wait until it has started.

        Raises:
            CannotStartError: it has another Triton, or none.
        """
        if self._is_greeted:
            return
        assert self._process.stdout is not None
        try:
            found = worker.receive(self._process.stdout)
        except (EOFError, OSError) as error:
            self.end()
            raise CannotStartError(f"the compiler's process did not start: exit code {self._process.wait()}") from error
        if found != triton.__file__:
            self.end()
            raise CannotStartError(f"the compiler's process finds Triton at {found}, and this one has it from {triton.__file__}")
        self._is_greeted = True

    def become(self, *, is_urgent: bool) -> bool:
        """Change the priority; False where that is not allowed, as without privileges for a higher one."""
        wanted = 0 if is_urgent else NICENESS
        if wanted != self.niceness:
            try:
                os.setpriority(os.PRIO_PROCESS, self._process.pid, os.getpriority(os.PRIO_PROCESS, 0) + wanted)
            except OSError:
                return False
            self.niceness = wanted
        return True

    def end(self) -> None:
        """End the process, in the middle of a compilation if need be."""
        with suppress(OSError):
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]  # both are pipes
        self._process.wait()


class Workers:
    """The processes of this one that have no work now."""

    def __init__(self) -> None:
        self.can_start = True
        """False once a process could not be started."""
        self._idle: list[Worker] = []
        self._lock = threading.Lock()

    def take(self, *, is_urgent: bool) -> Worker:
        """An idle one, or a new one.

        Raises:
            OSError: no process can be started.
        """
        with self._lock:
            wanted = 0 if is_urgent else NICENESS
            for each in sorted(self._idle, key=lambda each: each.niceness != wanted):
                if each.is_alive and each.environment == os.environ and each.become(is_urgent=is_urgent):
                    self._idle.remove(each)
                    return each
        return Worker(is_urgent=is_urgent)

    def give(self, each: Worker) -> None:
        """Take one back."""
        with self._lock:
            self._idle = [other for other in self._idle if other.is_alive]
            if each.is_alive:
                self._idle.append(each)

    def start(self, n: int) -> None:
        """Start this many, so that they are there when they are needed, less those that are idle; the first of them without delay."""
        with suppress(OSError), self._lock:
            self._idle = [each for each in self._idle if each.is_alive and each.environment == os.environ]
            self._idle += [Worker(is_urgent=not self._idle and k == 0) for k in range(n - len(self._idle))]

    def end(self) -> None:
        """End the idle ones."""
        with self._lock:
            idle, self._idle = self._idle, []
        for each in idle:
            each.end()

    def forget(self) -> None:
        """Leave them to the process that this one was forked from."""
        self._lock = threading.Lock()
        self._idle = []


workers = Workers()
atexit.register(workers.end)
os.register_at_fork(after_in_child=workers.forget)
