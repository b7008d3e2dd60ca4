"""Keeps what compilers write off the user's terminal.

Knows file descriptors and Python's standard streams, and nothing of compilers. A candidate that fails to compile can dump
hundreds of lines: MLIR from C++ to file descriptor 2, PTX by ``print``. Meanwhile the user's own lines must get through.
So descriptor 2 leads to a file, Python's own stderr is pointed past it at the terminal, and what a marked thread prints
goes to that thread's notes.
"""

from __future__ import annotations

import ctypes
import io
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class _ByThread:
    """A text stream that gives what marked threads write to their notes, and passes on all else."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.notes: dict[int, list[str]] = {}

    def write(self, text: str) -> int:
        notes = self.notes.get(threading.get_ident())
        if notes is None:
            return int(self.stream.write(text) or 0)
        notes.append(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class QuietTerminal:
    """One for the process; entered by each tuning that compiles, and in effect until the last one leaves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_users = 0
        self._file: Any = None
        self._terminal = -1
        self._n_read = 0
        self._passed: list[Any] = []
        self._streams: dict[str, _ByThread] = {}

    def enter(self) -> None:
        """From here on compilers are not heard."""
        with self._lock:
            self._n_users += 1
            if self._n_users == 1:
                self._redirect()

    def leave(self) -> None:
        """Give the terminal back, and with it what nobody took as the output of a failed compilation: it is somebody else's."""
        with self._lock:
            self._n_users -= 1
            if self._n_users == 0:
                self._restore()

    @contextmanager
    def notes(self) -> Iterator[list[str]]:
        """What this thread prints meanwhile; and, for whoever asks by ``unread``, what came to descriptor 2."""
        notes: list[str] = []
        ident = threading.get_ident()
        streams = list(self._streams.values())
        for stream in streams:
            stream.notes[ident] = notes
        try:
            yield notes
        finally:
            for stream in streams:
                stream.notes.pop(ident, None)

    def unread(self) -> str:
        """What came to descriptor 2 since the last time somebody asked. Of several threads that compile, the first takes it all."""
        with self._lock:
            return self._read() if self._file is not None else ""

    def _redirect(self) -> None:
        _flush()
        try:
            self._terminal = os.dup(2)
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed in _restore
            os.dup2(self._file.fileno(), 2)
        except OSError:  # no descriptor 2, or no room for a file: then nothing is kept
            self._file = None
        self._n_read = 0
        # Python writes past the file: whoever holds the stream, a logging handler for one, goes on writing to the terminal.
        self._passed = [raw for raw in map(_raw_of, {id(s): s for s in (sys.stderr, sys.__stderr__)}.values()) if raw is not None]
        if self._file is not None:
            for raw in self._passed:
                raw.__init__(self._terminal, "wb", closefd=False)
        self._streams = {name: _ByThread(stream) for name in ("stdout", "stderr") if (stream := getattr(sys, name)) is not None}
        for name, stream in self._streams.items():
            setattr(sys, name, stream)

    def _restore(self) -> None:
        for name, stream in self._streams.items():
            if getattr(sys, name) is stream:  # and not what somebody else has put there since
                setattr(sys, name, stream.stream)
        self._streams = {}
        if self._file is None:
            return
        _flush()
        os.dup2(self._terminal, 2)
        for raw in self._passed:
            raw.__init__(2, "wb", closefd=False)
        rest = self._read()
        with suppress(OSError):
            os.write(2, rest.encode(errors="replace"))
        os.close(self._terminal)
        self._file.close()
        self._file = None

    def _read(self) -> str:
        ctypes.CDLL(None).fflush(None)  # C's own buffers
        # By position: the descriptor's own offset is where compilers write next.
        text: bytes = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size - self._n_read, self._n_read)
        self._n_read += len(text)
        return text.decode(errors="replace")


def _raw_of(stream: Any) -> Any:
    """The unbuffered file under a stream, if it is Python's own and writes to descriptor 2."""
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
    ctypes.CDLL(None).fflush(None)


quiet_terminal = QuietTerminal()
"""The process has one terminal."""
