"""Watch over a tuning: a thread that tells of what never returns, releases it where the user says how, and ends the process otherwise.

None of it runs in a steady call.
"""

from dist_tune.watch.release import Release, Releases, check_release
from dist_tune.watch.steps import Kind
from dist_tune.watch.watchdog import Watchdog

__all__ = [
    "Kind",
    "Release",
    "Releases",
    "Watchdog",
    "check_release",
]
