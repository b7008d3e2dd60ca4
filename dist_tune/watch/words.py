"""What a rank says and does about a step that does not end: ``release=``, message and stacks in its log, word to its peers, exit code 86.

Runs on the watching thread. What may itself wait for ever (a store, the user's functions, a full pipe) runs on threads that are not waited
for long.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING

import torch

from dist_tune.compiler import sweep
from dist_tune.distributed import Ranks
from dist_tune.errors import StuckConfigError
from dist_tune.files import to_terminal
from dist_tune.settings import Settings
from dist_tune.validation import spelled

if TYPE_CHECKING:
    from dist_tune.output import Logger

EXIT_CODE = 86
"""Of a process that ends because a config does not return."""
_PATIENCE_S = 2.0
"""Seconds for a store, or a function of the user's."""


Releases = Sequence["torch.Tensor | Callable[[], object]"]
"""Flags that spinning kernels wait for, which are filled with ones, and functions, which are called."""


def check_release(given: object) -> None:
    """Refuse what is no sequence of tensors and functions.

    Raises:
        TypeError: it is none, or holds something else.
    """
    if not isinstance(given, list | tuple):
        raise TypeError(f"release must be a list of tensors and functions, got {spelled(given)}")
    for each in given:
        if not isinstance(each, torch.Tensor) and not callable(each):
            raise TypeError(f"release must hold tensors, which are filled with ones, and functions, got {spelled(each)}")


class Release:
    """The releases of one tuning, made ready before anything hangs: a kernel that spins may hold up allocations and new streams."""

    def __init__(self, given: Releases) -> None:
        self._given = given
        flags = [each for each in given if isinstance(each, torch.Tensor)]
        on_gpu = [each for each in flags if each.is_cuda]
        # From pinned memory the copy engine writes them; a kernel that fills them might find no free multiprocessor.
        self._ones = {id(each): torch.ones_like(each, device="cpu", pin_memory=each.is_cuda) for each in flags}
        self._device = on_gpu[0].device if on_gpu else torch.device("cuda") if torch.cuda.is_initialized() else None
        self._stream = torch.cuda.Stream(self._device) if self._device is not None and given else None

    def __bool__(self) -> bool:
        return bool(self._given)

    def __call__(self) -> None:
        """Write all flags and call all functions, on a stream beside the one that hangs."""
        with ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
            for each in self._given:
                if isinstance(each, torch.Tensor):
                    each.copy_(self._ones[id(each)], non_blocking=True)
                else:
                    each()


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
