"""The files of a rank, ``rank-<i>.log`` for people and ``rank-<i>.jsonl`` for programs, and the logger of one tuning.

The log of each rank explains the choice alone; the first rank shows some lines on its terminal. The program's logging hears of ours what it
asks ``logging.getLogger("dist_tune")`` for, and nothing without that. Knows texts and files; nothing of tunings.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partialmethod
from pathlib import Path
from threading import RLock
from typing import IO, TYPE_CHECKING, Any

from dist_tune import __version__
from dist_tune.files import PRIVATE, Rights, make_folder, opener, warn_of_folder, warn_once
from dist_tune.output.terminal import Terminal
from dist_tune.output.words import printable
from dist_tune.settings import Settings

if TYPE_CHECKING:
    from dist_tune.output.story import Story

TRACE = 5
"""Below DEBUG: a line for each timed launch."""
logging.addLevelName(TRACE, "TRACE")
_PROGRAM = logging.getLogger("dist_tune")
if _PROGRAM.level == logging.NOTSET:  # or tables of candidates would stand in the program's log, once for each rank
    _PROGRAM.setLevel(logging.CRITICAL + 1)
_headed: set[tuple[int, Path]] = set()
"""Process and file, of files that have the header of this process."""


class LineFile:
    """A file that lines are added to, opened at the first. One that cannot be written costs one warning, and the rest of its lines."""

    def __init__(self, path: Path, told: str, remedy: str = "", rights: Rights = PRIVATE) -> None:
        """``told``: what it costs that it cannot be written, as the warning begins; ``remedy``: its last sentence."""
        self.path = path
        self.is_over = False
        """True once later lines go nowhere."""
        self._told, self._remedy, self._rights = told, remedy, rights
        self._file: IO[bytes] | None = None
        self._lock = RLock()
        """Lines come from any thread."""

    def write(self, lines: bytes) -> None:
        """Add lines, which outlive this process from then on."""
        with self._lock:
            if self.is_over:
                return
            try:
                if self._file is None:
                    self._file = self._open()
                    lines = self._header() + lines
                while lines:
                    lines = lines[self._file.write(lines) :]
            except (OSError, ValueError) as error:  # a full disk; a path with a null character
                self.close()
                reason = f"{self.path} cannot be written: {getattr(error, 'strerror', None) or error}"
                warn_once(f"{self._told}: {reason}{self._remedy}", topic=f"{self._told} {self.path.parent}")

    def close(self) -> None:
        """Later lines go nowhere."""
        with self._lock:
            self.is_over = True
            file, self._file = self._file, None
            if file is not None:
                with suppress(OSError, ValueError):
                    file.close()

    def _open(self) -> IO[bytes]:
        # A link is not followed: in a folder that others write it may lead to any file of this user's.
        make_folder(self.path.parent, self._rights)
        file = open(self.path, "a+b", buffering=0, opener=opener(self._rights, follows_links=False))  # noqa: SIM115  # until ``close``
        with suppress(OSError):  # an earlier process may have been killed in the midst of a line
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        return file

    def _header(self) -> bytes:
        """Lines before the first one."""
        return b""


class RankFile(LineFile):
    """A file of a rank in the log folder."""

    def __init__(self, path: Path, header: Callable[[], bytes]) -> None:
        """``header``: lines that each process begins with."""
        super().__init__(path, "dist_tune keeps no log", ". DIST_TUNE_LOG_DIR names another folder")
        self._make_header = header

    def _header(self) -> bytes:
        if (mine := (os.getpid(), self.path.absolute())) in _headed:
            return b""
        _headed.add(mine)
        warn_of_folder(self.path.parent, "DIST_TUNE_LOG_DIR")
        return self._make_header()


def run_facts() -> dict[str, Any]:
    """Facts of this process, for the headers of both files: fields of ``RunBegun``. Libraries that are not imported have no version."""
    torch: Any = sys.modules.get("torch")
    versions = {"dist_tune": __version__, "python": platform.python_version()}
    versions |= {name: str(sys.modules[name].__version__) for name in ("torch", "triton") if hasattr(sys.modules.get(name), "__version__")}
    device = platform.machine()
    if torch is not None and torch.cuda.is_available():
        device, versions["cuda"] = torch.cuda.get_device_name(), str(torch.version.cuda)
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    host, *command = (each.encode("utf-8", "replace").decode() for each in (socket.gethostname(), *getattr(sys, "orig_argv", sys.argv)))
    return {"date": date, "host": host, "pid": os.getpid(), "command": command, "device": device, "versions": versions}


class Logger:
    """Writes lines from a least level on; those below cost two comparisons."""

    def __init__(self, write: Callable[[int, str, bool | str], None], least: int, progress: bool | str = False) -> None:
        """``progress``: whether the first rank's terminal shows the lines, or the text that it shows in their place."""
        self._write, self._least, self._progress = write, least, progress

    def bind(self, *, progress: bool | str) -> Logger:
        """The same logger, of which lines are shown."""
        return Logger(self._write, self._least, progress)

    def _log(self, level: int, message: str) -> None:
        if level >= self._least:
            self._write(level, message, self._progress)
        if _PROGRAM.isEnabledFor(level):
            _PROGRAM.log(level, "%s", message, stacklevel=3)

    trace = partialmethod(_log, TRACE)
    """One timed launch."""
    debug = partialmethod(_log, logging.DEBUG)
    """One step of a tuning."""
    info = partialmethod(_log, logging.INFO)
    """A result."""
    warning = partialmethod(_log, logging.WARNING)
    """A problem that the tuning goes on with."""
    error = partialmethod(_log, logging.ERROR)
    """The end of a tuning."""


