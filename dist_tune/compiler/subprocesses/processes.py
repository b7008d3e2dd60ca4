"""Processes that run Triton's compiler passes, one for each compiling thread.

In threads of one process these passes share Python's lock, the allocator's locks and the replay's host time: of 16 threads six waited
for one another (logs/third-party-2xH200). A process of its own for each leaves the thread only the front end, which needs the user's
Python, and the files. It costs 0.2 s to start, and what it does not survive costs one candidate instead of the rank.

Only for the NVIDIA backend as Triton ships it: with hooks, overrides or patches in the compiler all runs in this process, as there they
are at home. Knows nothing of candidates.
"""

from __future__ import annotations

import builtins
import functools
import sys
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import triton
from triton import knobs
from triton._C.libtriton import ir
from triton.backends.compiler import Language
from triton.compiler import errors as compiler_errors
from triton.runtime import errors as runtime_errors

from dist_tune.compiler.passes.patches import SharedContext, replaced
from dist_tune.compiler.subprocesses.output import heard
from dist_tune.compiler.subprocesses.workers import CannotStartError, Worker, WorkerDiedError, workers

STAGES = ["ttir", "ttgir", "llir", "ptx", "cubin"]
_thread = threading.local()
"""``job`` of a thread within ``in_process``."""


@dataclass
class Job:
    """One kernel on its way through the stages, in another process."""

    is_urgent: bool
    worker: Worker | None = None
    begun: tuple[Any, ...] | None = None
    """Its TTIR, target and options."""
    has_begun: bool = False
    """True when the process has them."""
    latest: str = ""
    """The latest stage that the process has run."""
    is_ended: bool = False
    """True if it was given up."""

    def run(self, stage: str, metadata: MutableMapping[str, Any], options: Any) -> str | bytes:
        """The result of a stage; adds to the kernel's metadata, and reads of it and of the options what the stage has read.

        Raises:
            Exception: of the compiler, as in this process; a ``RuntimeError`` in place of a type that is not known here.
        """
        # Stages may have been left out because an equal kernel has run them. They are made up for, since a stage may need more than
        # their text: that for LLVM IR sets up LLVM's targets, without which that for PTX crashes.
        n_run = STAGES.index(self.latest) + 1 if self.latest else 0
        try:
            for left_out in STAGES[n_run : STAGES.index(stage)]:
                self._ask(left_out)
            result, cpu_s, output = self._ask(stage)
        except WorkerDiedError:
            if self.worker is not None:
                heard(self.worker.last_words(), end="")
            raise
        self.latest = stage
        _thread.cpu_s = cpu_s_elsewhere() + cpu_s
        if output:
            heard(output, end="")
        if len(result) == 3:
            raise _error(*result)
        text, written, read, read_options = result
        for name in metadata if read is None else read:
            metadata.get(name)
        for name in read_options:
            getattr(options, name)
        metadata.update(written)
        return cast(str | bytes, text)

    def hurry(self) -> None:
        """Let the process compete with others, because nothing but it is waited for."""
        if self.worker is not None:
            self.worker.become(is_urgent=True)

    def end(self) -> None:
        """End the process, from another thread: the compilation fails."""
        self.is_ended = True
        if self.worker is not None:
            self.worker.end()

    def _ask(self, stage: str) -> Any:
        if self.worker is None:
            if not workers.can_start:
                raise CannotStartError("no process of the compiler could be started before")
            self.worker = workers.take(is_urgent=self.is_urgent)
        begun, self.has_begun = None if self.has_begun else self.begun, True
        try:
            return self.worker.ask((begun, stage))
        except WorkerDiedError:
            if self.is_ended:
                raise
        # It has ended because it was idle for too long, or the compiler has crashed, which may not come again.
        self.worker = Worker(is_urgent=self.is_urgent)
        for each in STAGES[: STAGES.index(stage) + 1]:
            reply = self.worker.ask((self.begun if each == STAGES[0] else None, each))
        return reply


def cpu_s_elsewhere() -> float:
    """CPU-seconds that other processes have spent for this thread so far."""
    return getattr(_thread, "cpu_s", 0.0)


def _error(module: str, name: str, text: str) -> Exception:
    known = next((vars(each)[name] for each in (runtime_errors, compiler_errors, builtins) if name in vars(each)), None)
    if isinstance(known, type) and issubclass(known, Exception):
        with suppress(TypeError):  # one of several arguments
            return known(text)
    return RuntimeError(f"{module}.{name}: {text}")


