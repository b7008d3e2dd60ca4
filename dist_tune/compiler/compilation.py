"""One kernel from source to Triton's disk cache, on any thread, and what compilations of one tuning
share.

While ``patched`` is entered, a thread that runs a ``Compilation`` compiles as follows: the front
end, which is Python and holds the interpreter's lock, is run by one thread at a time and once for
equal input; the stages after it are ``worker``'s, in another process. Other threads compile as
always, and so do kernels of other languages and backends, and those whose compiler a user has
changed.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, NamedTuple
from weakref import WeakSet

import triton
from triton.compiler.compiler import ASTSource
from triton.runtime.jit import JITFunction

from dist_tune.compiler.patches import replaced
from dist_tune.compiler.processes import CannotStartError, IdleError, Worker, temporary_folder
from dist_tune.compiler.triton_cache import claim
from dist_tune.compiler.worker import STAGES, Made, Observed, compile_kernel, timed
from dist_tune.errors import FailureKind, kind_of, parsed

FRONT_END = "front_end"
MAX_CHARS = 200_000
"""Kept of one compiler's output."""
_SWITCH_INTERVAL_S = 1e-3
"""Longest time that a thread keeps the interpreter's lock while others wait.

Python's own 5 ms add up in compilers.
"""
_PATIENCE_S = 10.0
"""Longest wait for the front end of another thread, which may be stuck."""
_HOLD_S = 0.1
"""Longest wait for the front end under way, before compilations are held."""
_MISSING = object()
_thread = threading.local()
"""``compilation`` that a thread runs."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a candidate cannot run on this rank."""

    reason: str
    """"ExceptionType: message" on one line."""
    output: str = ""
    """The compiler's own output while it failed: PTX, MLIR."""
    shared_bytes: int | None = None
    """Shared memory that it needs, if known."""
    kind: FailureKind = FailureKind.COMPILE


def reason_of(error: BaseException) -> str:
    """An exception on one line, for log and vote."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}"


def attempt(
    step: Callable[[], Any],
    kind: FailureKind = FailureKind.COMPILE,
    shared_bytes: int | None = None,
) -> Any:
    """The value of ``step``, or a ``Failure`` with the exception that it raised and the output of
    the compiler's process.
    """
    try:
        return step()
    except Exception as error:  # noqa: BLE001  # compilers, loaders and the user's hooks raise anything: it is this rank's vote
        # Raised further, it would end a compiling thread, and the ranks would wait for the result.
        if isinstance(error, triton.OutOfResources) and error.name == "shared memory":
            shared_bytes = error.required
        output = "".join(getattr(error, "__notes__", []))[:MAX_CHARS]
        return Failure(reason_of(error), output, shared_bytes, kind_of(error, kind))


class Toolchain:
    """What the compilations of one tuning share: TTIR that was made, processes, the shared memory
    of the device.
    """

    def __init__(self, on_wait: Callable[[], None] = lambda: None) -> None:
        self.on_wait = on_wait
        """Called on a thread that begins to wait for an equal kernel's stages."""
        self.shared_limit_bytes: int | None = None
        """A kernel that needs more is not assembled, which would take longer than all stages before
        (logs/compile-cpu).
        """
        self.uses_processes = False
        self._idle: list[Worker] = []
        self._has_ended = self._is_stopped = False
        self._started = WeakSet[Worker]()
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._lock = threading.Lock()
        """Guards the processes."""
        self._front_end = threading.Lock()
        self._ttir: dict[tuple[Any, ...], list[tuple[dict[str, Any], str]]] = {}
        """Source -> the options that were read, with their values, and the TTIR for them."""

    def take(self) -> Worker | None:
        """An idle process, or a new one, which starts meanwhile; None where none can be started."""
        with self._lock:
            while self._idle:
                each = self._idle.pop()
                # Triton reads its settings from there.
                if each.is_alive and each.environment == os.environ:
                    return each
                each.end()
            with suppress(OSError):
                if not Worker.can_start:
                    return None
                self._started.add(new := Worker())
                return new
        Worker.can_start = False
        return None

    def hold(self) -> None:
        """Stop all processes, and let no front end begin that no launch waits for."""
        self._goes_on.clear()
        if self._front_end.acquire(timeout=_HOLD_S):  # the one under way has ended
            self._front_end.release()
        with self._lock:
            if not self._goes_on.is_set():  # a launch may have asked meanwhile
                self._is_stopped = True
                self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let them go on."""
        with self._lock:
            self._goes_on.set()
            if self._is_stopped:
                self._is_stopped = False
                self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for each in self._started:
            each.send_signal(number)

    def give(self, each: Worker) -> None:
        """Take a process back; it ends if the tuning has."""
        with self._lock:
            self._idle.append(each)
        if self._has_ended:
            self.end()

    def end(self) -> None:
        """End the idle processes, and those that are given back later."""
        self._has_ended = True
        self.go_on()
        with self._lock:
            while self._idle:
                self._idle.pop().end()

    def ttir(
        self, source: tuple[Any, ...], options: Any, make: Callable[[Any], Any], *, is_urgent: bool
    ) -> str:
        """TTIR as text.

        ``make`` is called with options that observe what it reads, and not if TTIR was made for
        equal ones.

        ``is_urgent``: a launch waits for it, and it waits for no other thread.
        """
        if not is_urgent:
            self._goes_on.wait()
        is_mine = not is_urgent and self._front_end.acquire(timeout=_PATIENCE_S)
        try:
            for read, text in self._ttir.get(source, []):
                if all(getattr(options, name, _MISSING) == value for name, value in read.items()):
                    return text
            observed = Observed(options)
            text = str(make(observed))
            self._ttir.setdefault(source, []).append((observed.read, text))
            return text
        finally:
            if is_mine:
                self._front_end.release()


class Turn(NamedTuple):
    """The place of a compilation in a site's queue."""

    part: int
    """Whose part of the candidates it is in: 0 for this rank's."""
    cost: float
    """Estimated, negative: the longest first."""
    tiles: int


