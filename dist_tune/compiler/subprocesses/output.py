"""Keeps compilers' output off the user's terminal.

Knows file descriptors and Python's streams, and nothing of compilers. A config that fails to compile can dump hundreds of
lines: MLIR from C++ to file descriptor 2, PTX by ``print``. While a tuning compiles, descriptor 2 leads to a file. Two methods
``write`` are replaced on the stream objects, so that logging handlers that hold a stream need not notice: that of Python's own
stderr buffer writes past the file to the terminal, and that of the standard streams captures the text of compiling threads.
If a compiler aborts the process, its last words stay in the file: that is why it has a name, which a process killed by a signal
leaves behind for ``sweep``.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from operator import is_not
from typing import Any

from dist_tune.compiler.passes.patches import SharedContext, replaced
from dist_tune.compiler.subprocesses.leftovers import prefix, suffix, sweep

_NONE = (None, None, None)
MAX_CHARS = 200_000
"""Kept of one compiler's output: half from its beginning, half from its end."""


class Capture:
    """The text that one thread prints, and the part of the file that was written through descriptor 2 meanwhile."""

    def __init__(self, file: Any) -> None:
        self.file = file
        """The file that descriptor 2 leads to; None if it is not redirected."""
        self.start = os.fstat(file.fileno()).st_size if file is not None else 0
        self.printed: list[tuple[Any, str]] = []
        """Stream and text; printed at the end of the capture unless taken."""


class QuietTerminal:
    """The redirection of one process, shared by all tunings that compile, and the captures of their threads."""

    def __init__(self) -> None:
        self.redirected = SharedContext(self._redirected)
        """Entered by each tuning; the last one to leave gives the terminal back, with all text that no failed compilation took."""
        self._lock = threading.RLock()
        self._captures: dict[int, Capture] = {}
        """By thread."""
        self._n_users = 0
        """Of the streams' ``write``: the redirection and the captures, of which one may last longer."""
        self._streams: list[Any] = []
        """Those with our ``write``."""
        self._seen: tuple[Any, ...] = _NONE
        """The standard streams when they were last looked at."""
        self._writes = ExitStack()
        self._file: Any = None
        self._terminal = -1

    @property
    def kept_at(self) -> str:
        """Path of the file that descriptor 2 leads to; an aborted process leaves it behind. Empty if not redirected."""
        return str(getattr(self._file, "name", ""))

    @contextmanager
    def capture(self) -> Iterator[Capture]:
        """Keep what this thread prints. Text that is not taken is printed at the end."""
        ident = threading.get_ident()
        with self._lock:
            capture = self._captures[ident] = Capture(self._file)
        try:
            with self._replaced_writes():
                yield capture
        finally:
            del self._captures[ident]
            for stream, text in capture.printed:
                with suppress(OSError, ValueError):  # closed meanwhile
                    stream.write(text)

    def take(self, capture: Capture, *, with_descriptor: bool) -> str:
        """Text that was captured and, ``with_descriptor``, what was written through descriptor 2 since and not taken before.

        Writers to descriptor 2 cannot be told apart: of several compilations at work, the first to fail takes it all.
        """
        text = "".join(text for _, text in capture.printed)
        capture.printed.clear()
        with self._lock:
            if with_descriptor and self._file is not None and capture.file is self._file:
                text += self._read(capture.start).decode(errors="replace")
        n_left_out = len(text) - MAX_CHARS
        if n_left_out <= 0:
            return text
        return f"{text[: MAX_CHARS // 2]}\n[{n_left_out} characters left out]\n{text[-MAX_CHARS // 2 :]}"

    @contextmanager
    def _replaced_writes(self) -> Iterator[None]:
        with self._lock:
            self._n_users += 1
            before, self._seen = self._seen, (sys.stdout, sys.stderr, sys.__stderr__)
            # Since the last capture the user may have put another one in place.
            for stream in _standard_streams() if any(map(is_not, before, self._seen)) else ():
                if not any(stream is each for each in self._streams):
                    with suppress(TypeError, AttributeError):  # a stream that takes no attributes goes on as it is
                        self._writes.enter_context(replaced(stream, "write", partial(self._capturing, stream)))
                        self._streams.append(stream)
                    with suppress(OSError, ValueError):  # closed, or no file
                        if isinstance(stream, io.TextIOWrapper) and stream.fileno() == 2:
                            self._writes.enter_context(replaced(stream.buffer, "write", self._passing))
        try:
            yield
        finally:
            with self._lock:
                self._n_users -= 1
                if self._n_users == 0:
                    self._writes.close()
                    self._streams.clear()
                    self._seen = _NONE

    def _capturing(self, stream: Any, own: Callable[[str], int]) -> Callable[[str], int]:
        def write(text: str) -> int:
            if (capture := self._captures.get(threading.get_ident())) is None:
                return own(text)
            capture.printed.append((stream, text))
            return len(text)

        return write

    def _passing(self, own: Callable[[bytes], int]) -> Callable[[bytes], int]:
        def write(content: bytes) -> int:
            if self._file is None:
                return own(content)
            _write_all(self._terminal, content := bytes(content))  # a memoryview counts elements
            return len(content)

        return write

    @contextmanager
    def _redirected(self) -> Iterator[None]:
        _flush()
        sweep()
        with ExitStack() as stack:
            stack.callback(sweep)  # a rank of this host may have been killed meanwhile
            with suppress(OSError):  # no descriptor 2, or no room for a file: compilers write where they always do
                terminal = os.dup(2)
                stack.callback(os.close, terminal)
                file = tempfile.NamedTemporaryFile(prefix=prefix("stderr"), suffix=suffix())  # noqa: SIM115  # closed in _restore
                os.dup2(file.fileno(), 2)
                self._terminal, self._file = terminal, file
                stack.callback(self._restore)
            stack.enter_context(self._replaced_writes())
            yield

    def _restore(self) -> None:
        _flush()
        with self._lock, suppress(OSError):  # descriptor 2 closed by the user, or the terminal gone
            if os.path.sameopenfile(2, self._file.fileno()):  # else redirected by the user
                os.dup2(self._terminal, 2)
        with self._lock:
            rest = self._read(0)
            file, self._file = self._file, None
        with suppress(OSError):
            _write_all(self._terminal, rest)
        with suppress(OSError):  # deleted meanwhile
            file.close()

    def _read(self, start: int) -> bytes:
        """Bytes of the file from ``start`` on, overwritten with zeros so that the next reader skips them."""
        # By position, because compilers write at the descriptor's own offset.
        content = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size - start, start)
        os.pwrite(self._file.fileno(), bytes(len(content)), start)
        return content.replace(b"\0", b"")


def _standard_streams() -> list[Any]:
    return [stream for stream in (sys.stdout, sys.stderr, sys.__stderr__) if hasattr(stream, "write")]


def _flush() -> None:
    for stream in _standard_streams():
        with suppress(OSError, ValueError, AttributeError):  # closed, or without flush
            stream.flush()


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


quiet_terminal = QuietTerminal()
"""One per process, as the terminal is."""
