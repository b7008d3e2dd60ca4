"""Watch over a tuning: a thread that tells of what never returns, releases it where the user says how, and ends the process otherwise.

None of it runs in a steady call.
"""

from dist_tune.watch.watchdog import Kind, Watchdog
from dist_tune.watch.words import Release, Releases, check_release

__all__ = [
    "Kind",
    "Release",
    "Releases",
    "Watchdog",
    "check_release",
]
