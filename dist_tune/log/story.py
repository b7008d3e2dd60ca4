"""The story of one tuning on this rank: each fact is told once, to one writer, for all who read it.

Programs read it in ``rank-<i>.jsonl``, people in ``rank-<i>.log`` and on the first rank's terminal,
a restart in the journal. The program's logging hears of lines what it asks
``logging.getLogger("dist_tune")`` for, and nothing without that. Knows numbers, texts and files;
nothing of kernels, ranks or how facts come about. Costs a set's look-up in a launch, and nothing in
a steady call.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partialmethod
from math import isfinite
from pathlib import Path
from threading import RLock
from typing import IO, Any

from dist_tune import __version__
from dist_tune.errors import Failures
from dist_tune.files import (
    PRIVATE,
    Rights,
    json_bytes,
    make_folder,
    opener,
    texts_to_log,
    warn_once,
)
from dist_tune.log import events
from dist_tune.log.terminal import Terminal
from dist_tune.log.words import closure_name, printable, site_names
from dist_tune.settings import Settings

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
    """The one writer of a tuning's events and lines on this rank, with the short numbers of its
    sites.
    """

    def __init__(
        self,
        settings: Settings,
        rank: int,
        begun: events.TuningBegun | None = None,
        *,
        is_first: bool = False,
        is_verbose: bool = False,
    ) -> None:
        """``begun``: its first event; without one there are lines alone.

        ``is_first``: with progress on its terminal, or with all lines.
        """
        self.numbers: dict[str, int] = {}
        """Label -> short number."""
        self._begun = begun = begun or events.TuningBegun(
            at=0.0, rank=rank, closure="", world_size=1
        )
        self._is_quiet = settings.shown == "quiet" and not is_verbose
        self.terminal = Terminal(begun.closure, is_shown=is_first and not self._is_quiet)
        self._shows_all = is_verbose or settings.shown == "verbose"
        self._least = logging.getLevelNamesMapping()[settings.log_level.upper()]
        self.is_tracing = self._least <= TRACE
        self._common = {"v": events.EVENTS_VERSION, "at": 0.0, "rank": rank, "tuning": begun.tuning}
        self.path = settings.log_dir / f"rank-{rank}.log"
        self.log_file = LineFile(self.path, "dist_tune keeps no log", header=self._header)
        self._events = LineFile(
            self.path.with_suffix(".jsonl"),
            "dist_tune keeps no log",
            header=lambda: _line(self._run()),
        )
        self._journal: Callable[[bytes], None] | None = None
        self._pending = [_line(vars(begun))]
        self._is_begun = False
        """True once there is something to tell: a site, or an error."""
        self._lock = RLock()
        """Warnings come from any thread."""
        self._sites: dict[str, dict[str, Any]] = {}
        """Label -> fields of the site's event."""
        self._told: set[tuple[type[events.Event], str, int]] = set()
        """Events of candidates that are told once."""
        self._phase: events.Phase = "discover"
        self.emit(events.PhaseBegun, phase=self._phase)

    # -- lines for people --------------------------------------------------------------------------

    def _say(
        self, level: int, text: str, *, shown: bool | str = False, is_event: bool = False
    ) -> None:
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
        if level >= logging.WARNING and not is_event:
            self.emit(events.Told, level=logging.getLevelName(level), text=text)
            self.flush()

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
        sites = (
            [(each["kernel"], each["key"]) for each in self._sites.values()]
            if "site=" in line
            else []
        )
        names = (
            dict(zip(self._sites, site_names(sites, list(self._sites)), strict=True))
            if sites
            else {}
        )
        for label in sorted(names, key=len, reverse=True):  # one label may begin with another
            line = line.replace(f"site={label}", names[label])
        return (
            line.replace(self._begun.closure, closure_name(self._begun.closure))
            if is_short
            else line
        )

    # -- events ------------------------------------------------------------------------------------

    def emit(self, event: type[events.Event], site: str | None = None, /, **fields: Any) -> None:
        """Write an event, of now unless ``at`` says when, and of a site, by its label, if that is
        known; and its line in the log.

        It is on disk at the next ``flush`` after the first site, so that a call with nothing to
        tune leaves none.
        """
        if site is not None:
            if site not in self.numbers:
                return
            fields["site"] = self.numbers[site]
        values = {
            **self._common,
            "at": time.time(),
            "kind": event.model_fields["kind"].default,
            **fields,
        }
        level, text = events.log_line(values)
        if text:
            self._say(level, text, is_event=True)
        try:
            line = _line(values)
        except ValueError:  # a time that is no number: no event is worth a tuning
            return
        with self._lock:
            if self._journal is not None and event in events.OF_JOURNALS:
                self._journal(line)
            if event not in events.OF_JOURNALS_ALONE:
                self._pending.append(line)

    def flush(self) -> None:
        """Write what was added, so that it outlives this process."""
        for text in texts_to_log():
            self.warning(text)
        if self._is_begun and self._pending:
            with self._lock:
                pending, self._pending = self._pending, []
                self._events.write(b"".join(pending))

    def open_journal(self, write: Callable[[bytes], None]) -> None:
        """From here on, what a restart reads is written there, too; a header begins each
        attempt.
        """
        self._journal = write
        write(_line(self._run()))

    def close(self) -> None:
        """Write what is left; the terminal's live line goes, and later lines go nowhere."""
        self.flush()
        self.terminal.end()
        self._events.close()
        self.log_file.close()

    def _header(self) -> bytes:
        level, text = events.log_line(self._run())
        return b"".join(_stamped(level, line) for line in text.split("\n"))

    def _run(self) -> dict[str, Any]:
        """The fields of ``RunBegun``. Libraries that are not imported have no version."""
        torch: Any = sys.modules.get("torch")
        versions = {"dist_tune": __version__, "python": platform.python_version()}
        versions |= {
            name: str(sys.modules[name].__version__)
            for name in ("torch", "triton")
            if hasattr(sys.modules.get(name), "__version__")
        }
        device = platform.machine()
        if torch is not None:
            from dist_tune import accelerator  # here: it imports torch

            if accelerator.api.is_available():
                device, versions["cuda"] = accelerator.name(), str(accelerator.runtime())
        date = datetime.now().astimezone().isoformat(timespec="seconds")
        host, *command = (
            each.encode("utf-8", "replace").decode()
            for each in (socket.gethostname(), *getattr(sys, "orig_argv", sys.argv))
        )
        run = {
            "date": date,
            "host": host,
            "pid": os.getpid(),
            "world_size": self._begun.world_size,
            "command": command,
            "device": device,
        }
        return {
            **self._common,
            "at": time.time(),
            "tuning": "",
            "kind": "run",
            **run,
            "versions": versions,
        }

    # -- the tuning --------------------------------------------------------------------------------

    def phase(self, name: events.Phase) -> None:
        """A phase begins, unless it goes on."""
        if name != self._phase:
            self._phase = name
            self.emit(events.PhaseBegun, phase=name)
            self.flush()
            self.terminal.begin_phase(name)

    def late(self, text: str) -> None:
        """Which rank this one waits for, see ``Terminal``."""
        if not self._is_quiet:
            self.terminal.late(text)

    def broken(
        self, error: str, seconds: Mapping[str, float], n_replays: int, *, is_cut_off: bool = False
    ) -> None:
        """An error, or the program's end, has ended the tuning."""
        self._is_begun = True
        self.emit(
            events.TuningEnded,
            error=error,
            seconds=dict(seconds),
            n_replays=n_replays,
            is_cut_off=is_cut_off,
        )

    # -- sites and candidates ----------------------------------------------------------------------

    def site(self, label: str, named: tuple[str, str], configs: Sequence[str], **more: Any) -> None:
        """A site is tuned.

        ``named``: kernel and key. ``more``: other fields of ``SiteMet``; a known site is told again
        of its ``miss``.
        """
        known = self._sites.get(label, {})
        if known.get("configs") == list(configs) and not more.get("miss"):
            return
        self.numbers.setdefault(label, len(self.numbers) + 1)
        fields = {"n_pruned": 0, "miss": "", "cache_key": "", **known, **more}
        self._sites[label] = {
            **fields,
            "label": label,
            "kernel": named[0],
            "key": named[1],
            "configs": list(configs),
        }
        self.emit(events.SiteMet, label, **self._sites[label])
        self._is_begun = True
        self.flush()

    def dropped(self, failures: Failures) -> None:
        """Candidates cannot run, here or on another rank; each is told once."""
        for label, found in failures.items():
            for candidate, (kind, reason) in found.items():
                if self._is_new(events.Dropped, label, candidate):
                    self.emit(
                        events.Dropped, label, candidate=candidate, failure=str(kind), reason=reason
                    )

    def under_way(self, candidates: Iterable[tuple[str, int]]) -> None:
        """These, (label, candidate), run from here on, and no others."""
        known = [(self.numbers[label], i) for label, i in candidates if label in self.numbers]
        self.emit(events.UnderWay, candidates=known)

    def rung(
        self, label: str, alive: Collection[int], best: tuple[int, float], left: Mapping[int, str]
    ) -> None:
        """After a batch: tell who has left since the last time, if some have.

        ``best``: candidate and its milliseconds.
        """
        new = {i: reason for i, reason in left.items() if self._is_new(events.Ranked, label, i)}
        if isfinite(best[1]):
            self.terminal.best_ms[label] = best[1]
        if new:
            self.emit(
                events.Ranked, label, n_left=len(alive), best=best[0], best_ms=best[1], left=new
            )

    def _is_new(self, event: type[events.Event], label: str, candidate: int) -> bool:
        """True the first time that an event of a known site's candidate is asked for."""
        if is_new := (event, label, candidate) not in self._told and label in self.numbers:
            self._told.add((event, label, candidate))
        return is_new


def _stamped(level: int, text: str) -> bytes:
    """A line of the log: time of day, level and text."""
    now = time.time()
    day = f"{time.strftime('%H:%M:%S', time.localtime(now))}.{int(now % 1 * 1000):03d}"
    return f"{day} {logging.getLevelName(level):<7} {printable(text)}\n".encode()


def _line(event: Mapping[str, Any]) -> bytes:
    """The fields of an event as JSON on a line.

    Not by its model, because validation would take longer than the rest of it.

    Raises:
        ValueError: a number is none.
    """
    line = json_bytes(event)
    if b"NaN" in line or b"Infinity" in line:  # perhaps within a text
        json.dumps(event, allow_nan=False, default=str)
    return line + b"\n"
