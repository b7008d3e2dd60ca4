"""One candidate on its way from source to device, in steps that other threads and other ranks can take part in.

Knows a ``Compilable`` and what Triton's compiler makes of it, and nothing of ranks or search. A launch is asked once
for each candidate what Triton would compile for it: that gives the key of the result in Triton's disk cache, and a function
that compiles, touches no device and may run in any thread. What that function needs of the arguments is kept, not the
tensors. Loading checks registers and threads without a launch, on the main thread, and must not happen later: CUDA may wait
for running kernels while it loads a module, and one of them may be waiting for us.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import triton
from triton.runtime import _async_compile
from triton.runtime.errors import PTXASError

from dist_tune.compiler.output import Heard, quiet_terminal
from dist_tune.compiler.shared_memory import known_need, remember_need, shared_limit
from dist_tune.errors import FailureKind


class Compilable(Protocol):
    """A launch as far as Triton's compiler is concerned."""

    def compile(self, config: Any) -> Any:
        """Compile for ``config`` without launching."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a loaded kernel takes of a multiprocessor."""

    shared_bytes: int
    n_regs: int | None
    """Registers per thread; None of what was never assembled."""
    n_spills: int | None
    """Bytes of registers spilled to local memory, per thread."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a candidate cannot run on this rank."""

    reason: str
    """"ExceptionType: message" on one line."""
    output: str = ""
    """What the compiler wrote to the terminal while it failed: PTX, MLIR."""
    shared_bytes: int | None = None
    """What it needs of it, where that is known."""
    kind: FailureKind = FailureKind.COMPILE


def reason_of(error: BaseException) -> str:
    """An exception on one line, in log and vote."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}"


class Compilation:
    """One kernel on its way from source to Triton's disk cache: one for all candidates that have its key. For any thread."""

    def __init__(self, key: str, compile_: Callable[[], Any] | None, outcome: Any = None) -> None:
        self.key = key
        """Identity of the result in Triton's disk cache, in hex; empty where nothing is compiled."""
        self.done = threading.Event()
        self.outcome = outcome
        """When done: Triton's compiled kernel, a ``Failure``, or None where nothing is compiled, as under the interpreter."""
        self.began: float | None = None
        """When a thread took it up, on the monotonic clock; None if it waits."""
        self._is_running = False
        self._compile = compile_
        self._lock = threading.Lock()
        if compile_ is None:
            self.done.set()

    @property
    def is_waiting(self) -> bool:
        """Whether nobody has taken it up."""
        return self.began is None and not self.done.is_set()

    @property
    def is_given_up(self) -> bool:
        """Whether a thread is at it although nobody waits for that any longer."""
        return self._is_running and self.done.is_set()

    def run(self, shared_limit_bytes: int | None) -> None:
        """Compile, or find the result in Triton's disk cache; unless somebody has taken that up already."""
        with self._lock:
            compile_, self._compile = self._compile, None
            if compile_ is None:
                return
            self.began = time.monotonic()
            self._is_running = True
        outcome: Any = Failure("SystemExit: a hook of the compiler ended its thread")
        try:
            with quiet_terminal.listen() as heard:
                try:
                    needed = known_need(self.key) if shared_limit_bytes is not None else None
                    if needed is not None and shared_limit_bytes is not None and needed > shared_limit_bytes:
                        raise triton.OutOfResources(needed, shared_limit_bytes, "shared memory")
                    with shared_limit(shared_limit_bytes):
                        outcome = compile_()
                # Whatever a compiler or a hook of the user's raises becomes a vote: this config cannot run here. Raised here
                # it would end the thread and leave everybody waiting.
                except Exception as error:  # noqa: BLE001
                    outcome = _failure(error, heard)
                    if outcome.shared_bytes is not None and outcome.shared_bytes != needed:
                        remember_need(self.key, outcome.shared_bytes)
        finally:
            self._is_running = False
            self._end(outcome)

    def give_up(self, reason: str) -> None:
        """Let it fail from outside: it may never end."""
        self._end(Failure(reason))

    def _end(self, outcome: Any) -> None:
        with self._lock:
            if not self.done.is_set():
                self.outcome, self._compile = outcome, None
                self.done.set()


