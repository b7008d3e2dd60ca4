"""Meetings: every rank brings its part, every rank leaves with all parts, or every rank learns why not.

The only user of torch.distributed. Knows nothing of kernels, configs or times: a part is text. Meetings go over a clone
of the c10d store and not over a process group, because a deadline that expires there breaks nothing: a gloo group that
timed out is dead, and an NCCL communicator may take the process with it. Each meeting has an epoch; one ``compare_set``
on the epoch's key fixes its verdict (agreed, aborted, timed out), and every rank reads that verdict, late ones too.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dist_tune.errors import SHARED_ERRORS, AbsentRanksError, DistTuneError, PeerFailedError, RankMismatchError

# What a collective says when a peer did not come to it, or is gone: a consequence, not a cause.
_SECONDARY = re.compile(r"gloo|nccl|timed? ?out|connection (was )?(closed|reset|refused)|closed by peer|broken pipe", re.IGNORECASE)
_CHECK_EVERY_S = 0.25
_NEVER_MET = "nothing yet"


def is_secondary(error: BaseException) -> bool:
    """Whether this looks like a collective that failed because a peer did: such an error is never the root cause."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(_SECONDARY.search(str(error))))


class Ranks(Protocol):
    """Those who decide together."""

    rank: int
    """Global rank of this process."""
    members: tuple[int, ...]
    """Global ranks of all who meet, in the order in which parts are given."""

    def enter(self, closure: str) -> None:
        """Say which closure the coming meetings are about."""

    def meet(self, topic: str, part: str) -> list[str]:
        """Exchange parts. Collective; the parts come in the order of ``members``."""

    def beat(self, doing: str) -> None:
        """Between replays: tell the others that this rank is alive, and hear whether the tuning has been ended."""

    def abort(self, error: BaseException) -> None:
        """End the tuning on all ranks; raises if another rank ended it first."""

    def align(self) -> None:
        """Queue a wait on the device, if there is one, until all ranks' devices are here."""

    def short_timeouts(self) -> AbstractContextManager[None]:
        """Context in which this process's own collectives fail within the deadline."""


class Solo:
    """One process that asks nobody."""

    def __init__(self) -> None:
        self.rank = 0
        self.members: tuple[int, ...] = (0,)

    def enter(self, closure: str) -> None:
        """Nobody else to tell."""

    def meet(self, topic: str, part: str) -> list[str]:
        """This rank's part alone."""
        return [part]

    def beat(self, doing: str) -> None:
        """Nobody else to hear."""

    def abort(self, error: BaseException) -> None:
        """Nobody else to stop."""

    def align(self) -> None:
        """Nobody else to wait for."""

    @contextmanager
    def short_timeouts(self) -> Iterator[None]:
        """No collectives of ours; the closure's own, if any, are left as they are."""
        yield


