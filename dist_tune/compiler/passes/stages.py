"""The stages of Triton's compiler on threads that compile for a tuning: timed, and after TTGIR run once for equal input.

Configs that differ in ``num_stages`` alone come to the same TTGIR where no loop is pipelined. The second compilation that comes to it
takes over LLVM IR, PTX and cubin of the first, and waits for them if need be; Triton writes them under its own key, with metadata of
its own. A stage counts as a function of its text and of what it was seen to read of options and metadata; nothing is assumed about
which options these are. Other threads compile as always.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import triton
from triton._C.libtriton import ir
from triton.compiler import code_generator
from triton.compiler.compiler import ASTSource

from dist_tune.compiler.passes.front_end import _Observed
from dist_tune.compiler.passes.patches import SharedContext, replaced
from dist_tune.compiler.subprocesses.leftovers import temporary_folder
from dist_tune.compiler.subprocesses.output import heard
from dist_tune.compiler.subprocesses.processes import cpu_s_elsewhere

if TYPE_CHECKING:
    from dist_tune.compiler.candidate import Compilation

FRONT_END = "front_end"
"""From Python to optimized TTIR."""
PTXAS = "ptxas"
"""A child process; its seconds are wall time."""
STAGES = (FRONT_END, "ttgir", "llir", "ptx", PTXAS)
_AFTER_TTGIR = ("llir", "ptx", "cubin")
_NAMES = {"ttir": FRONT_END, "cubin": PTXAS}

_thread = threading.local()
"""``task`` of a thread that compiles for a tuning."""


@dataclass
class Work:
    """Compilations of one tuning on this rank, since they began."""

    stage_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    """CPU-seconds of each stage, over all threads; of ptxas wall seconds."""
    busy_s: float = 0.0
    """Seconds in which threads were at work, over all threads."""
    wall_s: float = 0.0
    n_compiled: int = 0
    n_equal: int = 0
    """Kernels that took over the result of an equal one after TTGIR."""
    n_found: int = 0
    """Kernels found in Triton's disk cache."""
    n_failed: int = 0
    slowest: Compilation | None = None
    slowest_s: float = 0.0
    """Seconds of the slowest one, without waiting for an equal one."""
    _began: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def n_kernels(self) -> int:
        """All of them."""
        return self.n_compiled + self.n_equal + self.n_found + self.n_failed

    @property
    def cpu_s(self) -> float:
        """CPU-seconds of all stages, ptxas included."""
        return sum(self.stage_s.values())

    @property
    def n_at_work(self) -> float:
        """Threads at work on average."""
        return self.busy_s / self.wall_s if self.wall_s > 0 else 0.0

    def add(self, compilation: Compilation, busy_s: float, stage_s: Mapping[str, float], *, is_equal: bool) -> None:
        """Count a compilation that has ended. For any thread."""
        with self._lock:
            self.busy_s += busy_s
            for name, seconds in stage_s.items():
                self.stage_s[name] = self.stage_s.get(name, 0.0) + seconds
            if compilation.has_failed:
                self.n_failed += 1
            elif not stage_s:
                self.n_found += 1
            elif is_equal:
                self.n_equal += 1
            else:
                self.n_compiled += 1
            if busy_s > self.slowest_s:
                self.slowest, self.slowest_s = compilation, busy_s

    def ended(self) -> Work:
        """This, with the seconds from its beginning until now."""
        self.wall_s = time.monotonic() - self._began
        return self


