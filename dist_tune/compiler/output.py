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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import triton
from triton.compiler import code_generator

from dist_tune.compiler.patches import SharedContext, replaced
from dist_tune.compiler.worker import locked

MAX_CHARS = 200_000
"""Kept of one compiler's output: half from its beginning, half from its end."""
_PREFIX = "dist_tune-"
_ALIVE, _LAST_WORDS = "alive", "stderr"
"""Files in the folder: one that its process holds as long as it lives, and what is written to descriptor 2."""
_DAY_S = 86_400.0
_made: list[str] = []
"""The folder, while there is one."""


# -- the folder --------------------------------------------------------------------------------------------------------


def temporary_folder() -> str | None:
    """Its path while a tuning of this process compiles; None if none could be made."""
    return _made[0] if _made else None


def sweep(*, is_own: bool = False) -> None:
    """Delete what killed processes of this user have left. A folder with the last words of a compiler stays for a day.

    ``is_own``: and what this process has made, because it ends now without the ends of its contexts.
    """
    with suppress(OSError):
        root = tempfile.gettempdir()
        # Names first: a pattern of pathlib's takes a full folder milliseconds.
        for folder in [Path(root, name) for name in os.listdir(root) if name.startswith(_PREFIX)]:
            with suppress(OSError):  # another process sweeps, too
                if _is_left(folder) or (is_own and str(folder) in _made and not _has_last_words(folder)):
                    shutil.rmtree(folder, ignore_errors=True)


def _is_left(folder: Path) -> bool:
    if folder.lstat().st_uid != os.getuid() or not (folder / _ALIVE).exists() or _has_last_words(folder):
        return False
    with locked(str(folder / _ALIVE)) as file:
        return file is not None and not isinstance(file, io.BytesIO)


def _has_last_words(folder: Path) -> bool:
    with suppress(FileNotFoundError):
        status = (folder / _LAST_WORDS).lstat()
        return status.st_size > 0 and time.time() - status.st_mtime < _DAY_S
    return False


@contextmanager
def _folder() -> Iterator[None]:
    sweep()
    with ExitStack() as stack:
        with suppress(OSError):  # compilers that need one say so
            _made.append(tempfile.mkdtemp(prefix=_PREFIX))
            stack.callback(shutil.rmtree, _made[0], ignore_errors=True)
            stack.callback(_made.clear)
            mine = os.path.join(_made[0], f"{_ALIVE}.new")
            stack.enter_context(locked(mine))
            os.rename(mine, os.path.join(_made[0], _ALIVE))  # now that it is locked: another process may sweep at any moment
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
        _to(2)((sep.join(map(str, values)) + end).encode())
    else:
        print(*values, sep=sep, end=end)  # noqa: T201  # a compilation that is none of ours


def shortened(text: str) -> str:
    """At most ``MAX_CHARS`` of a text, from its beginning and its end."""
    n_left_out = len(text) - MAX_CHARS
    if n_left_out <= 0:
        return text
    return f"{text[: MAX_CHARS // 2]}\n[{n_left_out} characters left out]\n{text[-MAX_CHARS // 2 :]}"


class QuietTerminal:
    """The redirection of one process, shared by all tunings that compile."""

    def __init__(self) -> None:
        self.redirected = SharedContext(self._redirected)
        """Entered by each tuning; the last one to leave gives the terminal back, with all text that no failed compilation took."""
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
        """Text that was written since there were ``start`` bytes, and not taken before.

        Writers cannot be told apart: of several compilations at work, the first to fail takes it all.
        """
        with self._lock:
            return shortened(_taken(self._file, start).decode(errors="replace")) if self._file is not None else ""

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
                file = Path(temporary_folder() or os.devnull, _LAST_WORDS).open("w+b", buffering=0)  # noqa: SIM115  # closed after it is read
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
        with suppress(OSError):  # descriptor 2 closed by the user
            if os.path.sameopenfile(2, self._file.fileno()):  # else redirected by the user
                os.dup2(terminal, 2)
        with self._lock:
            rest, self._file = _taken(self._file, 0), None  # not before: other threads may write meanwhile
        with suppress(OSError):  # the terminal is gone
            _to(terminal)(rest)


def _taken(file: Any, start: int) -> bytes:
    """Bytes of the file from ``start`` on, overwritten with zeros so that the next reader skips them."""
    # By position, because compilers write at the descriptor's own offset.
    content = os.pread(file.fileno(), os.fstat(file.fileno()).st_size - start, start)
    os.pwrite(file.fileno(), bytes(len(content)), start)
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
