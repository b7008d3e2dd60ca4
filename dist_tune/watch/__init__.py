"""Watch over a tuning: a thread that tells of what never returns, frees it where that is possible, and ends the process otherwise.

None of it runs in a steady call.
"""

from dist_tune.watch.last_words import limited
from dist_tune.watch.making import making
from dist_tune.watch.release import Release, Releases, check_release
from dist_tune.watch.rescue import Make, Rescue
from dist_tune.watch.steps import Kind
from dist_tune.watch.watchdog import Watchdog

__all__ = [
    "Kind",
    "Make",
    "Release",
    "Releases",
    "Rescue",
    "Watchdog",
    "check_release",
    "limited",
    "making",
]
