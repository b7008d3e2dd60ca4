"""Trial launches of calls that count: each costs the host little more than a steady launch.

While a call tries a candidate, the kernel's cache holds a copy of its config, by which the patched
launch finds the ``Turn``. What is out of the ordinary (a kernel that is not loaded for these
arguments, an error, a capture) takes the ``LongWay``. Knows nothing of other ranks.
"""

from __future__ import annotations

from copy import copy
from threading import get_ident
from typing import Any, Protocol

from dist_tune.compiler import NotLoaded
from dist_tune.launches import Listener, interception
from dist_tune.measure import Clock, Span, is_capturing
from dist_tune.sites import Site

_MOST = 4
"""Launches of a site that are timed in one call: layers of a model are alike, and each time is read
by a thread beside the job.
"""


class LongWay(Listener, Protocol):
    """What hears the launches of a call, and makes those that are out of the ordinary."""

    functions: list[tuple[str, int]]
    """Under way, with their candidates."""
    refusing: set[int]
    """Threads whose launch may not compile."""
    refused: set[int]
    """Those of them that would have."""

    def launch_in_use(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a launch with what is in use."""

    def launch_otherwise(
        self,
        site: Site,
        index: int,
        call: tuple[Any, tuple[Any, ...], dict[str, Any]],
        error: BaseException,
    ) -> Any:
        """Make a launch whose candidate has failed, or is not compiled."""

    def nest(self, label: str) -> None:
        """A launch of this site is part of the functions under way."""


class Turn:
    """A candidate at a site, in the calls that try it."""

    def __init__(self, trials: LongWay, clock: Clock, site: Site, index: int) -> None:
        own = site.configs[index]
        self.site, self.index = site, index
        self.config = copy(own)
        """An object of its own: several sites may share theirs."""
        self.is_timed = False
        self.n_launches = 0
        """In the call under way."""
        self.spans: list[Span | None] = []
        """Of these launches; None of one whose time is not the kernel's."""
        self._trials, self._clock = trials, clock
        self._own, self._kwargs = own, own.all_kwargs()

    def begin(self, *, is_timed: bool) -> None:
        """A call begins."""
        self.is_timed, self.n_launches, self.spans = is_timed, 0, []

    def __call__(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In place of a launch with the config."""
        trials, clock, site = self._trials, self._clock, self.site
        if (
            interception.listener_here() is not trials
            or kwargs.get("warmup")
            or (clock.is_cuda and is_capturing())
        ):
            return trials.launch_in_use(kernel, args, kwargs)
        kernel.best_config, thread, error = self._own, get_ident(), None
        is_inner = thread in trials.refusing  # a grid may launch another kernel
        trials.refusing.add(thread)
        is_timed = self.is_timed and len(self.spans) < _MOST
        span = clock.span(is_covered=site.has_gaps) if is_timed else None
        try:
            if span is None:
                value = kernel.fn.run(*args, **kwargs, **self._kwargs)
            else:
                span.begin()
                value = kernel.fn.run(*args, **kwargs, **self._kwargs)
                span.end()
                if clock.has_gap(span):
                    site.has_gaps, span = True, None
        except (Exception, NotLoaded) as raised:  # noqa: BLE001  # any error of a launch becomes a vote
            error = raised
        finally:
            if not is_inner:
                trials.refusing.discard(thread)
        if thread in trials.refused:  # also where a wrapper around the kernel has caught that
            trials.refused.discard(thread)
            error = NotLoaded()
        if error is not None:
            try:
                return trials.launch_otherwise(site, self.index, (kernel, args, kwargs), error)
            finally:
                del error  # it holds this frame, and so the tensors of the launch
        self.n_launches += 1
        if is_timed:
            self.spans.append(span)
        if trials.functions:
            trials.nest(site.label)
        return value
