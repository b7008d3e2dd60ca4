"""``make=``: the process groups and the closure of one decorated function, made anew after a config that never returned.

Knows when ranks go on and what the user's factory must give; nothing of how a rank was freed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dist_tune.distributed import check_group
from dist_tune.errors import Failures, StuckConfigError
from dist_tune.validation import check_ordinary, spelled
from dist_tune.watch import Make

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from dist_tune.tuning.tuning import Tuning

MAX_TIMES = 3
"""Times that one call may go on with new groups; each costs one and a half deadlines."""


class Anew:
    """The factory, and what one call of the closure has been through."""

    def __init__(self, make: Make | None) -> None:
        self.make = make
        self.barred: Failures = {}
        """Candidates that never returned on this rank in this call."""
        self._n_times = 0

    def begin(self, tuning: Tuning, error: StuckConfigError) -> tuple[Callable[..., Any], ProcessGroup | None, bool]:
        """Call the factory on all ranks after a tuning that ended so: the function, the group, and true if it is a new one.

        Raises:
            StuckConfigError: the given one, where some rank cannot go on or its factory failed, or the call has done so too often.
            TypeError: the factory gave something else.
        """
        if self.make is None or not tuning.can_go_on or self._n_times == MAX_TIMES:
            raise error
        self._n_times += 1
        for label, failures in tuning.stuck.items():
            self.barred.setdefault(label, {}).update(failures)
        tuning.begin_anew()
        with tuning.making(error):
            made: Any = self.make()
            function, group = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
            if not callable(function):
                raise TypeError(f"make() must return the function, or the function and its process group; it returned {spelled(made)}")
            check_ordinary(function, "contextual_autotune")
            check_group("the group of make()", group)
        return function, group, isinstance(made, tuple)

    def end(self) -> None:
        """The call is over."""
        self.barred, self._n_times = {}, 0