class Compilation:
    """One kernel, shared by all candidates with its key: queued, then running, then done."""

    def __init__(self, key: str, compile_: Callable[[], Any] | None, result: Any = None) -> None:
        self.key = key
        """Key in Triton's disk cache, in hex; empty if nothing is compiled."""
        self.label, self.candidate, self.turn = "", 0, Turn(0, 0.0, 0)
        """The first site and candidate that asked for it, with its turn there."""
        self.done = threading.Event()
        self.result = result
        """When done: Triton's compiled kernel, a ``Failure``, or None if nothing is compiled, as
        under the interpreter.
        """
        self.seconds: dict[str, float] = {}
        """Of each stage that was run."""
        self.started_at: float | None = None
        """Monotonic clock, in seconds; None while queued."""
        self.held_since: float | None = None
        """When another process, which compiles it now, was found to; by the same clock."""
        self.n_held = 0
        """Times that this was found."""
        self.is_given_up = False
        """Failed by ``give_up``; a thread may still be running it."""
        self.is_waiting = False
        """True while another process runs stages for both; its thread does not count as running."""
        self._worker: Worker | None = None
        self._made: Made | None = None
        self._tools: Toolchain
        self._is_urgent = self._takes_text = False
        self._compile = compile_
        self._lock = threading.Lock()
        if compile_ is None:
            self.done.set()

    @property
    def is_queued(self) -> bool:
        """Not started and not done."""
        return self.started_at is None and not self.done.is_set()

    def run(
        self,
        tools: Toolchain,
        note: Callable[[Any], None] = lambda result: None,
        *,
        is_urgent: bool = False,
    ) -> bool:
        """Compile, or find the result in Triton's disk cache; False if another thread, or process
        of this host, does. For any thread.

        ``note`` is called with the result before others see it. ``is_urgent``: a launch waits for
        it.
        """
        with claim(self.key) as claimed:
            with self._lock:
                if claimed is None or self._compile is None:
                    self.held_since = self.held_since or time.monotonic()
                    self.n_held += 1
                    return False
                compile_, self._compile = self._compile, None
                self.started_at, self._tools, self._is_urgent = time.monotonic(), tools, is_urgent
            result: Any = Failure("SystemExit: a hook of the compiler ended its thread")
            _thread.compilation = self
            try:
                result = attempt(lambda: self._compiled(compile_, claimed))
            finally:
                _thread.compilation = None
                worker, self._worker = self._worker, None
                if worker is not None:
                    tools.give(worker)
                note(result)
                self._finish(result)
        return True

    def give_up(self, reason: str) -> None:
        """Let it fail from another thread: it may never end."""
        self.is_given_up = self.is_given_up or not self.done.is_set()
        self._finish(Failure(reason))
        if (worker := self._worker) is not None:
            worker.end()

    def _finish(self, result: Any) -> None:
        with self._lock:
            if not self.done.is_set():
                self.result, self._compile = result, None
                self.done.set()

    def _compiled(self, compile_: Callable[[], Any], claimed: IO[bytes]) -> Any:
        """Triton's compiled kernel.

        What it needs too much of stands in ``claimed`` for other ranks and later processes.
        """
        text, limit_bytes = claimed.read(), self._tools.shared_limit_bytes
        if text.isdigit() and limit_bytes is not None and int(text) > limit_bytes:
            raise triton.OutOfResources(int(text), limit_bytes, "shared memory")
        try:
            return compile_()
        except triton.OutOfResources as error:
            if error.name == "shared memory":
                with suppress(OSError):  # a folder without room costs them some time
                    claimed.truncate(0)
                    claimed.write(f"{error.required}".encode())
                    claimed.flush()
            raise

    # -- inside Triton's compiler ------------------------------------------------------------------

    def add_stages(self, backend: Any, stages: dict[str, Any], options: Any, language: Any) -> None:
        """Put ours in the place of Triton's stages, unless the result of each may be changed on the
        way.
        """
        knobs = triton.knobs.compilation
        is_hooked = bool(
            triton.knobs.runtime.add_stages_inspection_hook or knobs.override or knobs.use_ir_loc
        )
        is_triton_s = (
            tuple(stages) == STAGES and language == triton.backends.compiler.Language.TRITON
        )
        self._takes_text = (
            self._tools.uses_processes
            and is_triton_s
            and not is_hooked
            and options.ir_override is None
        )
        for name, stage in list(stages.items()):
            own = functools.partial(timed, self.seconds, name, stage)
            stages[name] = (
                functools.partial(self._stage, name, backend.target, options)
                if self._takes_text
                else own
            )

    def make_ir(
        self, own: Callable[..., Any], source: Any, target: Any, options: Any, *rest: Any
    ) -> Any:
        """TTIR of the front end as text, which is all that our stages need."""
        if not self._takes_text:
            return timed(self.seconds, FRONT_END, own, source, target, options, *rest)
        self._worker = self._tools.take()  # it starts beside the front end
        # Triton's identity of a source, and what the backend's own functions are chosen by.
        identity = (source.hash(), str(target), options.arch)
        make = functools.partial(
            timed, self.seconds, FRONT_END, lambda observed: own(source, target, observed, *rest)
        )
        return self._tools.ttir(identity, options, make, is_urgent=self._is_urgent)

    def _stage(
        self, name: str, target: Any, options: Any, source: Any, metadata: dict[str, Any]
    ) -> str | bytes:
        """The text of one stage; all are made where the first one is asked for."""
        if self._made is None:
            request = source, target, options, self._tools.shared_limit_bytes, temporary_folder()
            with suppress(CannotStartError):
                while self._made is None and self._worker is not None:
                    try:
                        self._made = self._worker.ask(request, self._on_wait)
                    except IdleError:
                        # The tuning may have ended, and the next process would outlive it.
                        if self.is_given_up:
                            raise
                        self._worker = self._tools.take()
            self._made = self._made or compile_kernel(self._on_wait, *request)
            self.is_waiting = False
            metadata.update(self._made[1])
            self.seconds.update(self._made[2])
        return self._made[0][name]

    def _on_wait(self) -> None:
        self.is_waiting = True
        self._tools.on_wait()


