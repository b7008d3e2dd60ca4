"""Compile and load candidates before anything is measured.

The only user of what Triton's compiler returns. Knows a ``Launch`` and nothing of ranks or search. Loading checks shared
memory, registers and threads without a launch, and it must not happen later: CUDA may wait for running kernels while it
loads a module, and a kernel of the closure may be running that waits for us.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import triton

from dist_tune.launch import Launch


@dataclass(frozen=True, slots=True)
class Resources:
    """What a loaded kernel takes of a multiprocessor."""

    shared_bytes: int
    n_regs: int
    """Registers per thread."""
    n_spills: int
    """Bytes of registers spilled to local memory, per thread."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a candidate cannot run on this rank."""

    reason: str
    """"ExceptionType: message" on one line."""
    output: str = ""
    """What the compiler wrote to the terminal while it failed: PTX, MLIR."""


def load(launch: Launch, config: triton.Config) -> Resources | Failure | None:
    """Compile ``config`` for the arguments of ``launch`` and load it onto the device, without launching it.

    Returns None where nothing is compiled: under the interpreter.
    """
    output: list[str] = []
    try:
        with _terminal_kept(output):
            compiled = launch.compile(config)
            if compiled is None:
                return None
            compiled._init_handles()
    # Whatever a compiler, a loader or a hook of the user's raises becomes a vote: this config cannot run here.
    except Exception as error:  # noqa: BLE001
        return Failure(reason_of(error), "".join(output))
    return Resources(_int(compiled.metadata, "shared"), _int(compiled, "n_regs"), _int(compiled, "n_spills"))


def reason_of(error: BaseException) -> str:
    """An exception on one line, in log and vote."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}"


def _int(holder: Any, name: str) -> int:
    value = getattr(holder, name, 0)
    return value if isinstance(value, int) else 0


@contextmanager
def _terminal_kept(output: list[str]) -> Iterator[None]:
    """Keep what is written to stdout and stderr meanwhile, also by C code: MLIR goes to file descriptor 2.

    It goes into ``output`` if the body raises, and on to the terminal if not: then it is another thread's.
    """
    with ExitStack() as stack:
        kept = [stack.enter_context(_Kept(fd)) for fd in (1, 2)]
        has_failed = True
        try:
            yield
            has_failed = False
        finally:
            for each in kept:
                text = each.end()
                if has_failed:
                    output.append(text.decode(errors="replace"))
                elif text:
                    os.write(each.fd, text)


class _Kept:
    """A file descriptor whose output goes to a file between entering and ``end``."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by __exit__
        self._terminal: int | None = None

    def __enter__(self) -> _Kept:
        _flush()
        with suppress(OSError):  # closed: nothing to keep
            self._terminal = os.dup(self.fd)
            os.dup2(self._file.fileno(), self.fd)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def end(self) -> bytes:
        """Connect the terminal again; returns what was written."""
        _flush()
        if self._terminal is not None:
            os.dup2(self._terminal, self.fd)
            os.close(self._terminal)
        self._file.seek(0)
        return self._file.read()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # a closed or absent stream has nothing to keep
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # C's own buffers
