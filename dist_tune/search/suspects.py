"""When suspects run, which are candidates that may end the process: behind all others, and each alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dist_tune.search.plan import Replay
from dist_tune.search.site_race import SiteRace


def n_trusted(replays: Sequence[Replay], sites: Mapping[str, SiteRace]) -> int:
    """Replays before the first that runs a suspect; 1 if that is the first, because the next one needs a meeting before it."""
    is_doubtful = (any(trial.candidate in sites[name].standings.suspects for name, trial in each.items()) for each in replays)
    return max(1, next((k for k, each in enumerate(is_doubtful) if each), len(replays)))


def held(sites: Mapping[str, SiteRace]) -> set[str]:
    """Sites whose next trial is a suspect that has to wait: until no other site has trials left, and then for its turn."""
    queued = [name for name, site in sites.items() if site.queue]
    doubtful = [name for name in queued if sites[name].queue[0].candidate in sites[name].standings.suspects]
    return set(doubtful if len(doubtful) < len(queued) else doubtful[1:])
