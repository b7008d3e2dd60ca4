"""One candidate from source to the device, in steps that other threads and other ranks can take over.

Knows what Triton's compiler makes of a ``Compilable``, and nothing of ranks or search. Triton is asked once per candidate what
it would compile: the answer is the key of the result in its disk cache, and a function that compiles in any thread without
touching a device or holding tensors. Loading happens on the main thread and without a launch, and must not be put off:
CUDA may wait for running kernels while it loads a module, and one of them may be waiting for this rank.
"""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, NoReturn, Protocol

import triton
from triton.runtime import _async_compile

from dist_tune.compiler.output import quiet_terminal
from dist_tune.compiler.processes import Worker
from dist_tune.compiler.triton_cache import claim, known_need, remember_need
from dist_tune.compiler.worker import unlock
from dist_tune.errors import FailureKind, kind_of

_digests: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Of compiled kernels, which Triton keeps for the next tuning in this process: making them anew took a tenth of its processor
time (logs/tuning-200-cpu)."""


class Compilable(Protocol):
    """A launch that can be compiled for a config."""

    def compile(self, config: Any) -> Any:
        """Compile for ``config`` without launching."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of a multiprocessor that a loaded kernel takes."""

    shared_bytes: int
    n_regs: int | None
    """Registers per thread; None if nothing was assembled."""
    n_spills: int | None
    """Bytes of registers spilled to local memory, per thread."""


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


class Compilation:
    """One kernel from source to Triton's disk cache, shared by all candidates with its key: queued, then running, then done."""

    def __init__(self, key: str, compile_: Callable[[], Any] | None, result: Any = None) -> None:
        self.key = key
        """Key in Triton's disk cache, in hex; empty if nothing is compiled."""
        self.label, self.candidate, self.turn = "", 0, (0, 0.0, 0)
        """The first site and candidate that asked for it, with its sort key there."""
        self.done = threading.Event()
        self.result = result
        """When done: Triton's compiled kernel, a ``Failure``, or None if nothing is compiled, as under the interpreter."""
        self.started_at: float | None = None
        """Monotonic clock, in seconds; None while queued."""
        self.held_since: float | None = None
        """When another process, which compiles it now, was found to; by the same clock."""
        self.n_held = 0
        """Times that this was found."""
        self.is_given_up = False
        """Failed by ``give_up``; a thread may still be running it."""
        self.is_waiting = False
        """True while another thread runs stages for both."""
        self.worker: Worker | None = None
        """The process that its stages run in."""
        self._claimed: IO[bytes] | None = None
        self._compile = self._again = compile_
        self._lock = threading.Lock()
        if compile_ is None:
            self.done.set()

    @property
    def is_queued(self) -> bool:
        """Not started and not done."""
        return self.started_at is None and not self.done.is_set()

    def run(self, shared_limit_bytes: int | None, note: Callable[[Any], None] = lambda result: None) -> bool:
        """Compile, or find the result in Triton's disk cache; False if another thread, or process of this host, does. For any thread.

        ``note`` is called with the result before others see it.
        """
        with claim(self.key) as claimed:
            with self._lock:
                if claimed is None or self._compile is None:
                    self.held_since = self.held_since or time.monotonic()
                    self.n_held += 1
                    return False
                compile_, self._compile = self._compile, None
                self.started_at, self._claimed = time.monotonic(), claimed
            result: Any = Failure("SystemExit: a hook of the compiler ended its thread")
            try:
                result = _attempt(lambda: self._compiled(compile_, claimed, shared_limit_bytes))
            finally:
                note(result)
                self._finish(result)
        return True

    def run_again(self) -> None:
        """Compile once more, if it was the machine that failed: when nothing else is compiled."""
        again, self._again = self._again, None
        if again is not None and isinstance(self.result, Failure) and self.result.kind is FailureKind.MACHINE:
            self.result = _attempt(again)

    def give_up(self, reason: str) -> None:
        """Let it fail from another thread: it may never end."""
        self.is_given_up = self.is_given_up or not self.done.is_set()
        self._finish(Failure(reason))
        if self.worker is not None:
            self.worker.end()
        if self._claimed is not None:
            unlock(self._claimed)

    def _compiled(self, compile_: Callable[[], Any], claimed: IO[bytes], limit_bytes: int | None) -> Any:
        needed_bytes = known_need(claimed)
        if limit_bytes is not None and needed_bytes is not None and needed_bytes > limit_bytes:
            raise triton.OutOfResources(needed_bytes, limit_bytes, "shared memory")
        try:
            return compile_()
        except triton.OutOfResources as error:
            if error.name == "shared memory" and error.required != needed_bytes:
                remember_need(claimed, error.required)
            raise

    def _finish(self, result: Any) -> None:
        with self._lock:
            if not self.done.is_set():
                self.result, self._compile = result, None
                self.done.set()


