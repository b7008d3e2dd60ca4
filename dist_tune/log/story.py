"""The story of one tuning on this rank: each fact is told once, for all who read it.

People read it in ``rank-<i>.log`` and on the first rank's terminal. The program's logging hears of
lines what it asks ``logging.getLogger("dist_tune")`` for, and nothing without that. Knows numbers,
texts and files; nothing of kernels, ranks or how facts come about. Costs a set's look-up in a
launch, and nothing in a steady call.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partialmethod
from math import isfinite
from pathlib import Path
from threading import RLock
from typing import IO, Any, Literal, get_args

from dist_tune import __version__
from dist_tune.files import (
    PRIVATE,
    Rights,
    make_folder,
    opener,
    texts_to_log,
    warn_once,
)
from dist_tune.log.terminal import Terminal
from dist_tune.log.words import amount, closure_name, printable, site_names
from dist_tune.settings import Settings

Phase = Literal["discover", "compile", "race", "finals", "settle"]
"""As the fields of ``Seconds`` in a record."""
PHASES: tuple[Phase, ...] = get_args(Phase)
TRACE = 5
"""Below DEBUG: a line for each timed launch."""
logging.addLevelName(TRACE, "TRACE")
_PROGRAM = logging.getLogger("dist_tune")
# Or tables of candidates would stand in the program's log, once for each rank.
if _PROGRAM.level == logging.NOTSET:
    _PROGRAM.setLevel(logging.CRITICAL + 1)
_headed: set[tuple[int, Path]] = set()
"""Process and file, of files that have the header of this process."""


class LineFile:
    """A file that lines are added to, opened at the first.

    One that cannot be written costs one warning, and the rest of its lines.
    """

    def __init__(
        self,
        path: Path,
        told: str,
        rights: Rights = PRIVATE,
        header: Callable[[], bytes] | None = None,
    ) -> None:
        """``told``: what it costs that it cannot be written, as the warning begins.

        ``header``: the first line of each process.
        """
        self.path = path
        self._told, self._rights, self._header = told, rights, header
        self.is_over = False
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
                    if (
                        self._header
                        and (mine := (os.getpid(), self.path.absolute())) not in _headed
                    ):
                        _headed.add(mine)
                        lines = self._header() + lines
                while lines:
                    lines = lines[self._file.write(lines) :]
            except (OSError, ValueError) as error:  # a full disk; a path with a null character
                self.tell(error, is_open=self._file is not None)
                self.close()

    def tell(self, error: Exception, *, is_open: bool) -> None:
        """It cannot be opened, or written once it ``is_open``."""
        folder = "DIST_TUNE_LOG_DIR" if self._header else "DIST_TUNE_CACHE_DIR"
        text = (
            f"{self._told}: {self.path} cannot be written:"
            f" {getattr(error, 'strerror', None) or error}. {folder} names another folder"
        )
        warn_once(text, topic=f"{self._told} {self.path.parent}")

    def fileno(self) -> int:
        """Its descriptor, for what Python cannot write, or that of stderr."""
        self.write(b"")
        return self._file.fileno() if self._file is not None else 2

    def close(self) -> None:
        """Later lines go nowhere."""
        with self._lock:
            self.is_over = True
            file, self._file = self._file, None
            if file is not None:
                with suppress(OSError, ValueError):
                    file.close()

    def _open(self) -> IO[bytes]:
        # A link is not followed: in a folder that others write it may lead to any file of this
        # user's.
        make_folder(self.path.parent, self._rights)
        file = open(self.path, "a+b", buffering=0, opener=opener(self._rights, follows_links=False))  # noqa: SIM115  # until ``close``
        with suppress(OSError):  # an earlier process may have been killed in the midst of a line
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        return file


class Story:
    """The one writer of a tuning's lines on this rank, with the short numbers of its sites."""

    def __init__(
        self,
        settings: Settings,
        rank: int,
        closure: str = "",
        *,
        world_size: int = 1,
        is_first: bool = False,
        is_verbose: bool = False,
    ) -> None:
        """``closure``: what is tuned, with its module; empty for lines alone.

        ``is_first``: with progress on its terminal, or with all lines.
        """
        self.numbers: dict[str, int] = {}
        """Label -> short number."""
        self._rank, self._closure, self._world_size = rank, closure, world_size
        self._is_quiet = settings.shown == "quiet" and not is_verbose
        self.terminal = Terminal(closure, is_shown=is_first and not self._is_quiet)
        self._shows_all = is_verbose or settings.shown == "verbose"
        self._least = logging.getLevelNamesMapping()[settings.log_level.upper()]
        self.is_tracing = self._least <= TRACE
        self.path = settings.log_dir / f"rank-{rank}.log"
        self.log_file = LineFile(self.path, "dist_tune keeps no log", header=self._header)
        self._sites: dict[str, tuple[tuple[str, str], int]] = {}
        """Label -> kernel and key, and the number of configs."""
        self._phase = "discover"

    # -- lines for people --------------------------------------------------------------------------

    def _say(self, level: int, text: str, *, shown: bool | str = False) -> None:
        """``shown``: whether the first rank's terminal shows the line, or the text that it shows in
        its place.
        """
        if level >= self._least:
            self.log_file.write(_stamped(level, self._spelled(text)))
        if self._shows_all and level >= logging.INFO:
            self.terminal.show([f"dist_tune: {self._spelled(text)}"])
        elif shown:
            text_shown = shown if isinstance(shown, str) else text
            self.terminal.show([f"dist_tune: {self._spelled(text_shown, is_short=True)}"])
        if _PROGRAM.isEnabledFor(level):
            _PROGRAM.log(level, "%s", text, stacklevel=3)

    trace = partialmethod(_say, TRACE)
    """One timed launch."""
    debug = partialmethod(_say, logging.DEBUG)
    """One step of a tuning."""
    info = partialmethod(_say, logging.INFO)
    """A result."""
    warning = partialmethod(_say, logging.WARNING)
    """A problem that the tuning goes on with."""
    error = partialmethod(_say, logging.ERROR)
    """The end of a tuning."""

    def _spelled(self, line: str, *, is_short: bool = False) -> str:
        """A line with names of sites in place of their labels; ``is_short``: and with the step's
        name without its module.
        """
        sites = [named for named, _ in self._sites.values()] if "site=" in line else []
        names = (
            dict(zip(self._sites, site_names(sites, list(self._sites)), strict=True))
            if sites
            else {}
        )
        for label in sorted(names, key=len, reverse=True):  # one label may begin with another
            line = line.replace(f"site={label}", names[label])
        return (
            line.replace(self._closure, closure_name(self._closure))
            if is_short and self._closure
            else line
        )

    def flush(self) -> None:
        """Write what other parts of the program have warned of meanwhile."""
        for text in texts_to_log():
            self.warning(text)

    def close(self) -> None:
        """Write what is left; the terminal's live line goes, and later lines go nowhere."""
        self.flush()
        self.terminal.end()
        self.log_file.close()

    def _header(self) -> bytes:
        """Rank and machine, date and versions, command.

        Libraries that are not imported have no version.
        """
        torch: Any = sys.modules.get("torch")
        versions = {"python": platform.python_version()}
        for name in ("torch", "triton"):
            if hasattr(sys.modules.get(name), "__version__"):
                versions[name] = str(sys.modules[name].__version__)
        device = platform.machine()
        if torch is not None:
            from dist_tune import accelerator  # here: it imports torch

            if accelerator.api.is_available():
                device, versions["cuda"] = accelerator.name(), str(accelerator.runtime())
        where = f"rank {self._rank} of {self._world_size} on {socket.gethostname()}"
        date = datetime.now().astimezone().isoformat(timespec="seconds")
        named = ", ".join(f"{name} {version}" for name, version in versions.items())
        lines = (
            f"dist_tune {__version__}: {where}, pid {os.getpid()}, {device}",
            f"  {date}, {named}",
            f"  {' '.join(getattr(sys, 'orig_argv', sys.argv))}",
        )
        return b"".join(_stamped(logging.INFO, line) for line in lines)

    # -- the tuning --------------------------------------------------------------------------------

    def phase(self, name: Phase) -> None:
        """A phase begins, unless it goes on."""
        if name != self._phase:
            self._phase = name
            self.flush()
            self.terminal.begin_phase(name)

    def late(self, text: str) -> None:
        """Which rank this one waits for, see ``Terminal``."""
        if not self._is_quiet:
            self.terminal.late(text)

    # -- sites -------------------------------------------------------------------------------------

    def site(
        self, label: str, named: tuple[str, str], configs: Sequence[str], n_pruned: int = 0
    ) -> None:
        """A site is tuned, by its kernel and key; told once for each list of configs."""
        if self._sites.get(label) == (named, len(configs)):
            return
        number = self.numbers.setdefault(label, len(self.numbers) + 1)
        self._sites[label] = (named, len(configs))
        pruned = f", prune rules took out {n_pruned} more" if n_pruned else ""
        self.debug(f"site {number} = {label}: {amount(len(configs), 'config')}{pruned}")

    def best(self, label: str, ms: float) -> None:
        """Milliseconds of the fastest candidate of a site so far."""
        if isfinite(ms):
            self.terminal.best_ms[label] = ms


def _stamped(level: int, text: str) -> bytes:
    """A line of the log: time of day, level and text."""
    now = time.time()
    day = f"{time.strftime('%H:%M:%S', time.localtime(now))}.{int(now % 1 * 1000):03d}"
    return f"{day} {logging.getLevelName(level):<7} {printable(text)}\n".encode()