def _make_ir(own: Any) -> Any:
    @functools.wraps(own)
    def make_ir(*args: Any) -> Any:
        mine: Compilation | None = getattr(_thread, "compilation", None)
        return own(*args) if mine is None else mine.make_ir(own, *args)

    return make_ir


def _add_stages(own: Any) -> Any:
    @functools.wraps(own)
    def add_stages(self: Any, stages: dict[str, Any], options: Any, language: Any = None) -> None:
        own(self, stages, options, language)
        mine: Compilation | None = getattr(_thread, "compilation", None)
        # Else our own stages ask for Triton's.
        if mine is not None and not isinstance(options, Observed):
            mine.add_stages(self, stages, options, language)

    return add_stages


@contextmanager
def patched() -> Iterator[None]:
    """Triton's compiler asks the compilation of its thread."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(min(interval_s, _SWITCH_INTERVAL_S))
    with ExitStack() as stack:
        stack.callback(sys.setswitchinterval, interval_s)
        stack.enter_context(replaced(ASTSource, "make_ir", _make_ir))
        stack.enter_context(
            replaced(JITFunction, "parse", lambda own: lambda kernel: parsed(lambda: own(kernel)))
        )
        for backend in triton.backends.backends.values():
            stack.enter_context(replaced(backend.compiler, "add_stages", _add_stages))
        yield
