"""The lines of one tuning on this rank: its log, and what the first rank's terminal shows.

The log is a sink of a loguru of our own. In the program's it would be copied and removed with the
program's sinks, and have messages made that none of these takes. They hear of our lines only where
they ask for severities below all that loguru names:
``logger.add(sys.stderr, level=2, filter="dist_tune", format="{extra[level]} {message}")``.
Knows numbers, texts and files; nothing of kernels, ranks or how facts come about.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache, partialmethod
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import count
from math import isfinite
from threading import RLock
from typing import IO, Any, Literal, get_args

from dist_tune import __version__
from dist_tune.files import Told, make_folder, opener, texts_to_log, warn_once
from dist_tune.log.formatting import amount, closure_name, kernel_and_key, printable, site_names
from dist_tune.log.terminal import Terminal
from dist_tune.settings import Settings

Phase = Literal["discover", "compile", "race", "finals", "apply"]
"""As the fields of ``Seconds`` in a record."""
PHASES: tuple[Phase, ...] = get_args(Phase)
SEVERITIES = {"TRACE": 0, "DEBUG": 1, "INFO": 2, "WARNING": 3, "ERROR": 4}
"""Word of a line -> its severity for loguru, whose own lowest is 5. TRACE: each timed launch."""
_FORMAT = "{time:HH:mm:ss.SSS} {extra[level]:<7} {message}"
_numbers = count()
_headed = Told()
"""Process and file, of files that have the header of this process."""


@cache
def _own_logger() -> Any:
    """The logger of a copy of loguru that no other code of the process has, without sinks."""
    found = find_spec("loguru")
    assert found is not None
    assert found.origin is not None
    name = "dist_tune_loguru"
    spec = spec_from_file_location(
        name, found.origin, submodule_search_locations=[*(found.submodule_search_locations or ())]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.logger.remove()
    return module.logger


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
        self._least = SEVERITIES[settings.log_level.upper()]
        self.is_tracing = self._least == SEVERITIES["TRACE"]
        self.path = settings.log_dir / f"rank-{rank}.log"
        self._number, self._lock = next(_numbers), RLock()
        self._sink: int | None = None
        """Of loguru, from the first line on."""
        self._is_over = False
        self._raw: IO[bytes] | None = None
        self._told = Told()
        self._phase = "discover"

    # -- lines for people --------------------------------------------------------------------------

    def _say(self, level: str, text: str, *, shown: bool | str = False) -> None:
        """``shown``: whether the first rank's terminal shows the line, or the text that it shows in
        its place.
        """
        if SEVERITIES[level] >= self._least:
            self._write(level, self._spelled(text))
        program = sys.modules.get("loguru")
        if program is not None:
            with suppress(Exception):  # of a sink of the program's that asked
                logger = program.logger.bind(level=level)
                logger.log(SEVERITIES[level], printable(self._spelled(text)))
        if self._shows_all and SEVERITIES[level] >= SEVERITIES["INFO"]:
            self.terminal.show([f"dist_tune: {self._spelled(text)}"])
        elif shown:
            text_shown = shown if isinstance(shown, str) else text
            self.terminal.show([f"dist_tune: {self._spelled(text_shown, is_short=True)}"])

    trace = partialmethod(_say, "TRACE")
    """One timed launch."""
    debug = partialmethod(_say, "DEBUG")
    """One step of a tuning."""
    info = partialmethod(_say, "INFO")
    """A result."""
    warning = partialmethod(_say, "WARNING")
    """A problem that the tuning goes on with."""
    error = partialmethod(_say, "ERROR")
    """The end of a tuning."""

    def _write(self, level: str, text: str) -> None:
        """Add a line to the log, which costs one warning where it cannot be written."""
        with self._lock:
            if self._is_over:
                return
            try:
                if self._sink is None:
                    self._open()
                self._log(level, text)
            except Exception as error:  # noqa: BLE001  # no line is worth a tuning
                self._end()
                warn_once(
                    f"dist_tune keeps no log: {self.path} cannot be written:"
                    f" {getattr(error, 'strerror', None) or error}. DIST_TUNE_LOG_DIR names another"
                    " folder",
                    topic=f"no log {self.path.parent}",
                )

    def _open(self) -> None:
        make_folder(self.path.parent)
        self._logger = _own_logger().bind(dist_tune=self._number)
        # A link is not followed: in a folder that others write it may lead to any file of this
        # user's.
        self._sink = self._logger.add(
            str(self.path).replace("{", "{{").replace("}", "}}"),  # it would be formatted
            level=0,
            format=_FORMAT,
            filter=lambda record: record["extra"].get("dist_tune") == self._number,
            catch=False,
            opener=opener(follows_links=False),
        )
        if _headed.is_new((os.getpid(), self.path.absolute())):
            for line in self._header():
                self._log("INFO", line)

    def _log(self, level: str, text: str) -> None:
        self._logger.bind(level=level).log(SEVERITIES[level], printable(text))

    def fileno(self) -> int:
        """Descriptor of the log for what Python cannot write, or that of stderr."""
        with self._lock, suppress(OSError, ValueError):
            if self._raw is None and not self._is_over:
                make_folder(self.path.parent)
                self._raw = open(self.path, "ab", opener=opener(follows_links=False))  # noqa: SIM115  # until ``close``
        return self._raw.fileno() if self._raw is not None else 2

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
            if self._sink is not None:
                with suppress(OSError, ValueError):  # what is left may not fit on the disk
                    self._logger.remove(self._sink)
            raw, self._raw = self._raw, None
            if raw is not None:
                raw.close()

    def _spelled(self, line: str, *, is_short: bool = False) -> str:
        """A line with names of sites in place of their labels; ``is_short``: and with the step's
        name without its module.
        """
        labels = list(self.numbers) if "site=" in line else []
        named = site_names([kernel_and_key(each) for each in labels], labels)
        names = dict(zip(labels, named, strict=True))
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
        self._end()

    def _header(self) -> Sequence[str]:
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
        return (
            f"dist_tune {__version__}: {where}, pid {os.getpid()}, {device}",
            f"  {date}, {named}",
            f"  {' '.join(getattr(sys, 'orig_argv', sys.argv))}",
        )

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

    def site(self, label: str, configs: Sequence[str], n_pruned: int = 0) -> None:
        """A site is tuned; told once for each list of configs."""
        if not self._told.is_new((label, len(configs))):
            return
        number = self.numbers.setdefault(label, len(self.numbers) + 1)
        pruned = f", prune rules took out {n_pruned} more" if n_pruned else ""
        self.debug(f"site {number} = {label}: {amount(len(configs), 'config')}{pruned}")

    def best(self, label: str, ms: float) -> None:
        """Milliseconds of the fastest candidate of a site so far."""
        if isfinite(ms):
            self.terminal.best_ms[label] = ms
