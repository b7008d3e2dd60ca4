"""Ranks, and the meetings in which they reduce what each brings, over the c10d store.

Meetings, deadlines, aborts and the work queue: the only user of torch.distributed.
Exchanges values that it does not interpret; imports only the leaves.
"""

from dist_tune.distributed.liveness.outside import Asked, silent_since
from dist_tune.distributed.protocol.calls import Calls, CallsByGroup
from dist_tune.distributed.protocol.reduction import Part, Reduction, Result
from dist_tune.distributed.protocol.verdicts import is_secondary
from dist_tune.distributed.ranks import (
    Ranks,
    check_group,
    device_identity,
    group_of,
    is_symmetric,
    member_ranks,
    n_collectives,
    ranks_of,
    shared_store,
)
from dist_tune.distributed.solo import Solo
from dist_tune.distributed.work_queue import WorkQueue

__all__ = [
    "Asked", "Calls", "CallsByGroup", "Part", "Ranks", "Reduction", "Result", "Solo", "WorkQueue", "check_group", "device_identity",
    "group_of", "is_secondary", "is_symmetric", "member_ranks", "n_collectives", "ranks_of", "shared_store", "silent_since",
]  # fmt: skip
