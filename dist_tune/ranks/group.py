"""The ranks that decide together: one process alone, or the members of a process group.

With the meetings in this folder the only user of torch.distributed. Knows nothing of kernels,
configs or times: what is exchanged is text. Meetings go over a clone of the c10d store and not over
a process group, because a deadline that expires there breaks nothing: a gloo group that timed out
is dead, and an NCCL communicator may take the process with it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from hashlib import sha256
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dist_tune.accelerator import api
from dist_tune.errors import DistTuneError
from dist_tune.ranks.calls import Calls
from dist_tune.ranks.clients import WorkQueue, own_client
from dist_tune.ranks.meetings import Meetings
from dist_tune.validation import spelled

_generations: Counter[str] = Counter()
"""Objects made for each group so far: the store may outlive it, as torchrun's does, and a new one
leaves older keys alone.
"""

_REST_S = 0.02
"""Longest pause between two looks for a verdict beside a step: 1000 looks a second cost a
host-bound one a tenth of its time.
"""

_calls: dict[tuple[int, ...], dict[str, Calls]] = {}
"""By the members that decide, none for a process alone: closures may be decorated anew, and groups
made anew.
"""


class Ranks(Meetings):
    """This process alone (``group`` None), or the ranks of a process group.

    One per group and process: see ``group_of``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        deadline_s: float = 0.0,
        *,
        counts_collectives: bool = True,
    ) -> None:
        """``counts_collectives``: false for a thread beside the step, whose collectives tell
        nothing of its meetings.
        """
        self._counts_collectives = counts_collectives
        self._n_captured = 0
        """Collectives that were issued in captures."""
        self._n_before: int | None = None
        """``n_issued`` before the capture that is under way."""
        self._ref = None if group is None else ref(group)
        if group is None:
            # Its rank names its log, also where other processes tune beside it.
            rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
            super().__init__(None, rank, (rank,), deadline_s)
        else:
            members = tuple(dist.get_process_group_ranks(group))
            # Groups of other members may have the same name.
            name = f"dist_tune/{group.group_name}/{sha256(str(members).encode()).hexdigest()[:16]}"
            _generations[name] += 1
            # Held until this process ends, which may be its server: peers answer until then, and
            # torch tells each of a lost one at length.
            self._job_store = c10d._get_default_store()
            client = own_client(self._job_store)
            life = f"{name}/{_generations[name]}"
            super().__init__(dist.PrefixStore(life, client), dist.get_rank(), members, deadline_s)
        self.activity.calls = _calls.setdefault(() if group is None else self.members, {})
        self.is_alone = group is None
        """True of a process that decides alone, of which there may be others beside it."""
        self.n_local = int(os.environ.get("LOCAL_WORLD_SIZE") or 0)
        """Ranks of the job on this host, as torchrun says; 0 without it."""
        n_local = self.n_local or len(self.members)
        # Ranks of a host have consecutive numbers.
        here = [member for member in self.members if member // n_local == self.rank // n_local]
        self.neighbours = here.index(self.rank), len(here)
        """Position of this rank among the members on its host, as far as it knows, and how many
        these are.
        """

    @property
    def _group(self) -> dist.ProcessGroup | None:
        """The process group; not kept alive, so that destroying it frees peers, and the
        interpreter's end finds no gloo thread of it.
        """
        return None if self._ref is None else self._ref()

    @property
    def is_first(self) -> bool:
        """True on the rank that brings prior times and spells candidates out."""
        return self.rank == self.members[0]

    @property
    def writes_progress(self) -> bool:
        """True on the rank that writes to the terminal; of processes that tune each alone beside
        one another, on rank 0.
        """
        return self.rank == (0 if self.is_alone else self.members[0])

    @property
    def n_issued(self) -> int:
        """Collectives that this rank has issued on the group so far; 0 where its backend does not
        count.
        """
        if self._n_before is not None:
            return self._n_before
        return self._n_counted() - self._n_captured

    def _n_counted(self) -> int:
        group = self._group if self._counts_collectives else None
        return _n_issued(group) if group is not None else 0

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Collectives that are issued meanwhile are not made, and on some rank perhaps only in part
        issued: they do not count, and no peer hears of them.
        """
        self._n_before = self.n_issued
        try:
            yield
        finally:
            self._n_captured = self._n_counted() - self._n_before
            self._n_before = None

    @property
    def n_of_process(self) -> int:
        """Collectives that this process has issued on all groups."""
        return n_collectives() if self._counts_collectives else 0

    def for_thread(self) -> Ranks:
        """The same ranks for meetings of another thread, which may last as long as the job.

        All ranks ask in the same call.
        """
        ranks = Ranks(self._group, self.deadline_s, counts_collectives=False)
        ranks.rest_s = _REST_S
        ranks.gather_s = self.gather_s
        return ranks

    def work_queue(self, n_tasks: int) -> WorkQueue:
        """The queue of one call: every rank makes it. Raises ``StoreGoneError``."""
        calls = self.calls("work queues")
        calls.n_calls += 1
        return WorkQueue(dist.PrefixStore(f"work/{calls.n_calls}", own_client(self._root)), n_tasks)

    def align(self) -> None:
        """Queue a tiny all-reduce, so that all devices start the replay together.

        Does not wait on the host.

        Nothing without a CUDA group: host clocks measure each rank on its own, and the closure's
        collectives align it.
        """
        group, cuda = self._group, torch.device("cuda")
        if (
            group is None
            or not torch.cuda.is_available()
            or cuda not in group._device_types
            or not dist.is_nccl_available()
        ):
            return
        if isinstance(group._get_backend(cuda), dist.ProcessGroupNCCL):
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)

    @contextmanager
    def short_timeouts(self) -> Iterator[None]:
        """Lower the timeouts of all process groups of this process, and put them back after.

        Only while all ranks are tuning.

        A peer that waits in a collective of the closure for a rank that raised can be freed by
        nothing else. gloo's to the deadline; others to four times the deadline, because the process
        is gone when NCCL's expires.
        """
        with ExitStack() as stack:
            backends = [] if self.is_alone else _backends()
            for backend in backends:
                is_gloo = dist.is_gloo_available() and isinstance(backend, dist.ProcessGroupGloo)
                short, before = (
                    timedelta(seconds=self.deadline_s * (1.0 if is_gloo else 4.0)),
                    backend.options._timeout,
                )
                if before > short:
                    stack.callback(backend._set_default_timeout, before)
                    backend._set_default_timeout(short)
            yield


def _backends(*groups: dist.ProcessGroup) -> list[Any]:
    """Backends of these groups, or of all of this process, one for each kind of device, whose
    timeout can be set.
    """
    groups = groups or tuple(c10d._world.pg_map)
    found = {
        id(backend): backend
        for group in groups
        for device in group._device_types
        if (backend := group._get_backend(device))
    }
    return [
        backend
        for backend in found.values()
        if hasattr(backend, "_set_default_timeout") and hasattr(backend, "options")
    ]


def member_ranks(group: dist.ProcessGroup | None) -> frozenset[int]:
    """Global ranks of a group; None is the world. Empty without torch.distributed."""
    return frozenset(dist.get_process_group_ranks(group)) if dist.is_initialized() else frozenset()


def check_group(option: str, group: object) -> None:
    """Refuse what is no process group.

    That of a rank outside a new group is refused at the call, by ``group_of``.

    Raises:
        TypeError: it is no process group.
    """
    if (
        group is None
        or isinstance(group, dist.ProcessGroup)
        or group is dist.GroupMember.NON_GROUP_MEMBER
    ):
        return
    raise TypeError(
        f"{option} must be a process group, as torch.distributed.new_group([0, 1]) or get_group()"
        f" of a device mesh makes one, got {spelled(group)}"
    )


_groups: dict[int, Ranks] = {}
"""By the identity of a group that lives."""
_groups_lock = threading.Lock()


def group_of(
    group: dist.ProcessGroup | None, deadline_s: float, closure: str = "a function"
) -> Ranks:
    """The one ``Ranks`` of a process group (None: the world), so that all closures on it count
    their calls alike.

    Raises:
        DistTuneError: torch.distributed is not initialised.
        ValueError: this rank is not in the group, or that has been destroyed.
    """
    if not dist.is_initialized():
        raise DistTuneError(
            "is_dist=True needs torch.distributed: call init_process_group() before the first call"
            " of the tuned closure and start the script with torchrun or launch/launch.sh, or pass"
            " is_dist=False to tune this process alone."
        )
    if group is None:
        group = dist.group.WORLD
    with _groups_lock:
        for key, known in list(_groups.items()):
            # Destroyed since; peers that wait for this rank there are told.
            if known._group not in c10d._world.pg_map:
                _groups.pop(key).close()
        if isinstance(group, dist.ProcessGroup) and group not in c10d._world.pg_map:
            raise ValueError(
                f"rank {dist.get_rank()}: the group that is to decide has been destroyed"
                " (destroy_process_group); only keys that have their config can be used. Decorate"
                " the function anew, or pass a group that lives"
            )
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the group that is to decide on {closure}: name"
                " all ranks that make the call in new_group()"
            )
        if id(group) not in _groups:
            _groups[id(group)] = Ranks(group, deadline_s)
        ranks = _groups[id(group)]
    ranks.deadline_s = deadline_s
    # A rank that is late for less than its group would wait in a collective costs waiting, not the
    # job.
    ranks.gather_s = max(
        [deadline_s, *(backend.options._timeout.total_seconds() for backend in _backends(group))]
    )
    return ranks


def device_identity() -> str:
    """This machine and the current GPU, by which processes tell whether they share it; empty
    without one.
    """
    if not api.is_available():
        return ""
    return f"{socket.gethostname()} {api.get_device_properties(api.current_device()).uuid}"


def is_symmetric(tensor: torch.Tensor) -> bool:
    """True if peers can reach its memory, as far as that can be seen: memory that torch has not
    allocated itself may be theirs, too.
    """
    try:
        if tensor.is_cuda and not tensor.untyped_storage().resizable():
            return True  # a peer's buffer, or a part of one's own
        # torch.distributed._symmetric_memory takes 0.1 s to import.
        from torch._C._distributed_c10d import (
            _SymmetricMemory,
        )

        return bool(_SymmetricMemory.is_symm_mem_tensor(tensor))
    except (ImportError, AttributeError, RuntimeError, NotImplementedError):
        # A build of torch without it, or a tensor without a storage.
        return False


def n_collectives() -> int:
    """Collectives that this process has issued on all groups so far, as far as their backends count
    them.
    """
    return sum(map(_n_issued, list(c10d._world.pg_map)))


def _n_issued(group: dist.ProcessGroup) -> int:
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]  # missing in torch's stubs
    except RuntimeError:  # a backend that does not count
        return 0