class Group:
    """The ranks of a process group. One per group and process: see ``group_of``.

    Every member takes part in every epoch exactly once, also by aborting it or by giving it up, so that counts agree
    again after any error.
    """

    def __init__(self, group: dist.ProcessGroup, deadline_s: float) -> None:
        self.rank = dist.get_rank()
        self.members: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        self.deadline_s = deadline_s
        self._group = group
        self._closure = ""
        self._epoch = 0
        self._agreed: list[int] = []
        self._last_check = 0.0
        # A client of our own: on a shared one, a set() waits until another thread's wait() is over.
        store = c10d._get_default_store().clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        members = "-".join(map(str, self.members))
        space = dist.PrefixStore(f"dist_tune/{group.group_name}/{members}", store)
        # The store may outlive a process group (torchrun's does): each time all ranks make this object anew, they
        # count one up and leave the keys of the last time alone.
        life = space.add(f"lives/{self.rank}", 1)
        self._store = dist.PrefixStore(f"{life}", space)

    def enter(self, closure: str) -> None:
        """Begin a call of ``closure``: leave behind meetings that the others gave up before this rank came.

        Raises:
            AbsentRanksError: the others gave this rank up, and none of them is waiting now.
        """
        self._closure = closure
        with self._hosted("enter"):
            verdict = None
            while self._store.check([f"{self._epoch}/verdict"]):
                verdict = self._read_verdict()
            if verdict is not None and not self._store.check([f"{self._epoch}/count"]):
                raise self._error(verdict)

    def meet(self, topic: str, part: str) -> list[str]:
        """Exchange parts with all members. Collective: every member calls this for the same closure and topic.

        Costs about 0.3 ms at 4 ranks and 4 ms at 64. Waits for a rank as long as that rank makes progress (``beat``).

        Raises:
            AbsentRanksError: a rank made no progress for ``deadline_s``; all ranks that come raise it.
            PeerFailedError: another rank aborted; the first to do so is named on all ranks.
            RankMismatchError: ranks are in different closures, or at different steps of one.
        """
        epoch = self._epoch
        with self._hosted(topic):
            verdict = self._attend(topic, part)
            if verdict["state"] != "agreed":
                raise self._error(verdict)
            self._forget_old(epoch)
        return self._checked(verdict["parts"])

    def beat(self, doing: str) -> None:
        """Between replays, at most four times a second: post a sign of life, and leave if the tuning was ended.

        Raises:
            PeerFailedError: another rank aborted.
            AbsentRanksError: the others gave up waiting.
        """
        now = time.monotonic()
        if now - self._last_check < _CHECK_EVERY_S:
            return
        self._last_check = now
        with self._hosted(doing):
            self._store.set(f"beat/{self.rank}", f"{now:.3f} {self._closure}: {doing}")
            # No meeting can be agreed without this rank's part: a verdict that is there already ends the tuning.
            if self._store.check([f"{self._epoch}/verdict"]):
                raise self._error(self._read_verdict())

    def abort(self, error: BaseException) -> None:
        """End the tuning on all ranks because of ``error``. Returns if this rank shall raise ``error`` itself.

        A collective that failed because a peer did not come is not posted as a cause: this rank comes to the meeting
        instead, and learns there who is missing or who failed.

        Raises:
            DistTuneError: ``error`` is only the consequence of what another rank did; says which rank, and what.
        """
        with self._hosted("abort"):
            if not is_secondary(error):
                mine = {"state": "aborted", "rank": self.rank, "kind": type(error).__name__, "error": _text(error), "message": str(error)}
                self._decide(mine)
                verdict = self._read_verdict()
                if verdict != mine:
                    error.add_note(f"rank {self.rank}: the tuning had been ended before this: {self._error(verdict)}")
                return
            verdict = self._attend(f"failed: {_text(error)}", "")
        try:
            if verdict["state"] != "agreed":
                raise self._error(verdict)
            self._checked(verdict["parts"])
        except PeerFailedError as peer:
            if peer.rank != self.rank:
                raise peer from error
        except DistTuneError as shared:
            raise shared from error

    def align(self) -> None:
        """Queue a tiny all-reduce, so that all devices start the replay together. Does not wait on the host.

        Nothing without a CUDA group: host clocks measure each rank on its own, and the closure's collectives align it.
        """
        if not torch.cuda.is_available() or torch.device("cuda") not in self._group._device_types or not dist.is_nccl_available():
            return
        if isinstance(self._group._get_backend(torch.device("cuda")), dist.ProcessGroupNCCL):
            dist.all_reduce(torch.zeros(1, device="cuda"), group=self._group)

    @contextmanager
    def short_timeouts(self) -> Iterator[None]:
        """Lower the timeout of all process groups of this process to the deadline, and put it back after.

        A peer that waits in a collective of the closure for a rank that raised can be freed by nothing else.
        """
        before: list[tuple[dist.ProcessGroup, timedelta]] = []
        for group in c10d._world.pg_map:
            timeout = _timeout_of(group)
            if timeout is not None and timeout.total_seconds() > self.deadline_s:
                before.append((group, timeout))
                c10d._set_pg_timeout(timedelta(seconds=self.deadline_s), group)
        try:
            yield
        finally:
            for group, timeout in before:
                if group in c10d._world.pg_map:  # the closure may have destroyed it
                    c10d._set_pg_timeout(timeout, group)

    # -- one epoch -----------------------------------------------------------------------------------------------

    def _attend(self, topic: str, part: str) -> dict[str, Any]:
        """Bring a part, take the verdict away. The last to come writes it."""
        self._store.set(f"{self._epoch}/parts/{self.rank}", json.dumps([self._closure, topic, part]))
        if self._store.add(f"{self._epoch}/count", 1) == len(self.members):
            parts = self._store.multi_get([f"{self._epoch}/parts/{rank}" for rank in self.members])
            self._decide({"state": "agreed", "parts": [json.loads(each) for each in parts]})
        self._await_verdict(topic)
        return self._read_verdict()

    @contextmanager
    def _hosted(self, topic: str) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError as error:
            raise PeerFailedError(
                f"rank {self.rank}: the c10d store is gone at {topic!r} of {self._closure}; the process that hosts it (rank 0, or "
                f"torchrun's agent) has exited. The first error in its log is the cause."
            ) from error

    def _decide(self, verdict: dict[str, Any]) -> None:
        # Only the first verdict of an epoch counts.
        self._store.compare_set(f"{self._epoch}/verdict", "", json.dumps(verdict))

    def _read_verdict(self) -> dict[str, Any]:
        verdict: dict[str, Any] = json.loads(self._store.get(f"{self._epoch}/verdict"))
        self._epoch += 1
        return verdict

    def _await_verdict(self, topic: str) -> None:
        """Wait for the verdict while those who are missing make progress; without any for the deadline, fix "timed out"."""
        seen: dict[int, str] = {}
        since = time.monotonic()
        while True:
            try:
                self._store.wait([f"{self._epoch}/verdict"], timedelta(seconds=self.deadline_s / 4))
                return
            except dist.DistNetworkError:
                raise
            except RuntimeError:  # DistStoreError, or a plain one from FileStore: this slice of the wait is over
                beats = {rank: self._beat_of(rank) for rank in self._missing()}
                if any(seen.get(rank, beat) != beat for rank, beat in beats.items()):
                    since = time.monotonic()
                seen = beats
                if beats and time.monotonic() - since >= self.deadline_s:
                    self._decide({"state": "timed out", "missing": beats, "topic": topic, "closure": self._closure, "by": self.rank})

    def _missing(self) -> list[int]:
        return [rank for rank in self.members if not self._store.check([f"{self._epoch}/parts/{rank}"])]

    def _beat_of(self, rank: int) -> str:
        return self._store.get(f"beat/{rank}").decode() if self._store.check([f"beat/{rank}"]) else _NEVER_MET

    def _forget_old(self, epoch: int) -> None:
        # All ranks have read the verdict before this one, since all have come to this one.
        self._agreed.append(epoch)
        if self.rank == self.members[0] and len(self._agreed) > 1:
            old = self._agreed.pop(0)
            for name in ("count", "verdict", *(f"parts/{rank}" for rank in self.members)):
                self._store.delete_key(f"{old}/{name}")

    def _checked(self, parts: list[list[str]]) -> list[str]:
        failed = [(rank, topic) for rank, (_, topic, _) in zip(self.members, parts, strict=True) if topic.startswith("failed: ")]
        if failed:
            rank, error = failed[0]
            raise PeerFailedError(
                f"rank {rank} left {self._closure} with {error.removeprefix('failed: ')} while it was being tuned; ranks "
                f"{[each for each, _ in failed]} failed so. A collective of the closure did not find all its ranks: does every "
                f"rank call the same collectives in the same order in every replay?",
                rank,
                error.removeprefix("failed: "),
            )
        places = [f"{closure}, step {topic!r}" for closure, topic, _ in parts]
        if len(set(places)) > 1:
            other = next(i for i, place in enumerate(places) if place != places[0])
            raise RankMismatchError(
                f"rank {self.members[0]} is in {places[0]}, rank {self.members[other]} is in {places[other]}. "
                f"Call tuned closures in the same order on all ranks of their group."
            )
        return [part for _, _, part in parts]

    def _error(self, verdict: dict[str, Any]) -> DistTuneError:
        if verdict["state"] == "timed out":
            missing = {int(rank): beat for rank, beat in verdict["missing"].items()}
            last = "; ".join(f"rank {rank} last seen at: {beat.partition(' ')[2] or beat}" for rank, beat in missing.items())
            return AbsentRanksError(
                f"ranks {sorted(missing)} did not come to the meeting for {verdict['topic']!r} of {verdict['closure']} within "
                f"{self.deadline_s:g} s (noticed by rank {verdict['by']}, read by rank {self.rank}); {last}. Every rank of the group must "
                f"call the closure, and a kernel whose key is new on one rank must be launched on all. "
                f"DIST_TUNE_DEADLINE_S sets the deadline.",
                tuple(sorted(missing)),
            )
        if verdict["kind"] in SHARED_ERRORS:
            return SHARED_ERRORS[verdict["kind"]](verdict["message"])
        return PeerFailedError(
            f"rank {verdict['rank']} raised {verdict['error']} while {self._closure} was being tuned; rank {self.rank} stops for that. "
            f"Process groups whose collectives were under way can no longer be used.",
            verdict["rank"],
            verdict["error"],
        )


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:2000]}"


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            timeout: timedelta = options._timeout
            return timeout
    return None


def member_ranks(group: dist.ProcessGroup | None) -> frozenset[int]:
    """Global ranks of a group; None is the world. Empty without torch.distributed."""
    return frozenset(dist.get_process_group_ranks(group)) if dist.is_initialized() else frozenset()


_groups: dict[int, tuple[dist.ProcessGroup, Group]] = {}


def group_of(group: dist.ProcessGroup | None, deadline_s: float) -> Group:
    """The one ``Group`` of a process group (None: the world), so that all closures on it share one sequence of epochs.

    Raises:
        DistTuneError: torch.distributed is not initialised.
        ValueError: this rank is not in the group.
    """
    if not dist.is_initialized():
        raise DistTuneError(
            "is_dist=True needs torch.distributed: call init_process_group() before the first call of the tuned closure and start the "
            "script with torchrun or launch/launch.sh, or pass is_dist=False to tune this process alone."
        )
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group given to contextual_autotune; only its members may call the closure")
    for key, (known, _) in list(_groups.items()):
        if known not in c10d._world.pg_map:  # destroyed since
            del _groups[key]
    if id(group) not in _groups:
        _groups[id(group)] = (group, Group(group, deadline_s))
    ranks = _groups[id(group)][1]
    ranks.deadline_s = deadline_s
    return ranks
