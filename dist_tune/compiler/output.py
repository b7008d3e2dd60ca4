"""Keeps compilers' output off the user's terminal.

A config that fails to compile can dump hundreds of lines: MLIR from C++ to file descriptor 2, PTX by ``print``. While a tuning compiles,
descriptor 2 leads to a file, past which Python's own stderr is written to the terminal, and Triton's backends print by ``heard``.
If a compiler aborts the process, its last words stay in the file.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import triton
from triton.compiler import code_generator

from dist_tune.compiler.leftovers import LAST_WORDS, temporary_folder
from dist_tune.compiler.patches import SharedContext, replaced

MAX_CHARS = 200_000
"""Kept of one compiler's output: half from its beginning, half from its end."""
_thread = threading.local()
"""``capture`` of a thread within one."""


class Capture:
    """The text that backends print on one thread, and the part of the file that was written through descriptor 2 meanwhile."""

    def __init__(self, file: Any) -> None:
        self.file = file
        """The file that descriptor 2 leads to; None if it is not redirected."""
        self.start = os.fstat(file.fileno()).st_size if file is not None else 0
        self.printed: list[str] = []
        """Printed at the end of the capture unless taken."""


def heard(*values: object, sep: str = " ", end: str = "\n") -> None:
    """``print``, within a capture of this thread kept in it."""
    capture: Capture | None = getattr(_thread, "capture", None)
    if capture is None:
        print(*values, sep=sep, end=end)  # noqa: T201  # a compilation that is none of ours
    else:
        capture.printed.append(sep.join(map(str, values)) + end)


def shortened(text: str) -> str:
    """At most ``MAX_CHARS`` of a text, from its beginning and its end."""
    n_left_out = len(text) - MAX_CHARS
    if n_left_out <= 0:
        return text
    return f"{text[: MAX_CHARS // 2]}\n[{n_left_out} characters left out]\n{text[-MAX_CHARS // 2 :]}"


class _TemporaryFiles:
    """Python's ``tempfile`` for Triton's backends, whose files lie in our folder: one that is killed meanwhile leaves them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tempfile, name)

    @staticmethod
    def NamedTemporaryFile(*args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("dir", temporary_folder())  # None: Python looks for one
        return tempfile.NamedTemporaryFile(*args, **kwargs)


class QuietTerminal:
    """The redirection of one process, shared by all tunings that compile, and the captures of their threads."""

    def __init__(self) -> None:
        self.redirected = SharedContext(self._redirected)
        """Entered by each tuning; the last one to leave gives the terminal back, with all text that no failed compilation took."""
        self._lock = threading.Lock()
        self._file: Any = None

    @property
    def kept_at(self) -> str:
        """Path of the file that descriptor 2 leads to; an aborted process leaves it behind. Empty if not redirected."""
        return str(getattr(self._file, "name", ""))

    @contextmanager
    def capture(self) -> Iterator[Capture]:
        """Keep what backends print on this thread. Text that is not taken is printed at the end, as a dump that the user has asked for."""
        with self._lock:
            capture = _thread.capture = Capture(self._file)
        try:
            yield capture
        finally:
            _thread.capture = None
            if capture.printed:
                with suppress(OSError, ValueError):  # closed meanwhile
                    heard("".join(capture.printed), end="")

    def take(self, capture: Capture, *, with_descriptor: bool) -> str:
        """Text that was captured and, ``with_descriptor``, what was written through descriptor 2 since and not taken before.

        Writers to descriptor 2 cannot be told apart: of several compilations at work, the first to fail takes it all.
        """
        text = "".join(capture.printed)
        capture.printed.clear()
        with self._lock:
            if with_descriptor and self._file is not None and capture.file is self._file:
                text += self._read(capture.start).decode(errors="replace")
        return shortened(text)

    @contextmanager
    def _redirected(self) -> Iterator[None]:
        _flush()
        with ExitStack() as stack:
            stack.enter_context(replaced(code_generator, "print", lambda own: heard))
            for backend in triton.backends.backends.values():
                module = sys.modules[backend.compiler.__module__]
                stack.enter_context(replaced(module, "print", lambda own: heard))
                stack.enter_context(replaced(module, "tempfile", lambda own: _TemporaryFiles()))
            with suppress(OSError):  # no descriptor 2, or no room for a file: compilers write where they always do
                terminal = os.dup(2)
                stack.callback(os.close, terminal)
                file = Path(temporary_folder() or os.devnull, LAST_WORDS).open("w+b", buffering=0)  # noqa: SIM115  # closed after it is read
                stack.callback(file.close)
                os.dup2(file.fileno(), 2)
                self._file = file
                stack.callback(self._restore, terminal)
                for stream in {id(each): each for each in (sys.stderr, sys.__stderr__)}.values():
                    with suppress(OSError, ValueError):  # closed, or no file
                        if isinstance(stream, io.TextIOWrapper) and stream.fileno() == 2:
                            stack.enter_context(replaced(stream.buffer, "write", lambda own: _to(terminal)))
            yield

    def _restore(self, terminal: int) -> None:
        _flush()
        with self._lock:
            with suppress(OSError):  # descriptor 2 closed by the user
                if os.path.sameopenfile(2, self._file.fileno()):  # else redirected by the user
                    os.dup2(terminal, 2)
            rest = self._read(0)  # not before: other threads may write meanwhile
            self._file = None
            with suppress(OSError):  # the terminal is gone
                _to(terminal)(rest)

    def _read(self, start: int) -> bytes:
        """Bytes of the file from ``start`` on, overwritten with zeros so that the next reader skips them."""
        # By position, because compilers write at the descriptor's own offset.
        content = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size - start, start)
        os.pwrite(self._file.fileno(), bytes(len(content)), start)
        return content.replace(b"\0", b"")


def _to(descriptor: int) -> Callable[[bytes], int]:
    """The ``write`` of a binary stream to this descriptor."""

    def write(content: bytes) -> int:
        content = bytes(content)  # a memoryview counts elements
        left = content
        while left:
            left = left[os.write(descriptor, left) :]
        return len(content)

    return write


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stderr__):
        with suppress(OSError, ValueError, AttributeError):  # closed, None, or without flush
            stream.flush()  # type: ignore[union-attr]


quiet_terminal = QuietTerminal()
"""One per process, as the terminal is."""