class Asked(BaseException):
    """What Triton would compile. Raised in its place, so that nothing comes into the caches of its kernels.

    What ``submit`` returns would stay there until it is a kernel, and for ever if it fails: Triton 3.6 never takes it out,
    and 3.9 launches through it. Not an ``Exception``: it must pass the user's own wrappers.
    """

    def __init__(self, key: str, compile_: Callable[[], Any], finalize: Callable[[Any], None]) -> None:
        self.key = hashlib.sha256(key.encode()).hexdigest()
        self.compile = compile_
        self.finalize = finalize


class _AskOnly:
    """Triton's ``AsyncCompileMode``, as far as a kernel's launch knows it. The same in Triton 3.6 to 3.9."""

    def submit(self, key: str, compile_: Callable[[], Any], finalize: Callable[[Any], None], *cleanup: Any) -> NoReturn:
        """Called by Triton in place of compiling."""
        raise Asked(key, compile_, finalize)


class Candidate:
    """A config of a launch: what is compiled for it, and its kernel on the device. On the thread that made it."""

    def __init__(self, launch: Compilable, config: triton.Config) -> None:
        self._finalize: Callable[[Any], None] | None = None
        self._loaded: Resources | Failure | None = None
        self.compilation = self._ask(launch, config)
        """May be replaced by another one of the same key."""

    def load(self) -> Resources | Failure | None:
        """The kernel on the device, not launched; waits for nothing, so ask when the compilation is done."""
        if self._loaded is None:
            compiled = self.compilation.outcome
            # Under the interpreter, and with a hook of the user's that keeps Triton from compiling, there is nothing to load.
            self._loaded = compiled if isinstance(compiled, Failure) or compiled is None else self._load(compiled)
        return self._loaded

    def _ask(self, launch: Compilable, config: triton.Config) -> Compilation:
        token = _async_compile.active_mode.set(_AskOnly())
        try:
            with quiet_terminal.listen() as heard:
                try:
                    found = launch.compile(config)
                    if isinstance(found, _async_compile.FutureKernel):  # the user's own, still in work
                        found = found.result()
                except Asked as asked:
                    self._finalize = asked.finalize
                    return Compilation(asked.key, asked.compile)
                # As above: a vote.
                except Exception as error:  # noqa: BLE001
                    return Compilation("", None, _failure(error, heard))
        finally:
            _async_compile.active_mode.reset(token)
        return Compilation(getattr(found, "hash", ""), None, found)  # compiled in this process before

    def _load(self, compiled: Any) -> Resources | Failure:
        shared_bytes = 0
        with quiet_terminal.listen() as heard:
            try:
                shared_bytes = _int(compiled.metadata, "shared")
                if self._finalize is not None:  # into the cache of its kernel
                    self._finalize(compiled)
                    self._finalize = None
                compiled._init_handles()
            # As above: what does not load gets a vote against it.
            except Exception as error:  # noqa: BLE001
                return replace(_failure(error, heard, shared_bytes), kind=FailureKind.LOAD)
        return Resources(shared_bytes, _int(compiled, "n_regs"), _int(compiled, "n_spills"))


def _failure(error: Exception, heard: Heard, shared_bytes: int | None = None) -> Failure:
    if isinstance(error, triton.OutOfResources) and error.name == "shared memory":
        shared_bytes = error.required
    # These write nothing to descriptor 2, where there may be something of the user's.
    is_python_s = isinstance(error, triton.OutOfResources | PTXASError)
    return Failure(reason_of(error), quiet_terminal.take(heard, with_descriptor=not is_python_s), shared_bytes)


def _int(holder: Any, name: str) -> int:
    value = getattr(holder, name, 0)
    return value if isinstance(value, int) else 0
