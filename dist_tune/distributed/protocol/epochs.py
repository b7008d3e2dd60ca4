"""One epoch after another on a c10d store: this rank's part, and the verdict that comes of all parts.

Knows a store and the names of ranks; nothing of what a verdict means to a call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist

from dist_tune.distributed.liveness.heartbeat import Heartbeat
from dist_tune.distributed.liveness.lives import cause_of, lives_of
from dist_tune.distributed.liveness.outside import WatchedStore, own_client, within_deadline
from dist_tune.distributed.liveness.presence import Presence
from dist_tune.distributed.protocol.calls import ISSUED, Place, all_passed, is_apart, raised_in
from dist_tune.distributed.protocol.messages import count_up, read_part, read_verdict
from dist_tune.distributed.protocol.parts import Parts
from dist_tune.distributed.protocol.verdicts import FAILED, Verdict
from dist_tune.distributed.protocol.waiting import Wait
from dist_tune.errors import DistTuneError, MachineError, StoreGoneError

_Reduce = Callable[[dict[int, str]], str]
"""Rank -> part as text, of all ranks, to the result as text."""


class Epochs:
    """The epochs of some ranks, as one of them sees them."""

    def __init__(self, store: dist.Store, rank: int, members: tuple[int, ...], deadline_s: float, life: Heartbeat | None = None) -> None:
        self.rank = rank
        self.members = members
        self.deadline_s = deadline_s
        self.gather_s = deadline_s
        """Seconds that a rank with something to tune waits in a call's first meeting for those that live."""
        self._closure, self._place = "", Place("", 0)
        self._first_run: Place | None = None
        self._patience_s: float | None = None
        self._epoch = self._agreed = 0
        self._root = store
        self._store: Any = WatchedStore(store)
        self._life = ""
        """Number of this object on the store, among those of this rank."""
        self._presence: Presence | None = None
        self._lacks: DistTuneError | None = None
        """Why there is no presence; the first meeting raises it."""
        self._parts: Parts
        self.life = life or Heartbeat(rank, members, lambda: self.n_issued)

    @property
    def n_issued(self) -> int:
        """Collectives that this rank has issued on the group so far; 0 where it is not known."""
        return 0

    def _begin_life(self) -> None:
        """Come to the store, where this rank has parts from then on; its presence answers peers."""
        self._lacks = None
        try:
            self._come_to_store()
            if self._presence is None:
                client = dist.PrefixStore(self._life, own_client(self._root))
                self._presence = Presence(self._store, client, self.rank, self.members, self._state)
        except MachineError as error:
            self._lacks = MachineError(f"rank {self.rank}: {error}")
        except StoreGoneError as error:
            self._lacks = error

    def _come_to_store(self) -> None:
        if not self._life:
            # The store may outlive a process group (torchrun's does): each time ranks make this object anew, they leave older keys alone.
            self._life = f"{within_deadline(lambda timeout: count_up(self._root, f'lives/{self.rank}'))}"
            self._store = WatchedStore(dist.PrefixStore(self._life, self._root))
            self._parts = Parts(self._store, self.rank, self.members)

    def place(self) -> Place:
        """The call that this rank is in, for any thread; collectives of a first run count so far."""
        first_run = self._first_run
        return self._place if first_run is None else first_run._replace(issued=self.n_issued)

    def _state(self) -> tuple[dict[str, list[int]], Place | None]:
        """For peers that ask: calls that this rank has passed, and the one whose first run it is in."""
        return all_passed(self.members) | {ISSUED: [self.n_issued]}, self.place() if self._first_run is not None else None

    def _attend_one(self, topic: str, part: str, reduce: _Reduce) -> Verdict:
        """A meeting of all ranks, past those of some that meet about calls which others have passed."""
        while (verdict := self._attend(topic, part, reduce))["state"] == "apart":
            pass
        return verdict

    def _attend(self, topic: str, part: str, reduce: _Reduce, *, is_gathering: bool = False, is_optional: bool = False) -> Verdict:
        """Bring a part, take the verdict away. The last to come writes it."""
        if self._lacks is not None:
            raise self._lacks
        self.life.at(f"the meeting for {topic!r}", introduced_on=self._store)
        mine = [self._closure, topic, part, self._place, self._state()[0] if is_gathering else None]
        if self._parts.bring(self._epoch, json.dumps(mine)):
            self._agree(reduce)
        else:
            wait = Wait(self._parts, self._epoch, partial(self._agree, reduce), self._decide, partial(self._time_out, topic))
            if is_gathering and self._presence is not None:
                patience_s = self.deadline_s if is_optional else self.gather_s
                wait.for_calls(self._presence, self._place, self.deadline_s, patience_s, is_optional=is_optional)
            else:
                quiet_s = self.life.quiet_s if topic.startswith(FAILED) else None  # then, a rank that does not even beat will not come
                wait.for_parts(self.deadline_s, self._patience_s or self.deadline_s, self.gather_s, quiet_s)
        if "result" in (verdict := self._read_verdict()):
            # All ranks have read earlier verdicts, since all have come to this one.
            self._parts.forget(range(self._agreed, self._epoch - 1))
            self._agreed = self._epoch - 1
        return verdict

    def _agree(self, reduce: _Reduce) -> None:
        texts = self._parts.texts(self._epoch)
        self._decide(verdict_of(self.members, texts, reduce, lambda: cause_of(lives_of(self._store, self.members))))

    @contextmanager
    def _hosted(self, topic: str) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError as error:
            raise StoreGoneError(
                f"rank {self.rank}: the c10d store cannot be reached at {topic!r} of {self._closure}: its host (rank 0, or "
                f"torchrun's agent) has exited, or its link was cut. The first error in its log is the cause."
            ) from error

    def _decide(self, verdict: Verdict) -> None:
        """Only the first verdict of an epoch counts."""
        self._store.compare_set(f"{self._epoch}/verdict", "", json.dumps({**verdict, "place": self._place}))

    def _read_verdict(self) -> Verdict:
        self._epoch += 1
        return read_verdict(self._parts.verdict(self._epoch - 1), self.rank)

    def _time_out(self, topic: str, beats: dict[int, str], within_s: float) -> None:
        missing, others = self.life.places(self._store, beats)
        where = {"topic": topic, "closure": self._closure, "by": self.rank}
        self._decide({"state": "timed out", "missing": missing, "others": others, "within_s": within_s, **where})

    def close(self) -> None:
        """Answer no peers any more, because the group is gone."""
        if self._presence is not None:
            self._presence.stop()


