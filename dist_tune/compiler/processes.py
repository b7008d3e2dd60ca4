"""Processes that run Triton's compiler passes for the threads of a tuning, one kernel at a time,
and the folder of their files.

In threads of one process these passes share Python's lock, the allocator's locks and the replay's
host time: of 16 threads six waited for one another (logs/third-party-2xH200). A process costs 0.2 s
to start, beside the front end; what it does not survive costs one candidate, and what it prints
never reaches the user's terminal. ``multiprocessing`` and ``concurrent.futures`` would import the
user's ``__main__`` again.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import triton
from triton import knobs

from dist_tune.compiler import worker
from dist_tune.compiler.patches import SharedContext
from dist_tune.files import to_terminal

START_S = 10.0
"""Longest time that a process takes to start."""
_PREFIX = "dist_tune_compiles-"
_made: list[str] = []
"""The folder, while there is one."""


# -- the folder ------------------------------------------------------------------------------------


def temporary_folder() -> str | None:
    """Its path while a tuning of this process compiles; None if none could be made."""
    return next(iter(_made), None)


def _sweep() -> None:
    """Delete what killed processes of this user have left."""
    root = tempfile.gettempdir()
    for name in os.listdir(root):
        if name.startswith(_PREFIX):
            # Not while its process lives, or another one sweeps.
            with suppress(OSError), _held(os.path.join(root, name)):
                shutil.rmtree(os.path.join(root, name), ignore_errors=True)


@contextmanager
def _held(folder: str) -> Iterator[None]:
    """Hold a folder of this user; ``OSError`` if another process does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise PermissionError(folder)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _folder() -> Iterator[None]:
    with ExitStack() as stack:
        with suppress(OSError):  # compilers that need one say so
            _sweep()
            new = tempfile.mkdtemp(prefix=f".{_PREFIX}")
            folder = new.replace(f".{_PREFIX}", _PREFIX)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.enter_context(_held(new))
            os.rename(new, folder)  # now that it is held: another process may sweep at any moment
            _made.append(folder)
            stack.callback(_made.clear)
        yield


folder_in_use = SharedContext(_folder)
"""Entered by each tuning that compiles; the last one to leave deletes the folder."""


# -- one process -----------------------------------------------------------------------------------


class CompilerCrashError(RuntimeError):
    """The process that compiled a kernel has ended: a crash of the compiler."""


class IdleError(RuntimeError):
    """The process had ended for want of work when the request came."""


class CannotStartError(RuntimeError):
    """No such process can be started here; this one compiles."""


class Worker:
    """One process, used by one thread at a time."""

    can_start = True
    """False once one could not be started."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self._is_greeted, self._pid, folder = False, os.getpid(), temporary_folder()
        # All of it, in order, so that the process imports what this one would. An empty entry is
        # the current folder.
        paths = json.dumps([path or os.getcwd() for path in sys.path if isinstance(path, str)])
        self._output = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # as long as the process
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            # -I: what the worker itself imports is not to be found in a folder of the user's
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-u", worker.__file__, str(theirs.fileno()), paths],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[theirs.fileno()],
                env={**self.environment, "TMPDIR": folder or tempfile.gettempdir()},
                # With its ptxas: ended together, and by no signal that is meant for the rank
                process_group=0,
            )

    @property
    def is_alive(self) -> bool:
        """True if the process has not ended."""
        return self._process.poll() is None

    def ask(self, request: tuple[Any, ...], on_wait: Callable[[], None]) -> worker.Made:
        """The kernel of one request (``worker.compile_kernel``).

        ``on_wait``: called when it waits for another process.

        Raises:
            CannotStartError: it has another Triton, or none.
            CompilerCrashError: it has no reply to give any more.
            IdleError: another one may take the request.
            MemoryError: it was killed.
            Exception: of the compiler, as in this process, with what the compiler has written as a
                note.
        """
        try:
            if not self._is_greeted:
                self._greet()
            self._connection.send(request)
            while (reply := self._connection.recv()) is None:
                on_wait()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):  # its own way to end, if it has one
                self._process.wait(timeout=1.0)
            self.end()
            Worker.can_start &= self._is_greeted
            code = self._process.returncode
            kinds = {-signal.SIGKILL: MemoryError, os.EX_TEMPFAIL: IdleError}
            kind = kinds.get(code, CompilerCrashError) if self._is_greeted else CannotStartError
            reply = kind(
                f"the compiler's process ended with exit code {code} (negative: by that signal)"
            )
        text = self._written()
        if isinstance(reply, Exception):
            reply.add_note(text)
            try:
                raise reply
            finally:
                del reply  # it holds this frame, and so the descriptors
        if text:  # remarks and dumps, which the user has asked for
            to_terminal(text)
        return reply  # type: ignore[no-any-return]  # it was pickled

    def end(self) -> None:
        """End the process, in the middle of a compilation if need be.

        For any thread; not for a fork of the process that has started it.
        """
        if self._pid == os.getpid():
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the process and its ptxas; a process that has ended is none."""
        if self._pid == os.getpid() and self.is_alive:
            with suppress(OSError):
                os.killpg(self._process.pid, number)

    def _written(self) -> str:
        """What the process, which is idle or has ended, has written since the last time.

        Both share the place in the file.
        """
        self._output.seek(0)
        text = self._output.read().decode(errors="replace")
        self._output.seek(0)
        self._output.truncate()
        return text

    def _greet(self) -> None:
        found = self._connection.recv() if self._connection.poll(START_S) else "nowhere"
        if found != triton.__file__:
            Worker.can_start = False
            self.end()
            raise CannotStartError(
                f"the compiler's process finds Triton at {found}, and this one has it from"
                f" {triton.__file__}"
            )
        self._is_greeted = True


def is_possible() -> bool:
    """True if the compiler is Triton's own from end to end: another process would not have a user's
    patch, hook or setting.
    """
    try:
        from triton.backends.nvidia.compiler import CUDABackend

        is_cuda = triton.runtime.driver.active.get_current_target().backend == "cuda"
    except (ImportError, RuntimeError):  # a Triton without that backend; a machine without a driver
        return False
    # What ``triton.knobs`` is set to is written to the environment, if it can be.
    values = [
        value
        for settings in (knobs.compilation, knobs.nvidia, knobs.language)
        for value in vars(settings).values()
    ]
    is_known = getattr(knobs, "propagate_env", True) and all(
        value is None or knobs.toenv(value) is not None for value in values
    )
    hooks = ("dump_ir", "listener", "dump_ir_extract_di_local_variables", "instrumentation_mode")
    is_hooked = getattr(CUDABackend, "instrumentation", None) or any(
        getattr(knobs.compilation, name, None) for name in hooks
    )
    own = [
        Path(sys.modules[each].__file__ or "").parent
        for each in ("dist_tune", CUDABackend.__module__)
    ]
    names = ["add_stages", *(f"make_{stage}" for stage in worker.STAGES)]
    # None of a callable object that a user has put there.
    passes = [getattr(getattr(CUDABackend, name), "__code__", None) for name in names]
    are_own = all(
        code is not None and any(Path(code.co_filename).is_relative_to(each) for each in own)
        for code in passes
    )
    return (
        is_cuda
        and is_known
        and are_own
        and not is_hooked
        and Worker.can_start
        and bool(sys.executable)
    )