class _Run:
    """One run of a stage: under way, then done or given up."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.result: Any = MISSING
        self.read_options: dict[str, Any] = {}
        self.metadata = ObservedMetadata({})

    def fits(self, options: Any, metadata: dict[str, Any]) -> bool:
        """True if another run with these would read what this one has read."""
        return all(hasattr(options, name) and getattr(options, name) == value for name, value in self.read_options.items()) and all(
            metadata.get(name, MISSING) == value for name, value in self.metadata.read.items()
        )


class Stages:
    """The stages that compilations of one tuning have run."""

    def __init__(self, on_wait: Callable[[], None]) -> None:
        self.work: Work | None = None
        """Since the last ``take_work``; None before the first compilation."""
        self._on_wait = on_wait
        self._lock = threading.Lock()
        self._runs: dict[tuple[str, ...], list[_Run]] = {}
        """Stage, target and digest of the text -> runs that are under way or done."""

    def begin(self) -> None:
        """Count work and time from now on, unless that goes on already."""
        self.work = self.work or Work()

    def take_work(self) -> Work | None:
        """The work so far, which ends with this; None if nothing was compiled."""
        work, self.work = self.work, None
        return work.ended() if work is not None and work.n_kernels else None

    def close(self) -> None:
        """Forget all results. Threads that wait for one of another thread go on alone."""
        with self._lock:
            runs, self._runs = [run for each in self._runs.values() for run in each], {}
        for run in runs:
            run.ended.set()

    def run(self, compilation: Compilation, shared_limit_bytes: int | None) -> bool:
        """Run a compilation on this thread, and count its work; true if it was found in Triton's disk cache."""
        task, work = _Task(self, compilation, shared_limit_bytes), self.work
        _thread.task = task
        began = time.perf_counter()
        try:
            has_run = compilation.run(shared_limit_bytes)
        finally:
            _thread.task = None
        if has_run and work is not None:
            work.add(compilation, time.perf_counter() - began - task.waited_s, task.seconds, is_equal=task.is_equal)
        return has_run and not task.seconds and not compilation.has_failed

    def once(self, identity: tuple[str, ...], task: _Task, stage: Callable[[Any], Any], options: Any, metadata: dict[str, Any]) -> Any:
        """The result of a stage, from an equal run if there is one. ``options`` observes what the stage reads."""
        while True:
            with self._lock:
                runs = self._runs.setdefault(identity, [])
                done = next((run for run in runs if run.ended.is_set() and run.fits(options._options, metadata)), None)
                running = next((run for run in runs if not run.ended.is_set()), None)
                if done is None and running is None:
                    runs.append(mine := _Run())
                    task.is_equal = False
                    break
            if done is not None:
                task.is_equal = True
                metadata.update(done.metadata.written)
                return done.result
            assert running is not None
            task.wait(running.ended, self._on_wait)
        mine.metadata = ObservedMetadata(metadata)
        try:
            mine.result = stage(mine.metadata)
        finally:
            mine.read_options = dict(options._read)
            with self._lock:
                if mine.result is MISSING or not mine.metadata.is_known:
                    runs.remove(mine)
            mine.metadata.own = {}
            mine.ended.set()
        return mine.result


class _Task:
    """The compilation that this thread runs."""

    def __init__(self, stages: Stages, compilation: Compilation, shared_limit_bytes: int | None) -> None:
        self.seconds: dict[str, float] = {}
        self.waited_s = 0.0
        self.is_equal = False
        """True if it has taken over the result of its latest stage."""
        self.stages = stages
        self.shared_limit_bytes = shared_limit_bytes
        """Of the device; None: unknown."""
        self._compilation = compilation

    def timed(self, name: str, step: Callable[[], Any]) -> Any:
        """The value of a stage's ``step``, whose CPU-seconds are counted; of ptxas, a child process, the wall time."""
        clock = time.perf_counter if name == PTXAS else _cpu_s
        began = clock()
        try:
            return step()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + clock() - began

    def wait(self, ended: threading.Event, on_wait: Callable[[], None]) -> None:
        """Wait for a run of another thread; this thread does not count as working meanwhile."""
        began = time.perf_counter()
        self._compilation.is_waiting = True
        on_wait()
        ended.wait()
        self._compilation.is_waiting = False
        self.waited_s += time.perf_counter() - began


def _cpu_s() -> float:
    """CPU-seconds for this thread so far."""
    return time.thread_time() + cpu_s_elsewhere()


def _timed(task: _Task, ext: str, stage: Callable[..., Any]) -> Callable[..., Any]:
    """``stage``, timed; that for PTX is not run for a kernel that needs more shared memory than there is, as Triton finds at its load."""

    def timed(source: Any, metadata: MutableMapping[str, Any]) -> Any:
        limit, needed = task.shared_limit_bytes, metadata.get("shared") if ext == "ptx" else None
        if limit is not None and isinstance(needed, int) and needed > limit:
            raise triton.OutOfResources(needed, limit, "shared memory")
        return task.timed(_NAMES.get(ext, ext), lambda: stage(source, metadata))

    return timed