@contextmanager
def tuning_log(settings: Settings, rank: int, is_first: bool, *, is_verbose: bool = False, story: Story | None = None) -> Iterator[Logger]:
    """The logger of one tuning on this rank; its file is open meanwhile. ``is_first``: the rank that also shows progress.

    ``is_verbose``: it shows all that is worth a line in the file from level INFO on. ``story``: hears of warnings, and
    knows the numbers of sites.
    """
    file_level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    file = RankFile(settings.log_dir / f"rank-{rank}.log", lambda: _header(rank))
    is_all_shown, is_any_shown = is_first and (is_verbose or settings.shown == "verbose"), is_first and settings.shown != "quiet"
    spelled: Callable[..., str] = (lambda line, **_: line) if story is None else story.spelled
    terminal = Terminal("", is_shown=False) if story is None else story.terminal
    is_over = False

    def write(level: int, message: str, progress: bool | str) -> None:
        if level >= file_level:
            # Without lines of level INFO there is none that explains a number.
            text = printable(spelled(message) if file_level <= logging.INFO else message)
            file.write(f"{_stamp(level)} {text}\n".encode())
        if story is not None and level >= logging.WARNING:
            story.told(logging.getLevelName(level), message)
        is_all = is_all_shown and level >= logging.INFO
        if not is_over and (is_all or (is_any_shown and progress)):
            # Numbers are explained in lines that verbose shows.
            text = spelled(message) if is_all else spelled(progress if isinstance(progress, str) else message, for_people=True)
            terminal.line(text)

    try:
        yield Logger(write, min(file_level, logging.DEBUG))
    finally:
        is_over = True
        file.close()


def _stamp(level: int) -> str:
    now = time.time()
    return f"{time.strftime('%H:%M:%S', time.localtime(now))}.{int(now % 1 * 1000):03d} {logging.getLevelName(level):<7}"


def _header(rank: int) -> bytes:
    """The run's header, which is the event ``run`` as people read it."""
    facts = run_facts()
    world = text if (text := os.environ.get("WORLD_SIZE", "")).isdecimal() else "1"
    told = [
        f"run of {facts['date']}: rank {rank} of {world} on {facts['host']}, pid {facts['pid']}, device {facts['device']}",
        ", ".join(f"{name} {text}" for name, text in facts["versions"].items()),
        f"command: {' '.join(facts['command'])}",
    ]
    if os.environ.get("DIST_TUNE_PROGRESS"):  # in the log alone: on the terminal "quiet" says nothing
        told.append("DIST_TUNE_PROGRESS is deprecated: set DIST_TUNE_VERBOSITY=quiet, normal or verbose in its place")
    return "".join(f"{_stamp(logging.INFO)} {printable(each)}\n" for each in told).encode()
