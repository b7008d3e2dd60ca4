"""One candidate from source to the device, in steps that other threads and other ranks can take
over.

Knows what Triton's compiler makes of a ``Compilable``, and nothing of ranks or search. Triton is
asked once per candidate what it would compile: the answer is the key of the result in its disk
cache, and a function that compiles in any thread without touching a device or holding tensors.
Loading happens on the main thread and without a launch, and must not be put off: CUDA may wait for
running kernels while it loads a module, and one of them may be waiting for this rank.
"""

from __future__ import annotations

import hashlib
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import triton
from triton.runtime import _async_compile

from dist_tune.compiler.compilation import Compilation, Failure, attempt
from dist_tune.errors import FailureKind

_digests: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Of compiled kernels, which Triton keeps for the next tuning in this process: making them anew
took a tenth of its processor
time (logs/tuning-200-cpu).
"""


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


class Asked(BaseException):
    """Triton's answer: the key, a function that compiles, and one that puts the result into the
    kernel's in-memory cache.

    Raised in place of a stand-in, which would stay in that cache for good if it fails. Not an
    ``Exception``, because it must pass the user's own wrappers.
    """


class _AskOnly:
    """Triton's ``AsyncCompileMode`` as a kernel's launch uses it. The same in Triton 3.6 to 3.9."""

    def submit(
        self, key: str, compile_: Callable[[], Any], finalize: Callable[[Any], None], *cleanup: Any
    ) -> NoReturn:
        """Called by Triton in place of compiling."""
        raise Asked(hashlib.sha256(key.encode()).hexdigest(), compile_, finalize)


class Candidate:
    """A config of a launch: its compilation, and its kernel on the device.

    Used on the thread that made it.
    """

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
        return (
            self._loaded is None
            and self.compilation.done.is_set()
            and not isinstance(self.compilation.result, Failure)
        )

    def load(self) -> Resources | Failure | None:
        """Load onto the device without a launch.

        Call it when the compilation is done; it does not wait.
        """
        compiled = self.compilation.result
        # None under the interpreter, and with a hook of the user's.
        if compiled is None or isinstance(compiled, Failure):
            return compiled
        if self._loaded is None:
            self._loaded = attempt(
                lambda: self._load(compiled), FailureKind.LOAD, _int(compiled.metadata, "shared")
            )
        return self._loaded

    def kernel(self) -> str:
        """All that decides what a launch of the compiled kernel does, in a digest that holds in
        this process; empty if unknown.

        Of what came out, so that it holds for every compiler: binary, metadata, constants and types
        of the arguments.
        """
        compiled = self.compilation.result
        binary, metadata = getattr(compiled, "kernel", None), getattr(compiled, "metadata", None)
        if not isinstance(binary, bytes) or metadata is None or not hasattr(metadata, "_asdict"):
            return ""
        if compiled not in _digests:
            # The key and the number of stages are read on the way to the binary, and by nothing
            # afterwards.
            facts = {
                name: value
                for name, value in metadata._asdict().items()
                if name not in ("hash", "num_stages")
            }
            source = [
                getattr(compiled.src, name, None) for name in ("constants", "signature", "attrs")
            ]
            _digests[compiled] = hashlib.sha256(binary + repr((facts, source)).encode()).hexdigest()
        return _digests[compiled]

    def _ask(self, launch: Compilable, config: triton.Config) -> Compilation:
        def ask() -> Any:
            found = launch.compile(config)
            # A future of the user's own.
            return found.result() if isinstance(found, _async_compile.FutureKernel) else found

        token = _async_compile.active_mode.set(_AskOnly())
        try:
            found = attempt(ask)
        except Asked as asked:
            key, compile_, self._finalize = asked.args
            return Compilation(key, compile_)
        finally:
            _async_compile.active_mode.reset(token)
        # Failed, or compiled in this process before.
        return Compilation(getattr(found, "hash", ""), None, found)

    def _load(self, compiled: Any) -> Resources:
        if self._finalize is not None:  # puts it into the in-memory cache of its kernel
            triton_s = inspect.getclosurevars(self._finalize).nonlocals
            launched = triton_s.get("kernel_cache", {}).get(triton_s.get("key"))
            # meanwhile. A graph may hold it, and Triton 3.9 unloads what it frees.
            if isinstance(launched, type(compiled)):
                compiled = launched
            else:
                self._finalize(compiled)
            self._finalize = None
        compiled._init_handles()
        return Resources(
            _int(compiled.metadata, "shared"), _int(compiled, "n_regs"), _int(compiled, "n_spills")
        )


def _int(holder: Any, name: str) -> int:
    value = getattr(holder, name, 0)
    return value if isinstance(value, int) else 0
