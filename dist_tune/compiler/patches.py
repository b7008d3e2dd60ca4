"""Triton's compiler as it is while a tuning compiles, and launches that would compile.

What several users need at once is changed for the first one and undone after the last. On a thread with a ``Job`` the front end, which is
Python and holds the interpreter's lock, is run by one thread at a time and once for equal input; the stages after it are those of
``worker``, in another process or in this one. Other threads compile as always, and so do kernels of other languages and backends.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import triton
from triton.compiler.compiler import ASTSource
from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction

from dist_tune.compiler.worker import STAGES, Made, Observed, timed

FRONT_END = "front_end"
_SWITCH_INTERVAL_S = 1e-3
"""Longest time that a thread keeps the interpreter's lock while others wait. Python's own 5 ms add up in compilers."""
_PATIENCE_S = 10.0
"""Longest wait for the front end of another thread, which may be stuck."""
_MISSING = object()
_thread = threading.local()
"""``job`` of a thread that compiles for a tuning; ``refusal`` of one within ``refused``."""


class SharedContext:
    """A context that the first of several users enters and the last one leaves, on any threads."""

    def __init__(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._n_users = 0
        self._exit = ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Be one of the users meanwhile."""
        with self._lock:
            if self._n_users == 0:
                self._exit.enter_context(self._context())
            self._n_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._n_users -= 1
                if self._n_users == 0:
                    self._exit.close()


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """A method of a class or object, or a name of a module, wrapped meanwhile. If the user has put a wrapper around ours, that stays."""
    before, ours = vars(owner).get(name), wrap(getattr(owner, name, None))
    setattr(owner, name, ours)
    try:
        yield
    finally:
        if getattr(owner, name) is ours:
            delattr(owner, name) if before is None else setattr(owner, name, before)


class FrontEnd:
    """The front end of one tuning's threads, and the TTIR that they have made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[tuple[Any, ...], list[tuple[dict[str, Any], str]]] = {}
        """Source -> the options that were read, with their values, and the TTIR for them."""

    def run(self, source: tuple[Any, ...], options: Any, make: Callable[[Any], Any], *, is_urgent: bool) -> str:
        """TTIR as text. ``make`` is called with options that observe what it reads, and not if TTIR was made for equal ones.

        ``is_urgent``: a launch waits for it, and it waits for no other thread.
        """
        is_mine = not is_urgent and self._lock.acquire(timeout=_PATIENCE_S)
        try:
            for read, text in self._made.get(source, []):
                if all(getattr(options, name, _MISSING) == value for name, value in read.items()):
                    return text
            observed = Observed(options)
            text = str(make(observed))
            self._made.setdefault(source, []).append((observed.read, text))
            return text
        finally:
            if is_mine:
                self._lock.release()


class Job:
    """The compilation of one kernel on this thread."""

    def __init__(self, front_end: FrontEnd, prepare: Callable[[], None], compile_stages: Callable[..., Made], *, is_urgent: bool) -> None:
        self.seconds: dict[str, float] = {}
        """Of each stage that was run."""
        self._front_end = front_end
        self._prepare = prepare
        """Called before the front end."""
        self._compile_stages = compile_stages
        """Called with TTIR, target and options."""
        self._is_urgent = is_urgent
        self._takes_text = False
        self._made: Made | None = None

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Within ``patched``: what this thread compiles meanwhile is this job's."""
        _thread.job = self
        try:
            yield
        finally:
            _thread.job = None

    def add_stages(self, backend: Any, stages: dict[str, Any], options: Any, language: Any) -> None:
        """Put ours in the place of Triton's stages, unless the result of each may be changed on the way."""
        compilation = triton.knobs.compilation
        is_hooked = triton.knobs.runtime.add_stages_inspection_hook or compilation.override or compilation.use_ir_loc
        is_triton_s = tuple(stages) == STAGES and language == triton.backends.compiler.Language.TRITON
        self._takes_text = is_triton_s and not is_hooked and options.ir_override is None
        for name, stage in list(stages.items()):
            own = functools.partial(timed, self.seconds, name, stage)
            stages[name] = functools.partial(self._stage, name, backend.target, options) if self._takes_text else own

    def make_ir(self, own: Callable[..., Any], source: Any, target: Any, options: Any, *rest: Any) -> Any:
        """TTIR of the front end as text, which is all that our stages need."""
        if not self._takes_text:
            return timed(self.seconds, FRONT_END, own, source, target, options, *rest)
        self._prepare()
        build_ahead(source)
        # Triton's identity of a source, and what the backend's own functions are chosen by.
        identity = (source.hash(), str(target), options.arch)
        make = functools.partial(timed, self.seconds, FRONT_END, lambda observed: own(source, target, observed, *rest))
        return self._front_end.run(identity, options, make, is_urgent=self._is_urgent)

    def _stage(self, name: str, target: Any, options: Any, source: Any, metadata: dict[str, Any]) -> str | bytes:
        if self._made is None:
            _thread.job = None  # the backend's stages are asked for again
            try:
                self._made = self._compile_stages(source, target, options)
            finally:
                _thread.job = self
            metadata.update(self._made[1])
            self.seconds.update(self._made[2])
        return self._made[0][name]


