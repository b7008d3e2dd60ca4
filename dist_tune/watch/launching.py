"""The launch of a candidate as the watchdog sees it. Knows no ranks and no threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dist_tune.watch.steps import Launch
    from dist_tune.watch.watchdog import Watchdog


class Launching:
    """A launch is under way within this block. A class, because a generator would cost three times as much in each launch."""

    __slots__ = ("_before", "_own", "_watchdog")

    def __init__(self, watchdog: Watchdog, own: Launch) -> None:
        self._watchdog = watchdog
        self._own = own

    def __enter__(self) -> None:
        self._before, self._watchdog.launch = self._watchdog.launch, self._own

    def __exit__(self, *error: object) -> None:
        outer, met_at = self._before, self._watchdog.met_at
        # A function's launch around this one is not late for the time of a meeting in here.
        self._watchdog.launch = outer._replace(since=met_at) if outer is not None and outer.since < met_at else outer
        self._watchdog.take_released()
