"""What compilers write while a tuning compiles: off the user's terminal, and in one temporary folder that others sweep.

A config that fails to compile can dump hundreds of lines: MLIR from C++ to file descriptor 2, PTX by ``print``. Descriptor 2 leads to a
file meanwhile, past which Python's own stderr is written to the terminal, and Triton's backends print there by ``heard``. If a compiler
aborts the process, its last words stay in the file.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import triton
from triton.compiler import code_generator

from dist_tune.compiler.patches import SharedContext, replaced
from dist_tune.compiler.worker import locked

MAX_CHARS = 200_000
"""Kept of one compiler's output."""
_PREFIX = "dist_tune-"
_FILE = "compilers.stderr"
"""In the folder: what is written to descriptor 2. Its process holds it as long as it lives. Not "stderr": no earlier version held that."""
_DAY_S = 86_400.0
_made: list[IO[bytes]] = []
"""The file, while there is a folder."""


# -- the folder --------------------------------------------------------------------------------------------------------


def temporary_folder() -> str | None:
    """Its path while a tuning of this process compiles; None if none could be made."""
    return os.path.dirname(_made[0].name) if _made else None


def sweep(*, is_own: bool = False) -> None:
    """Delete what killed processes of this user have left. A folder with the last words of a compiler stays for a day.

    ``is_own``: and what this process has made, because it ends now without the ends of its contexts.
    """
    with suppress(OSError):
        root = tempfile.gettempdir()
        # Names first: a pattern of pathlib's takes a full folder milliseconds.
        for folder in [Path(root, name) for name in os.listdir(root) if name.startswith(_PREFIX)]:
            with suppress(OSError):  # another process sweeps, too; or the folder is being made
                words = (folder / _FILE).lstat()
                if folder.lstat().st_uid != os.getuid() or (words.st_size and time.time() - words.st_mtime < _DAY_S):
                    continue
                with locked(str(folder / _FILE)) as file:
                    if (is_own and str(folder) == temporary_folder()) or not (file is None or isinstance(file, io.BytesIO)):
                        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _folder() -> Iterator[None]:
    sweep()
    with ExitStack() as stack:
        with suppress(OSError):  # compilers that need one say so
            folder = tempfile.mkdtemp(prefix=_PREFIX)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            mine = os.path.join(folder, _FILE)
            stack.enter_context(locked(f"{mine}.new"))
            os.rename(f"{mine}.new", mine)  # now that it is locked: another process may sweep at any moment
            _made.append(stack.enter_context(open(mine, "r+b", buffering=0)))
            stack.callback(_made.clear)
        yield
    sweep()  # a rank of this host may have been killed meanwhile


folder_in_use = SharedContext(_folder)
"""Entered by each tuning that compiles; the last one to leave deletes the folder."""


class _TemporaryFiles:
    """Python's ``tempfile`` for Triton's backends, whose files lie in our folder: one that is killed meanwhile leaves them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tempfile, name)

    @staticmethod
    def NamedTemporaryFile(*args: Any, **kwargs: Any) -> Any:
        return tempfile.NamedTemporaryFile(*args, **{"dir": temporary_folder(), **kwargs})  # None: Python looks for one


# -- the terminal ------------------------------------------------------------------------------------------------------


def heard(*values: object, sep: str = " ", end: str = "\n") -> None:
    """``print``, while the terminal is kept quiet to descriptor 2."""
    if quiet_terminal.kept_at:
        _write(2, (sep.join(map(str, values)) + end).encode())
    else:
        print(*values, sep=sep, end=end)  # noqa: T201  # a compilation that is none of ours


class QuietTerminal:
    """The redirection of one process, shared by all tunings that compile."""

    def __init__(self) -> None:
        self._file: Any = None
        self._lock = threading.Lock()

    @property
    def kept_at(self) -> str:
        """Path of the file that descriptor 2 leads to; an aborted process leaves it behind. Empty if not redirected."""
        return str(getattr(self._file, "name", ""))

    def n_bytes(self) -> int:
        """Written so far."""
        with self._lock:
            return os.fstat(self._file.fileno()).st_size if self._file is not None else 0

    def take(self, start: int) -> str:
        """Text that was written since there were ``start`` bytes, and not taken before; the first ``MAX_CHARS`` of it.

        Writers cannot be told apart: of several compilations at work, the first to fail takes it all.
        """
        with self._lock:
            return _taken(self._file, start).decode(errors="replace")[:MAX_CHARS] if self._file is not None else ""

    @contextmanager
    def redirected(self) -> Iterator[None]:
        """Within it, descriptor 2 leads to a file; at its end the terminal has all text that no failed compilation took."""
        _flush()
        with ExitStack() as stack:
            stack.enter_context(replaced(code_generator, "print", lambda own: heard))
            for backend in triton.backends.backends.values():
                module = sys.modules[backend.compiler.__module__]
                stack.enter_context(replaced(module, "print", lambda own: heard))
                stack.enter_context(replaced(module, "tempfile", lambda own: _TemporaryFiles()))
            with suppress(OSError, IndexError):  # no descriptor 2, or no room for a file: compilers write where they always do
                # Opened once, because processes that compile write at its offset, too, also those that an earlier redirection has started.
                file, terminal = _made[0], os.dup(2)
                stack.callback(os.close, terminal)
                os.dup2(file.fileno(), 2)
                self._file = file
                stack.callback(self._restore, terminal)
                with suppress(ValueError):  # closed
                    if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr.fileno() == 2:
                        stack.enter_context(replaced(sys.stderr.buffer, "write", lambda own: partial(_write, terminal)))
            yield

    def _restore(self, terminal: int) -> None:
        _flush()
        with suppress(OSError):  # descriptor 2 closed by the user
            if os.path.sameopenfile(2, self._file.fileno()):  # else redirected by the user
                os.dup2(terminal, 2)
        with self._lock:
            rest, file, self._file = _taken(self._file, 0), self._file, None  # not before: other threads may write meanwhile
            os.ftruncate(file.fileno(), 0)
            os.lseek(file.fileno(), 0, os.SEEK_SET)
        with suppress(OSError):  # the terminal is gone
            _write(terminal, rest)


def _taken(file: Any, start: int) -> bytes:
    """Bytes of the file from ``start`` on, overwritten with zeros so that the next reader skips them."""
    # By position, because compilers write at the descriptor's own offset.
    content = os.pread(file.fileno(), max(0, os.fstat(file.fileno()).st_size - start), start)
    os.pwrite(file.fileno(), bytes(len(content)), start)
    return content.replace(b"\0", b"")


def _write(descriptor: int, content: bytes) -> int:
    """The ``write`` of a binary stream to this descriptor."""
    content = bytes(content)  # a memoryview counts elements
    left = content
    while left:
        left = left[os.write(descriptor, left) :]
    return len(content)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, None, or without flush
            stream.flush()


quiet_terminal = QuietTerminal()
"""One per process, as the terminal is."""
