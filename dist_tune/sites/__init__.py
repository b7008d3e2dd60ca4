"""Sites of a tuning: kernels at a key with their candidates, what ranks tell each other of them,
and the journal of what was measured.

Knows candidates, records and compilation; nothing of replays or of the order of a tuning.
"""

from dist_tune.sites.exclusive import in_turn, mark_progress, one_at_a_time
from dist_tune.sites.manifest import LEFT, RankManifest, SiteManifest, reduce_manifests
from dist_tune.sites.restart import TuningJournal
from dist_tune.sites.site import Site, Variant, check_not_capturing, is_fatal, none_left
from dist_tune.sites.sites import Sites

__all__ = [
    "LEFT",
    "RankManifest",
    "Site",
    "SiteManifest",
    "Sites",
    "TuningJournal",
    "Variant",
    "check_not_capturing",
    "in_turn",
    "is_fatal",
    "mark_progress",
    "none_left",
    "one_at_a_time",
    "reduce_manifests",
]