class Asked(BaseException):
    """Triton's answer: the key, a function that compiles, and one that puts the result into the kernel's in-memory cache.

    Raised in place of a stand-in, which would stay in that cache for good if it fails. Not an ``Exception``, because it must pass the
    user's own wrappers.
    """


class _AskOnly:
    """Triton's ``AsyncCompileMode`` as a kernel's launch uses it. The same in Triton 3.6 to 3.9."""

    def submit(self, key: str, compile_: Callable[[], Any], finalize: Callable[[Any], None], *cleanup: Any) -> NoReturn:
        """Called by Triton in place of compiling."""
        raise Asked(hashlib.sha256(key.encode()).hexdigest(), compile_, finalize)


class Candidate:
    """A config of a launch: its compilation, and its kernel on the device. Used on the thread that made it."""

    def __init__(self, launch: Compilable, config: triton.Config) -> None:
        self._finalize: Callable[[Any], None] | None = None
        self._loaded: Resources | Failure | None = None
        self.compilation = self._ask(launch, config)
        """Replaced by an earlier one with the same key."""

    @property
    def is_loaded(self) -> bool:
        """On the device."""
        return isinstance(self._loaded, Resources)

    @property
    def is_ready(self) -> bool:
        """Compiled, and not loaded yet."""
        return self._loaded is None and self.compilation.done.is_set() and not isinstance(self.compilation.result, Failure)

    def load(self, *, is_early: bool = False) -> Resources | Failure | None:
        """Load onto the device without a launch. Call it when the compilation is done; it does not wait.

        ``is_early``: others are still compiled. A load that the machine fails then is put off to the next call; None.
        """
        compiled = self.compilation.result
        if compiled is None or isinstance(compiled, Failure):  # None under the interpreter, and with a hook of the user's
            self._loaded = compiled
        for is_last in (False, True):  # once more, if it was the machine that failed
            if self._loaded is None and compiled is not None:
                loaded = _attempt(lambda: self._load(compiled), FailureKind.LOAD, _int(compiled.metadata, "shared"))
                if is_last or not isinstance(loaded, Failure) or loaded.kind is not FailureKind.MACHINE:
                    self._loaded = loaded
                elif is_early:
                    break
        return self._loaded

    def kernel(self) -> str:
        """All that decides what a launch of the compiled kernel does, in a digest that holds in this process; empty if unknown.

        Of what came out, so that it holds for every compiler: binary, metadata, constants and types of the arguments.
        """
        compiled = self.compilation.result
        binary, metadata = getattr(compiled, "kernel", None), getattr(compiled, "metadata", None)
        if not isinstance(binary, bytes) or metadata is None or not hasattr(metadata, "_asdict"):
            return ""
        if compiled not in _digests:
            # The key and the number of stages are read on the way to the binary, and by nothing afterwards.
            facts = {name: value for name, value in metadata._asdict().items() if name not in ("hash", "num_stages")}
            source = [getattr(compiled.src, name, None) for name in ("constants", "signature", "attrs")]
            _digests[compiled] = hashlib.sha256(binary + repr((facts, source)).encode()).hexdigest()
        return _digests[compiled]

    def _ask(self, launch: Compilable, config: triton.Config) -> Compilation:
        def ask() -> Any:
            found = launch.compile(config)
            return found.result() if isinstance(found, _async_compile.FutureKernel) else found  # a future of the user's own

        token = _async_compile.active_mode.set(_AskOnly())
        try:
            found = _attempt(ask)
        except Asked as asked:
            key, compile_, self._finalize = asked.args
            return Compilation(key, compile_)
        finally:
            _async_compile.active_mode.reset(token)
        return Compilation(getattr(found, "hash", ""), None, found)  # failed, or compiled in this process before

    def _load(self, compiled: Any) -> Resources:
        if self._finalize is not None:  # puts it into the in-memory cache of its kernel
            self._finalize(compiled)
            self._finalize = None
        compiled._init_handles()
        return Resources(_int(compiled.metadata, "shared"), _int(compiled, "n_regs"), _int(compiled, "n_spills"))


def _attempt(step: Callable[[], Any], kind: FailureKind = FailureKind.COMPILE, shared_bytes: int | None = None) -> Any:
    """The value of ``step``, or a ``Failure`` with the exception that it raised and the compiler's output."""
    start = quiet_terminal.n_bytes()
    try:
        return step()
    except Exception as error:  # noqa: BLE001  # compilers, loaders and the user's hooks raise anything: it is this rank's vote
        # Raised further, it would end a compiling thread, and the ranks would wait for the result.
        text = ""
        if not isinstance(error, triton.OutOfResources):  # of which the compiler writes nothing: what is there is another's
            text = quiet_terminal.take(start)
        elif error.name == "shared memory":
            shared_bytes = error.required
        return Failure(reason_of(error), text, shared_bytes, kind_of(error, kind))


def _int(holder: Any, name: str) -> int:
    value = getattr(holder, name, 0)
    return value if isinstance(value, int) else 0
