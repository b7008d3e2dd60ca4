"""Keeps what compilers write off the user's terminal.

Knows file descriptors and Python's standard streams, and nothing of compilers. A candidate that fails to compile can dump
hundreds of lines: MLIR from C++ to file descriptor 2, PTX by ``print``. Meanwhile the user's own lines must get through.
So descriptor 2 leads to a file, Python's own stderr is pointed past it at the terminal, and what a listening thread prints
is kept until it says whose that is. If a compiler ends the process, its last words are still in that file.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

MAX_CHARS = 200_000
"""Of one compiler's output that are kept: half from its beginning, half from its end."""
_STREAMS = ("stdout", "stderr")


class Heard:
    """What one thread prints, and what comes to descriptor 2 meanwhile."""

    def __init__(self, file: Any) -> None:
        self.file = file
        """Where descriptor 2 leads; None if that is not kept."""
        self.start = os.fstat(file.fileno()).st_size if file is not None else 0
        """Where in there it began to listen."""
        self.printed: list[tuple[str, str]] = []
        """Stream and text; goes to the terminal in the end, unless taken."""


class _ByThread:
    """A text stream that keeps what listening threads write, and passes on all else."""

    def __init__(self, stream: Any, name: str, listening: dict[int, Heard]) -> None:
        self.stream = stream
        self._name = name
        self._listening = listening

    def write(self, text: str) -> int:
        heard = self._listening.get(threading.get_ident())
        if heard is None:
            return int(self.stream.write(text) or 0)
        heard.printed.append((self._name, text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class QuietTerminal:
    """One for the process; entered by each tuning that compiles, and in effect until the last one leaves."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._n_users = 0
        self._listening: dict[int, Heard] = {}
        self._file: Any = None
        self._terminal = -1
        self._taken: list[tuple[int, int]] = []
        self._passed: list[tuple[Any, Any]] = []

    @property
    def kept_at(self) -> str:
        """Where descriptor 2 leads meanwhile; if the process is aborted, its last words are there. Empty if nowhere else."""
        return str(getattr(self._file, "name", ""))

    def enter(self) -> None:
        """From here on compilers are not heard."""
        with self._lock:
            if self._n_users == 0:
                self._redirect()
                self._wrap()
            self._n_users += 1

    def leave(self) -> None:
        """Give the terminal back, and with it what nobody took as the output of a failed compilation: it is somebody else's."""
        with self._lock:
            self._n_users -= 1
            if self._n_users == 0:
                self._restore()
                self._unwrap()

    @contextmanager
    def listen(self) -> Iterator[Heard]:
        """Keep what this thread prints until the end, and then print it unless somebody took it."""
        ident = threading.get_ident()
        with self._lock:
            heard = self._listening[ident] = Heard(self._file)
            self._wrap()  # also where the user has put another stream in its place
        try:
            yield heard
        finally:
            with self._lock:
                del self._listening[ident]
                self._unwrap()
            for name, text in heard.printed:
                with suppress(OSError, ValueError, AttributeError):  # a closed or absent stream, as for print itself
                    getattr(sys, name).write(text)

    def take(self, heard: Heard, *, with_descriptor: bool) -> str:
        """What was printed, and with it what came to descriptor 2 since and was not taken: it is that of a failed compilation.

        Nobody can tell who wrote to descriptor 2: of several that compile, the first to fail takes it all.
        """
        printed = "".join(text for _, text in heard.printed)
        heard.printed.clear()
        with self._lock:
            if with_descriptor and self._file is not None and heard.file is self._file:
                printed += self._read(heard.start).decode(errors="replace")
        n_left_out = len(printed) - MAX_CHARS
        if n_left_out <= 0:
            return printed
        return f"{printed[: MAX_CHARS // 2]}\n[{n_left_out} characters left out]\n{printed[-MAX_CHARS // 2 :]}"

    # -- Python's streams ----------------------------------------------------------------------------------------

    def _wrap(self) -> None:
        for name in _STREAMS:
            stream = getattr(sys, name)
            if stream is not None and not isinstance(stream, _ByThread):
                setattr(sys, name, _ByThread(stream, name, self._listening))

    def _unwrap(self) -> None:
        # A thread that goes on after all have left is still kept quiet.
        if self._n_users == 0 and not self._listening:
            for name in _STREAMS:
                if isinstance(stream := getattr(sys, name), _ByThread):
                    setattr(sys, name, stream.stream)

    # -- descriptor 2 --------------------------------------------------------------------------------------------

    def _redirect(self) -> None:
        _flush()
        self._taken = []
        try:
            self._terminal = os.dup(2)
        except OSError:  # no descriptor 2: nothing to keep
            return
        try:
            self._file = tempfile.NamedTemporaryFile(prefix=f"dist_tune-{os.getpid()}-stderr-")  # noqa: SIM115  # closed in _restore
        except OSError:  # no room for a file: then nothing is kept
            os.close(self._terminal)
            return
        os.dup2(self._file.fileno(), 2)
        # Python writes past the file: whoever holds the stream, a logging handler for one, goes on writing to the terminal.
        raws = {id(raw): raw for raw in map(_raw_of, (sys.stderr, sys.__stderr__)) if raw is not None}
        self._passed = [(raw, raw.name) for raw in raws.values()]
        for raw, _ in self._passed:
            raw.__init__(self._terminal, "wb", closefd=False)

    def _restore(self) -> None:
        if self._file is None:
            return
        _flush()
        with suppress(OSError):  # the user has closed descriptor 2, or put something else there: theirs now
            if os.path.sameopenfile(2, self._file.fileno()):
                os.dup2(self._terminal, 2)
        for raw, name in self._passed:
            with suppress(OSError):  # closed meanwhile
                raw.__init__(2, "wb", closefd=False)
                raw.name = name
        rest = self._read(0)
        with suppress(OSError):
            while rest:
                rest = rest[os.write(self._terminal, rest) :]
        os.close(self._terminal)
        with suppress(OSError):  # somebody has cleaned up in the folder of temporary files
            self._file.close()
        self._file, self._passed = None, []

    def _read(self, start: int) -> bytes:
        """What came from ``start`` on and was not taken before."""
        parts = []
        end = os.fstat(self._file.fileno()).st_size
        for taken_from, taken_to in [*sorted(self._taken), (end, end)]:
            if start < taken_from:
                # By position: the descriptor's own offset is where compilers write next.
                parts.append(os.pread(self._file.fileno(), taken_from - start, start))
                self._taken.append((start, taken_from))
            start = max(start, taken_to)
        return b"".join(parts)


def _raw_of(stream: Any) -> Any:
    """The unbuffered file under a stream, if it is Python's own and writes to descriptor 2."""
    while isinstance(stream, _ByThread):
        stream = stream.stream
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)  # python -u has no buffer between
    with suppress(OSError, ValueError):
        if type(raw) is io.FileIO and raw.fileno() == 2:
            return raw
    return None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # a closed or absent stream has nothing to keep
            stream.flush()


quiet_terminal = QuietTerminal()
"""The process has one terminal."""
