"""The processes in which ``worker`` runs: started, given out, and used again.

Knows processes, pipes and priorities; nothing of what is compiled.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import triton

from dist_tune.compiler.passes.patches import SharedContext
from dist_tune.compiler.subprocesses import worker
from dist_tune.compiler.subprocesses.leftovers import temporary_folder

START_S = 10.0
"""Longest time that a process takes to start."""
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
        self.is_ended = False
        """True once ``end`` was called."""
        environment = dict(self.environment)
        with suppress(OSError):  # none: it looks for one
            environment["TMPDIR"] = temporary_folder()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        # All of it, in order, so that the process imports what this one would. An empty entry is the current folder.
        paths = json.dumps([path or os.getcwd() for path in sys.path if isinstance(path, str)])
        self._process = subprocess.Popen(  # -I: what the worker itself imports is not to be found in a folder of the user's
            [sys.executable, "-I", worker.__file__, str(IDLE_S), str(self.niceness), paths],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._output, env=environment,
            process_group=0,  # with its ptxas: ended together, and by no signal that is meant for the rank
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
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            with suppress(subprocess.TimeoutExpired):  # its own way to end, if it has one
                self._process.wait(timeout=1.0)
            self.end()
            code = self._process.wait()
            raise WorkerDiedError(f"the compiler's process ended with exit code {code} (negative: by that signal)") from error

    def _greet(self) -> None:
        """Wait until it has started.

        Raises:
            CannotStartError: it has another Triton, or none.
        """
        if self._is_greeted:
            return
        assert self._process.stdout is not None
        found = None
        try:
            if select.select([self._process.stdout], [], [], START_S)[0]:
                found = worker.receive(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
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

    def last_words(self) -> str:
        """What the process has printed since its latest reply."""
        try:
            size = os.fstat(self._output.fileno()).st_size
            return os.pread(self._output.fileno(), worker.MAX_CHARS, max(0, size - worker.MAX_CHARS)).decode(errors="replace")
        except (OSError, ValueError):  # closed
            return ""

    def end(self) -> None:
        """End the process, in the middle of a compilation if need be."""
        self.is_ended = True
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]  # both are pipes
        self._process.wait()


class Workers:
    """The processes of this one that have no work now."""

    def __init__(self) -> None:
        self.can_start = True
        """False once a process could not be started."""
        self.forget()

    def forget(self) -> None:
        """Begin anew: the processes are those of the process that this one was forked from."""
        self._idle: list[Worker] = []
        self._is_kept = False
        self._lock = threading.Lock()
        self.in_use = SharedContext(self._keeping)
        """While entered, idle processes are kept; the last user to leave ends them."""

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
        """Take one back; it ends if no tuning goes on."""
        with self._lock:
            self._idle = [other for other in self._idle if other.is_alive]
            if is_kept := each.is_alive and self._is_kept:
                self._idle.append(each)
        if not is_kept:
            each.end()

    def start(self, n: int) -> None:
        """Start this many, so that they are there when they are needed, less those that are idle; the first of them without delay."""
        with suppress(OSError), self._lock:
            self._idle = [each for each in self._idle if each.is_alive and each.environment == os.environ]
            while len(self._idle) < n:
                self._idle.append(Worker(is_urgent=not self._idle))

    def end(self) -> None:
        """End the idle ones."""
        with self._lock:
            idle, self._idle = self._idle, []
        for each in idle:
            each.end()

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        self._is_kept = True
        try:
            yield
        finally:
            with self._lock:
                self._is_kept = False
            self.end()


workers = Workers()
atexit.register(workers.end)
os.register_at_fork(after_in_child=workers.forget)