def verdict_of(
    members: Sequence[int], texts: Sequence[bytes], reduce: Callable[[dict[int, str]], str], cause: Callable[[], Sequence[Any] | None]
) -> Verdict:
    """The verdict of an epoch to which all members have brought these parts.

    ``cause``: see ``lives.cause_of``; asked for where ranks differ.

    Raises:
        PeerFailedError: a part is none.
    """
    closures, topics, parts, places, passed = zip(*map(read_part, texts, members), strict=True)
    steps = list(zip(closures, topics, strict=True))
    known = {rank: each or {} for rank, each in zip(members, passed, strict=True)}
    is_gathering = None not in passed
    by_rank = dict(zip(members, places, strict=True))
    raised = raised_in(by_rank)
    if is_gathering and is_apart(by_rank, known):
        return {"state": "apart", "passed": known, "raised": raised}
    if is_gathering and raised and len({each.closure for each in places}) > 1:
        return {"state": "apart", "passed": known, "raised": raised, "is_crossed": True}
    if len(set(steps)) > 1 or topics[0].startswith(FAILED):
        return {"state": "agreed", "steps": steps, "cause": cause()}  # on nothing: each rank says why
    verdict: Verdict = {"state": "agreed", "result": reduce(dict(zip(members, parts, strict=True)))}
    if is_gathering and len(numbers := {each.number for each in places}) > 1:
        verdict["number"] = max(numbers)
    return verdict
