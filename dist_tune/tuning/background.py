"""The online tuning of one decorated function: a thread beside its calls, from a call that may not
be repeated to the winners.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable

from dist_tune.accelerator import allow_captures, api
from dist_tune.ranks import Calls, run_in_thread
from dist_tune.replays import OnlineRuns
from dist_tune.tuning.tuning import Tuning

_EXIT_S = 2.0
"""Longest wait for the thread at the end of the program."""


class Online:
    """Begun on all ranks in the same call, after its tuning has found that it may not be
    repeated.
    """

    def __init__(
        self, name: str, first: Tuning, calls: Calls, keep: Callable[[Tuning], None]
    ) -> None:
        """``first``: that tuning, whose sites have a config each.

        ``calls``: of the function. ``keep``: called at the end, before it is.
        """
        self._ranks = first.for_thread()
        self._tuning = Tuning(name, self._ranks, first.options, first.settings, calls, first)
        runs = self._tuning.replays
        assert isinstance(runs, OnlineRuns)
        self.runs, self.calls, self._first, self._keep, self._pid = (
            runs,
            calls,
            first,
            keep,
            os.getpid(),
        )
        self._device = api.current_device() if api.is_available() and api.is_initialized() else None
        # Before slots are cleared: where there are no more threads the job goes on as it is.
        self._thread = run_in_thread(self._run, "online")
        atexit.register(self._close)
        for site in first.sites:
            if site.winner is not None and site.record is None:
                if site.is_whole:
                    for slot in site.slots.values():
                        slot.clear()
                runs.use(site, site.configs.index(site.winner))

    def _run(self) -> None:
        try:
            if self._device is not None:
                api.set_device(self._device)  # each thread has its own
                allow_captures()
            self._tuning.tune_in_thread(self._first)
        except BaseException:  # noqa: BLE001  # told; the job has nothing to do with it, and goes on
            self.runs.give_up()
        else:
            self._keep(self._tuning)
        finally:
            atexit.unregister(self._close)
            self._ranks.close()

    def _close(self) -> None:
        """The program ends; a fork of it has no such thread."""
        if self._pid == os.getpid() and self._thread.is_alive():
            self.runs.give_up()
            self._thread.join(_EXIT_S)
            if self.runs.ended_at is None:
                self._tuning.tell_cut_off()