def _shared(
    task: _Task, identity: tuple[str, ...], stage: Callable[..., Any], seen: Callable[..., Any], options: Any
) -> Callable[..., Any]:
    """``stage``, not run if an equal one has. ``seen``: the same with ``options`` that observe what it reads."""

    def shared(source: Any, metadata: dict[str, Any]) -> Any:
        if not isinstance(source, str | ir.module):
            return stage(source, metadata)
        digest = hashlib.sha256(str(source).encode()).hexdigest()
        return task.stages.once((*identity, digest), task, lambda own: seen(source, own), options, metadata)

    return shared


def _add_stages(own: Any) -> Any:
    @functools.wraps(own)
    def add_stages(self: Any, stages: dict[str, Any], options: Any, *args: Any, **kwargs: Any) -> None:
        own(self, stages, options, *args, **kwargs)
        task: _Task | None = getattr(_thread, "task", None)
        if task is None:
            return
        is_known = triton.knobs.runtime.add_stages_inspection_hook is None  # a hook in the compiler may do anything
        for ext, stage in list(stages.items()):
            stages[ext] = _timed(task, ext, stage)
            if is_known and ext in _AFTER_TTGIR:
                # Observed for each stage: Triton caches by the options' identity what one of them has read.
                observed, again = _Observed(options), dict[str, Any]()
                own(self, again, observed, *args, **kwargs)
                identity = (type(self).__qualname__, str(self.target), ext)
                stages[ext] = _shared(task, identity, stages[ext], _timed(task, ext, again[ext]), observed)

    return add_stages


def _make_ir(own: Any) -> Any:
    @functools.wraps(own)
    def make_ir(*args: Any, **kwargs: Any) -> Any:
        task: _Task | None = getattr(_thread, "task", None)
        return own(*args, **kwargs) if task is None else task.timed(FRONT_END, lambda: own(*args, **kwargs))

    return make_ir


class _TemporaryFiles:
    """Python's ``tempfile`` for Triton's backends, whose files lie in our folder: one that is killed meanwhile leaves them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tempfile, name)

    @staticmethod
    def NamedTemporaryFile(*args: Any, **kwargs: Any) -> Any:
        with suppress(OSError):  # none: Python looks for one
            kwargs.setdefault("dir", temporary_folder())
        return tempfile.NamedTemporaryFile(*args, **kwargs)


@contextmanager
def _patched() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(replaced(ASTSource, "make_ir", _make_ir))
        stack.enter_context(replaced(code_generator, "print", lambda own: heard))
        for backend in triton.backends.backends.values():
            stack.enter_context(replaced(backend.compiler, "add_stages", _add_stages))
            module = sys.modules[backend.compiler.__module__]
            stack.enter_context(replaced(module, "print", lambda own: heard))
            stack.enter_context(replaced(module, "tempfile", lambda own: _TemporaryFiles()))
        yield


watched_stages = SharedContext(_patched)
"""While entered, compilations within ``Stages.run`` are timed and share what is equal."""


MISSING = object()


class ObservedMetadata(MutableMapping[str, Any]):
    """A kernel's metadata, and what a stage reads and writes of it."""

    def __init__(self, own: dict[str, Any]) -> None:
        self.read: dict[str, Any] = {}
        self.written: dict[str, Any] = {}
        self.is_known = True
        """False if it was used in other ways."""
        self.own = own
        """Not observed."""

    def __getitem__(self, name: str) -> Any:
        if name not in self.written:
            self.read[name] = self.own.get(name, MISSING)
        return self.own[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.own[name] = self.written[name] = value

    def __delitem__(self, name: str) -> None:
        self.is_known = False
        del self.own[name]

    def __iter__(self) -> Iterator[str]:
        self.is_known = False
        return iter(self.own)

    def __len__(self) -> int:
        self.is_known = False
        return len(self.own)
