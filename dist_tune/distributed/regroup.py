"""After a tuning in which ranks hung: process groups are aborted, and ranks agree over the store to go on with new ones.

Knows the store of a group that may be dead, and torch's groups; nothing of tunings.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dist_tune.distributed.liveness.host_processes import GONE
from dist_tune.distributed.liveness.lives import state_of_rank
from dist_tune.distributed.protocol.parts import absent
from dist_tune.distributed.ranks import Group, Ranks
from dist_tune.errors import MachineError, StoreGoneError
from dist_tune.output import printable

_POLL_S = 0.01
_POLLS_PER_S = 500.0
"""Of all ranks together: one of them may be slow to make its groups."""
_MAX_REASON = 1000
"""Characters of a reason that ranks read."""
_YES = "yes"


class Regroup:
    """One decision of the ranks of a group: does each of them go on after this call, with new process groups?"""

    def __init__(self, store: dist.Store, rank: int, members: tuple[int, ...], call: str) -> None:
        self._store, self._members = store, members
        self._space = f"regroup/{call}"
        self._mine = f"{self._space}/{rank}"

    def refuse(self, why: str) -> str:
        """Decide that ranks do not go on, unless that is decided; what is decided: nothing, or the reason of some rank."""
        told = self._store.compare_set(f"{self._space}/verdict", "", why[:_MAX_REASON]).decode(errors="replace")
        return "" if told == _YES else printable(told[:_MAX_REASON])

    def agree(self, patience_s: float) -> str:
        """Wait for all ranks; nothing if all go on, or the reason why none does. Collective."""
        self._store.set(self._mine, "")
        until = time.monotonic() + patience_s
        while (verdict := self.verdict()) is None:
            if not (missing := self._missing()):
                self._store.compare_set(f"{self._space}/verdict", "", _YES)
            elif time.monotonic() > until:
                self.refuse(f"ranks {missing} did not come within {patience_s:g} s to make new process groups")
            else:
                time.sleep(max(_POLL_S, len(self._members) / _POLLS_PER_S))
        return verdict

    def verdict(self) -> str | None:
        """Nothing if all go on, or the reason why none does, as that some process has ended; None as long as that is open."""
        if self._store.check([f"{self._space}/verdict"]):
            return self.refuse("")
        gone = [rank for rank in self._missing() if state_of_rank(self._store, rank) == GONE]
        return self.refuse(f"the processes of ranks {gone} have ended") if gone else None

    def _missing(self) -> list[int]:
        keys = {f"{self._space}/{rank}": rank for rank in self._members}
        return [keys[key] for key in absent(self._store, list(keys))]


def regroup_of(ranks: Ranks, number: int = 0) -> Regroup | None:
    """The n-th decision after the call that these ranks are in; for any thread. None for a process alone.

    Raises:
        MachineError, StoreGoneError: the store cannot be reached within the deadline.
    """
    return Regroup(ranks._store.clone(), ranks.rank, ranks.members, f"{ranks._place.text}/{number}") if isinstance(ranks, Group) else None


def agree_to_regroup(ranks: Ranks, patience_s: float) -> str:
    """The first decision after the call that these ranks are in, which are several. Collective; returns as ``Regroup.agree``."""
    try:
        regroup = regroup_of(ranks)
    except (MachineError, StoreGoneError) as error:
        return f"rank {ranks.rank}: {error}"  # the others learn that it did not come
    assert regroup is not None
    return regroup.agree(patience_s)


def abort_groups() -> None:
    """Abort all NCCL communicators of this process, which frees what waits in their collectives. For another thread than the waiting one.

    gloo has no abort (torch 2.13: a call without effect): its collectives end by the timeouts that a tuning has lowered.
    """
    if not dist.is_nccl_available():
        return
    found = [group._get_backend(torch.device("cuda")) for group in c10d._world.pg_map if torch.device("cuda") in group._device_types]
    nccl = {id(each): each for each in found if isinstance(each, dist.ProcessGroupNCCL)}
    if nccl:
        first = next(iter(nccl.values()))
        first._group_start()  # as torch's own abort of all groups: one after the other, each may wait for another (pytorch issue 119797)
        for each in nccl.values():
            each.abort()
        first._group_end()
