"""Triton's front end, run by one compiling thread at a time, and its results used again.

From Python to TTIR the compiler is Python and holds the interpreter's lock; the steps after it run beside other threads. Threads that
share the interpreter's lock all leave the front end late; behind a lock of our own, the longest compilations, which come first, go on
early. Candidates that differ only in options that the front end does not read, such as warps and stages, have the same TTIR.
Which options it reads is observed, not assumed.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from triton._C.libtriton import ir
from triton.compiler.compiler import ASTSource

from dist_tune.compiler.passes.patches import SharedContext, replaced
from dist_tune.compiler.subprocesses.leftovers import temporary_folder
from dist_tune.compiler.subprocesses.processes import hand_over

_SWITCH_INTERVAL_S = 1e-3
"""Longest time that a thread keeps the interpreter's lock while others wait. Python's own 5 ms add up in compilers."""

_thread = threading.local()
"""``front_end`` of a thread that compiles for a tuning; other threads compile as always."""


_built: set[tuple[str, ...]] = set()
"""Signatures of this process."""
_built_lock = threading.Lock()


class FrontEndLock:
    """The lock of the front end for the threads of one tuning, and the TTIR that they have made."""

    def __init__(self) -> None:
        self._released = threading.Condition()
        self._holder: int | None = None
        """Ident of the thread that holds the lock."""
        self._n_urgent = 0
        """Threads that wait for the lock and that a launch waits for."""
        self._made: dict[tuple[Any, ...], list[tuple[dict[str, Any], Path]]] = {}
        """Source -> the options that were read, with their values, and the TTIR for them."""

    def acquire(self, *, is_urgent: bool = False) -> None:
        """Wait for the lock, and hold it on this thread. ``is_urgent``: before all that are not."""
        _thread.front_end = self
        with self._released:
            self._n_urgent += is_urgent
            self._released.wait_for(lambda: self._holder is None and (is_urgent or not self._n_urgent))
            self._n_urgent -= is_urgent
            self._holder = threading.get_ident()

    def release(self, ident: int | None = None) -> None:
        """Release the lock if this thread, or the thread ``ident``, holds it."""
        with self._released:
            if self._holder == (ident or threading.get_ident()):
                self._holder = None
                self._released.notify_all()

    def close(self) -> None:
        """Forget the TTIR, and release the lock if a stuck thread holds it: the other threads then see that they can end."""
        self.release(self._holder)
        self._made.clear()

    def find(self, source: tuple[Any, ...], options: Any) -> Path | None:
        """TTIR made for this source with equal values of all options that the front end read."""
        for read, path in self._made.get(source, []):
            if all(hasattr(options, name) and getattr(options, name) == value for name, value in read.items()):
                return path
        return None

    def store(self, source: tuple[Any, ...], read: dict[str, Any], text: str) -> Path | None:
        """Keep TTIR for later candidates, unless this thread has lost the lock because it was stuck, or there is no room: then None."""
        if self._holder != threading.get_ident():
            return None
        try:
            with tempfile.NamedTemporaryFile("w", suffix=".ttir", dir=temporary_folder(), delete=False) as file:
                file.write(text)
            path = Path(file.name)
        except OSError:  # no room: later candidates make it anew
            return None
        self._made.setdefault(source, []).append((read, path))
        return path


class _Observed:
    """A backend's options, and those of them that were read."""

    def __init__(self, options: Any) -> None:
        self.__dict__.update(_options=options, _read={})

    def __getattr__(self, name: str) -> Any:
        value = self._read[name] = getattr(self._options, name)
        return value


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
    with _built_lock:
        if signature in _built or any(each.startswith("tensordesc") for each in signature):
            return
        _built.add(signature)

    def build() -> None:
        constants = {(source.fn.arg_names.index(at),) if isinstance(at, str) else at: value for at, value in source.constants.items()}
        text = make_launcher(constants, source.signature, None)
        compile_module_from_src(
            src=text, name="__triton_launcher", library_dirs=library_dirs(), include_dirs=include_dirs, libraries=libraries
        )

    threading.Thread(target=_attempt, args=[build], name="dist_tune launcher", daemon=True).start()


def _attempt(build: Callable[[], None]) -> None:
    with suppress(Exception):  # what fails here fails again where the kernel is loaded, and becomes a vote there
        build()


def _wrapped(own: Any) -> Any:
    @functools.wraps(own)
    def make_ir(source: Any, target: Any, options: Any, codegen_fns: Any, module_map: Any, context: Any) -> Any:
        front_end: FrontEndLock | None = getattr(_thread, "front_end", None)
        if front_end is None:
            return own(source, target, options, codegen_fns, module_map, context)
        try:
            if source.fn.is_gluon():  # lays data out over warps in the front end, and builds with another builder
                return own(source, target, options, codegen_fns, module_map, context)
            build_ahead(source)
            # Triton's identity of a source, and what the backend's own functions are chosen by.
            identity = (source.hash(), str(target), getattr(options, "arch", None))
            path, module = front_end.find(identity, options), None
            if path is None:
                observed = _Observed(options)
                module = own(source, target, observed, codegen_fns, module_map, context)
                path = front_end.store(identity, observed._read, str(module))
        finally:
            front_end.release()
        if path is not None and (text := hand_over(path, target, options, context)) is not None:
            return text
        if module is not None:
            return module
        module = ir.parse_mlir_module(str(path), context)
        module.context = context  # the module keeps it alive, as Triton's own modules do
        return module

    return make_ir


@contextmanager
def _patched() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(min(interval_s, _SWITCH_INTERVAL_S))
    try:
        with replaced(ASTSource, "make_ir", _wrapped):
            yield
    finally:
        sys.setswitchinterval(interval_s)


one_front_end = SharedContext(_patched)
"""While entered, threads that hold a ``FrontEndLock`` go through the front end as described."""