class SourceText:
    """A kernel's TTIR as text, in place of Triton's module of it: what ``str`` gives is all that this process needs."""

    def __init__(self, path: Path, context: Any) -> None:
        self._path = path
        self._context = context

    def __str__(self) -> str:
        return self._path.read_text()

    def module(self) -> Any:
        """Triton's module, after all."""
        module = ir.parse_mlir_module(str(self._path), self._context)
        module.context = self._context  # the module keeps it alive, as Triton's own modules do
        return module


@contextmanager
def in_process(*, is_urgent: bool) -> Iterator[Job]:
    """Within ``other_processes``: the stages of what this thread compiles run in another process."""
    job = _thread.job = Job(is_urgent)
    try:
        yield job
    finally:
        _thread.job = None
        if job.worker is not None:
            workers.give(job.worker)


def hand_over(path: Path, target: Any, options: Any, context: Any) -> SourceText | None:
    """Leave the stages after the front end to another process, if this thread is ``in_process``; None if it is not."""
    job: Job | None = getattr(_thread, "job", None)
    if job is None or options.ir_override is not None:
        return None
    job.begun = path.read_text(), target, options  # the file may be gone when a crash is tried once more
    return SourceText(path, context)


def is_possible() -> bool:
    """True if the compiler is Triton's own from end to end."""
    try:
        from triton.backends.nvidia.compiler import CUDABackend

        is_cuda = triton.runtime.driver.active.get_current_target().backend == "cuda"
    except (ImportError, RuntimeError):  # a Triton without that backend; a machine without a driver
        return False
    compilation = knobs.compilation
    is_known = getattr(knobs, "propagate_env", True) and all(map(_is_in_environment, (compilation, knobs.nvidia, knobs.language)))
    is_plain = is_known and not any(
        getattr(compilation, name, None)
        for name in ("override", "dump_ir", "use_ir_loc", "listener", "dump_ir_extract_di_local_variables", "instrumentation_mode")
    )
    known = [Path(sys.modules[each].__file__ or "").parent for each in ("dist_tune", CUDABackend.__module__)]
    stages = [getattr(CUDABackend, f"make_{stage}") for stage in STAGES]
    return (
        is_cuda
        and is_plain
        and workers.can_start
        and bool(sys.executable)
        and knobs.runtime.add_stages_inspection_hook is None
        and getattr(CUDABackend, "instrumentation", None) is None
        and all(_is_in(known, each) for each in [*stages, CUDABackend.add_stages])
    )


def _is_in(folders: list[Path], function: Any) -> bool:
    code = getattr(function, "__code__", None)  # None of a callable object that a user has put there
    return code is not None and any(Path(code.co_filename).is_relative_to(each) for each in folders)


def _is_in_environment(settings: Any) -> bool:
    """True if another process reads the same values: what ``triton.knobs`` is set to is written to the environment, if it can be."""
    return all(value is None or knobs.toenv(value) is not None for value in vars(settings).values())


def _wrapped(own: Any) -> Any:
    @functools.wraps(own)
    def add_stages(self: Any, stages: dict[str, Any], options: Any, language: Any) -> None:
        own(self, stages, options, language)
        job: Job | None = getattr(_thread, "job", None)
        if job is not None and language == Language.TRITON and list(stages) == STAGES:
            for name, stage in list(stages.items()):
                stages[name] = functools.partial(_run, job, name, stage, options)

    return add_stages


def _run(job: Job, name: str, own: Any, options: Any, source: Any, metadata: MutableMapping[str, Any]) -> Any:
    """A stage of a kernel that was handed over; of others, such as with ``ir_override``, Triton's own."""
    if not isinstance(source, SourceText | str | bytes) or (job.begun is None and job.worker is None):
        return own(source, metadata)
    try:
        return job.run(name, metadata, options)
    except (CannotStartError, OSError):
        if not isinstance(source, SourceText):
            raise
        workers.can_start = False
        job.worker = job.begun = None  # the next stages stay here, too
        return own(source.module(), metadata)


@contextmanager
def _patched() -> Iterator[None]:
    from triton.backends.nvidia.compiler import CUDABackend

    with replaced(CUDABackend, "add_stages", _wrapped):
        yield


other_processes = SharedContext(_patched)
"""While entered, threads that are ``in_process`` compile there."""
