"""Takes threads that compile through Triton's front end in turn, and uses again what it has made.

With shared_memory.py, compile.py and compiler.py the users of Triton's compiler. From Python to TTIR the compiler is Python and
holds the interpreter's lock; all that comes after it runs beside other threads. If all threads share the lock, all of them
leave the front end late. In turn, those that came first, which are to take longest, go on. And candidates that differ only in
what the front end does not look at, as warps and stages, have the same TTIR. Which options it looks at is not assumed but watched.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from triton._C.libtriton import ir
from triton.compiler.compiler import ASTSource

from dist_tune.compiler.patches import OnceForAll, replaced

_SWITCH_INTERVAL_S = 1e-3
"""How long a thread keeps the interpreter's lock while others wait; Python's own 5 ms add up where compilers ask for it often."""

_thread = threading.local()
"""``turns`` of a thread that compiles for us; others compile as always."""


class FrontEndLock:
    """Whose turn it is in the front end, for the threads of one tuning; and the TTIR that they have made so far."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._made: dict[tuple[Any, ...], list[tuple[dict[str, Any], Path]]] = {}
        """Source -> the options that were looked at, with their values, and the TTIR for them."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def take(self) -> None:
        """Wait for this thread's turn."""
        self._turn.acquire()
        self._holder, _thread.turns = threading.get_ident(), self

    def pass_on(self, ident: int | None = None) -> None:
        """End the turn of this thread, or of the one that is named, if it is its turn."""
        with self._lock:
            if self._holder is not None and self._holder == (ident or threading.get_ident()):
                self._holder = None
                self._turn.release()

    def close(self) -> None:
        """Forget what was made; and if a thread is stuck in its turn, let the others go on, to see that there is nothing left to do."""
        self.pass_on(self._holder)
        self._made.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def find(self, source: tuple[Any, ...], options: Any) -> Path | None:
        """TTIR made for this source with options that look the same to the front end."""
        for seen, path in self._made.get(source, []):
            if all(hasattr(options, name) and getattr(options, name) == value for name, value in seen.items()):
                return path
        return None

    def keep(self, source: tuple[Any, ...], seen: dict[str, Any], text: str) -> None:
        """Keep TTIR for candidates to come, if it is still this thread's turn: one that was stuck may come back after all."""
        if self._holder != threading.get_ident():
            return
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="dist_tune-")
        path = Path(self._folder.name) / f"{sum(map(len, self._made.values()))}-{self._holder}.ttir"
        path.write_text(text)
        self._made.setdefault(source, []).append((seen, path))


class _Watched:
    """A backend's options, and which of them are looked at."""

    def __init__(self, options: Any) -> None:
        self.__dict__["_options"] = options
        self.__dict__["_seen"] = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_options"], name)
        self.__dict__["_seen"][name] = value
        return value


def _make_ir(own: Any, source: Any, target: Any, options: Any, codegen_fns: Any, module_map: Any, context: Any) -> Any:
    """Triton's ``ASTSource.make_ir`` for a thread whose turn it is."""
    turns: FrontEndLock = _thread.turns
    try:
        if source.fn.is_gluon():  # lays data out over warps in the front end, and builds with another builder
            return own(source, target, options, codegen_fns, module_map, context)
        # What Triton identifies a source by, and what the backend's own functions are chosen by.
        identity = (source.hash(), str(target), getattr(options, "arch", None))
        path = turns.find(identity, options)
        if path is None:
            watched = _Watched(options)
            module = own(source, target, watched, codegen_fns, module_map, context)
            turns.keep(identity, watched._seen, str(module))
            return module
    finally:
        turns.pass_on()
    module = ir.parse_mlir_module(str(path), context)
    module.context = context  # which the module keeps alive, as Triton's own does
    return module


def _wrapped(own: Any) -> Any:
    @functools.wraps(own)
    def make_ir(source: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(_thread, "turns", None) is None:
            return own(source, *args, **kwargs)
        return _make_ir(own, source, *args, **kwargs)

    return make_ir


@contextmanager
def _changed() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(min(interval_s, _SWITCH_INTERVAL_S))
    try:
        with replaced(ASTSource, "make_ir", _wrapped):
            yield
    finally:
        sys.setswitchinterval(interval_s)


in_turn = OnceForAll(_changed)
"""Meanwhile threads that have taken a turn go through the front end as described."""
