"""What a rank says of a step that does not end, and how it leaves: message and stacks in its log, word to its peers, exit code 86.

Runs on the watching thread. What may itself wait for ever (a store, the user's functions, a full pipe) runs on threads that are not waited
for long.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING

from dist_tune.compiler import sweep
from dist_tune.distributed import Ranks
from dist_tune.errors import StuckConfigError
from dist_tune.settings import Settings
from dist_tune.warn_once import to_terminal

if TYPE_CHECKING:
    from dist_tune.output import Logger

EXIT_CODE = 86
"""Of a process that ends because a config does not return."""
_PATIENCE_S = 2.0
"""Seconds for a store, or a function of the user's."""


class LastWords:
    """The messages of one tuning's watchdog."""

    def __init__(self, ranks: Ranks, settings: Settings, log: Logger) -> None:
        self.file = 2
        """File descriptor for stacks: the rank's log, or the terminal."""
        self._ranks = ranks
        self._log = log
        self._path = settings.log_dir / f"rank-{ranks.rank}.log"
        self._patience_s = min(_PATIENCE_S, settings.deadline_s / 4)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The log is open for stacks, if there is one."""
        try:
            self.file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:  # the log has told of that
            yield
            return
        try:
            yield
        finally:
            os.close(self.file)
            self.file = 2

    def tell(self, what: str, then: str) -> None:
        """Write the message, with what the watchdog does ``then``, and the stacks of all threads."""
        signs: dict[int, str] = {}
        self._within(lambda: signs.update(self._ranks.last_signs()))
        peers = "; ".join(f"rank {rank} last seen at: {sign}" for rank, sign in signs.items())
        self._say(f"rank {self._ranks.rank}: {what}; {then}. {peers and f'{peers}. '}Stacks of all threads are in {self._path}")
        with suppress(OSError, ValueError, RuntimeError):
            faulthandler.dump_traceback(self.file, all_threads=True)

    def go_on(self) -> None:
        """What was late has ended."""
        self._say(f"rank {self._ranks.rank}: what did not end goes on")

    def release(self, release: Callable[[], None]) -> None:
        """Call the user's functions."""
        if error := self._within(release):
            self._say(f"rank {self._ranks.rank}: release= failed: {type(error).__name__}: {error}")

    def leave(self, what: str, advice: str) -> None:
        """End the process, after word to the peers. Does not return."""
        told = (
            f"rank {self._ranks.rank}: {what}; nothing in the process can end that, and it has left with exit code {EXIT_CODE}. The stacks "
            f"of its threads are in {self._path}. {advice}. DIST_TUNE_DEADLINE_S sets the deadline"
        )
        error, causes = StuckConfigError(told, self._ranks.rank, what), list[str]()
        self._within(lambda: causes.append(self._ranks.end_from_outside(error)))
        self._say(f"{told}. The tuning had been ended before: {causes[0]}" if causes and causes[0] else told)
        self._within(_flush)
        self._within(partial(sweep, is_own=True))
        os._exit(EXIT_CODE)

    def _say(self, text: str) -> None:
        self._log.error(text)
        self._within(lambda: to_terminal(f"dist_tune: {text}\n"))

    def _within(self, call: Callable[[], object]) -> Exception | None:
        """Call on another thread, and go on after ``_PATIENCE_S`` in any case; its error."""
        errors: list[Exception] = []

        def run() -> None:
            try:
                call()
            except Exception as error:  # noqa: BLE001  # of a store that is gone, or of the user's function: this rank leaves all the same
                errors.append(error)

        thread = Thread(target=run, name="dist_tune watchdog's", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            return error
        thread.join(self._patience_s)
        return errors[0] if errors else None


def _flush() -> None:
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        sys.stderr.flush()
