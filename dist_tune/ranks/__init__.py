"""Ranks, and the meetings in which they reduce what each brings, over the c10d store.

Meetings, deadlines, aborts and the work queue: the only user of torch.distributed.
Exchanges values that it does not interpret; imports only the leaves.
"""

from dist_tune.ranks.calls import Calls
from dist_tune.ranks.clients import Asked, WorkQueue, run_in_thread, within
from dist_tune.ranks.group import (
    Ranks,
    check_group,
    device_identity,
    group_of,
    is_symmetric,
    member_ranks,
    n_collectives,
)
from dist_tune.ranks.messages import MISSED_ADVICE, Part, Reduction, Result, all_came, is_secondary

__all__ = [
    "MISSED_ADVICE",
    "Asked",
    "Calls",
    "Part",
    "Ranks",
    "Reduction",
    "Result",
    "WorkQueue",
    "all_came",
    "check_group",
    "device_identity",
    "group_of",
    "is_secondary",
    "is_symmetric",
    "member_ranks",
    "n_collectives",
    "run_in_thread",
    "within",
]