_built: set[tuple[str, ...]] = set()
"""Signatures of this process."""


def build_ahead(source: Any) -> None:
    """Build the launcher of a kernel in a thread of its own, unless its form depends on what the compiler makes of the kernel.

    Up to Triton 3.6 a kernel's first load runs a C compiler on its launcher, 0.2 to 0.6 s while other kernels compile, and a launch may
    wait for that. Kernels of one signature share it. Triton keeps it in its disk cache, where the load then finds it.
    """
    try:
        from triton.backends.nvidia.driver import compile_module_from_src, include_dirs, libraries, library_dirs, make_launcher
    except ImportError:  # a Triton that needs none
        return
    signature = tuple(map(str, source.signature.values()))
    if signature in _built or any(each.startswith("tensordesc") for each in signature):
        return
    _built.add(signature)

    def build() -> None:
        constants = {(source.fn.arg_names.index(at),) if isinstance(at, str) else at: value for at, value in source.constants.items()}
        with suppress(Exception):  # what fails here fails again where the kernel is loaded, and becomes a vote there
            text = make_launcher(constants, source.signature, None)
            folders = {"library_dirs": library_dirs(), "include_dirs": include_dirs, "libraries": libraries}
            compile_module_from_src(src=text, name="__triton_launcher", **folders)

    threading.Thread(target=build, name="dist_tune launcher", daemon=True).start()


def _make_ir(own: Any) -> Any:
    @functools.wraps(own)
    def make_ir(*args: Any) -> Any:
        job: Job | None = getattr(_thread, "job", None)
        return own(*args) if job is None else job.make_ir(own, *args)

    return make_ir


def _add_stages(own: Any) -> Any:
    @functools.wraps(own)
    def add_stages(self: Any, stages: dict[str, Any], options: Any, language: Any = None) -> None:
        own(self, stages, options, language)
        if (job := getattr(_thread, "job", None)) is not None:
            job.add_stages(self, stages, options, language)

    return add_stages


@contextmanager
def _patched() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(min(interval_s, _SWITCH_INTERVAL_S))
    with ExitStack() as stack:
        stack.callback(sys.setswitchinterval, interval_s)
        stack.enter_context(replaced(ASTSource, "make_ir", _make_ir))
        for backend in triton.backends.backends.values():
            stack.enter_context(replaced(backend.compiler, "add_stages", _add_stages))
        yield


patched = SharedContext(_patched)
"""While entered, threads with a ``Job`` compile as described."""


# -- launches ----------------------------------------------------------------------------------------------------------

_notes: list[Callable[[Any], None]] = []
_compiling: set[int] = set()
"""Threads that compile inside a launch."""


class NotLoaded(BaseException):
    """Raised in place of a compilation inside a launch. Not an ``Exception``, because it must pass the user's own wrappers."""


class Refusal:
    """The answer of one ``refused`` block."""

    is_raised = False
    """True if a launch came to a compilation, also where a wrapper around the kernel has caught the ``NotLoaded``."""


@contextmanager
def refused() -> Iterator[Refusal]:
    """Launches of this thread raise ``NotLoaded`` where they would compile."""
    before, _thread.refusal = getattr(_thread, "refusal", None), Refusal()
    try:
        with _watched():
            yield _thread.refusal
    finally:
        _thread.refusal = before


@contextmanager
def noted(note: Callable[[Any], None]) -> Iterator[None]:
    """Call ``note(kernel)`` before a launch of any thread compiles a kernel that is not in memory, unless it is refused."""
    with _watched():
        _notes.append(note)
        try:
            yield
        finally:
            _notes.remove(note)


def is_compiling(thread: int) -> bool:
    """True if a launch of this thread compiles; known within ``noted`` only."""
    return thread in _compiling


def _do_compile(own: Any) -> Any:
    @functools.wraps(own)
    def do_compile(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if _async_compile.active_mode.get() is None:  # else Triton is asked, or compiles in the user's threads
            refusal: Refusal | None = getattr(_thread, "refusal", None)
            if refusal is not None:
                refusal.is_raised = True
                raise NotLoaded
            for note in list(_notes):
                note(kernel)
        _compiling.add(ident := threading.get_ident())
        try:
            return own(kernel, *args, **kwargs)
        finally:
            _compiling.discard(ident)

    return do_compile


_watched = SharedContext(lambda: replaced(JITFunction, "_do_compile", _do_compile))
