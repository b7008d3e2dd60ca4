"""Processes that run Triton's compiler passes for the threads of a tuning, one kernel at a time.

In threads of one process these passes share Python's lock, the allocator's locks and the replay's host time: of 16 threads six waited
for one another (logs/third-party-2xH200). A process costs 0.2 s to start, and what it does not survive costs one candidate.
``multiprocessing`` and ``concurrent.futures`` would import the user's ``__main__`` again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import triton
from triton import knobs

from dist_tune.compiler import worker
from dist_tune.compiler.output import temporary_folder

START_S = 10.0
"""Longest time that a process takes to start."""


class CompilerCrashError(RuntimeError):
    """The process that compiled a kernel has ended: a crash of the compiler, or no memory left."""


class CannotStartError(RuntimeError):
    """No such process can be started here; this one compiles."""


class Worker:
    """One process, used by one thread at a time."""

    can_start = True
    """False once one could not be started."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self._is_greeted = False
        # All of it, in order, so that the process imports what this one would. An empty entry is the current folder.
        paths = json.dumps([path or os.getcwd() for path in sys.path if isinstance(path, str)])
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(  # -I: what the worker itself imports is not to be found in a folder of the user's
                [sys.executable, "-I", "-u", worker.__file__, str(theirs.fileno()), paths],
                stdin=subprocess.DEVNULL, stdout=2, stderr=2,  # where this one's compilers write
                pass_fds=[theirs.fileno()],
                env={**self.environment, "TMPDIR": temporary_folder() or tempfile.gettempdir()},
                process_group=0,  # with its ptxas: ended together, and by no signal that is meant for the rank
            )  # fmt: skip

    @property
    def is_alive(self) -> bool:
        """True if the process has not ended."""
        return self._process.poll() is None

    def ask(self, request: tuple[Any, ...], on_wait: Callable[[], None]) -> worker.Made:
        """The kernel of one request (``worker.compile_kernel``).

        Raises:
            CannotStartError: it has another Triton, or none.
            CompilerCrashError: it has no reply to give any more.
            Exception: of the compiler, as in this process.
        """
        try:
            if not self._is_greeted:
                self._greet()
            self._connection.send(request)
            while (reply := self._connection.recv()) is None:
                on_wait()
        except (EOFError, OSError) as error:
            with suppress(subprocess.TimeoutExpired):  # its own way to end, if it has one
                self._process.wait(timeout=1.0)
            self.end()
            code = self._process.returncode
            kind = CompilerCrashError if self._is_greeted else CannotStartError
            Worker.can_start &= self._is_greeted
            raise kind(f"the compiler's process ended with exit code {code} (negative: by that signal)") from error
        if isinstance(reply, Exception):
            raise reply
        return reply  # type: ignore[no-any-return]  # it was pickled

    def end(self) -> None:
        """End the process, in the middle of a compilation if need be. For any thread."""
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _greet(self) -> None:
        found = self._connection.recv() if self._connection.poll(START_S) else "nowhere"
        if found != triton.__file__:
            Worker.can_start = False
            self.end()
            raise CannotStartError(f"the compiler's process finds Triton at {found}, and this one has it from {triton.__file__}")
        self._is_greeted = True


def is_possible() -> bool:
    """True if the compiler is Triton's own from end to end: another process would not have a user's patch, hook or setting."""
    try:
        from triton.backends.nvidia.compiler import CUDABackend

        is_cuda = triton.runtime.driver.active.get_current_target().backend == "cuda"
    except (ImportError, RuntimeError):  # a Triton without that backend; a machine without a driver
        return False
    # What ``triton.knobs`` is set to is written to the environment, if it can be.
    values = [value for settings in (knobs.compilation, knobs.nvidia, knobs.language) for value in vars(settings).values()]
    is_known = getattr(knobs, "propagate_env", True) and all(value is None or knobs.toenv(value) is not None for value in values)
    hooks = ("dump_ir", "listener", "dump_ir_extract_di_local_variables", "instrumentation_mode")
    is_hooked = getattr(CUDABackend, "instrumentation", None) or any(getattr(knobs.compilation, name, None) for name in hooks)
    own = [Path(sys.modules[each].__file__ or "").parent for each in ("dist_tune", CUDABackend.__module__)]
    names = ["add_stages", *(f"make_{stage}" for stage in worker.STAGES)]
    passes = [
        getattr(getattr(CUDABackend, name), "__code__", None) for name in names
    ]  # None of a callable object that a user has put there
    are_own = all(code is not None and any(Path(code.co_filename).is_relative_to(each) for each in own) for code in passes)
    return is_cuda and is_known and are_own and not is_hooked and Worker.can_start and bool(sys.executable)
