"""What this rank does, and the thread's look at its peers: which of them is late, where it is, and since when.

Noted by the tuning's thread, which it costs no talk; read by peers that ask (``presence``) and by the thread that minds the tuning.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from dist_tune.distributed.calls import Call, Calls, Card, Peer, Place
from dist_tune.distributed.processes import process_name

_LATE_S = 1.0
"""A rank without an answer for so long is told as late, where this rank waits as well."""
_SLOW_S = 2.0
"""A rank that answers, but is elsewhere, is told as late after this rank has waited so long."""
_EVERY_S = 0.5
_LOOKS_PER_S = 64.0
"""Of all ranks together, each at all others; larger groups look more rarely, at 4096 every 64 s."""
_N_RUNS = 16
"""Latest runs whose numbers of collectives are told."""
_N_ODD = 4
_FIRST_RUN = "its first run"


class Doing(NamedTuple):
    """What the tuning's thread does."""

    text: str
    since: float
    """Monotonic clock, in seconds."""
    may_last: bool = False
    is_meeting: bool = False


class Activity:
    """Of one rank in one group. ``n_issued``, ``n_of_process``: collectives issued on the group, and on all groups."""

    def __init__(self, rank: int, members: Sequence[int], n_issued: Callable[[], int], n_of_process: Callable[[], int]) -> None:
        self.calls: dict[str, Calls] = {}
        """Of each closure that these ranks tune, on this one."""
        self.doing = Doing("", time.monotonic())
        self.call: Call | None = None
        """The latest call that has come to its meetings."""
        self.topic = ""
        """Of the first meeting of that call, while this rank waits there."""
        self.troubles: list[str] = []
        """Candidates that failed here between two of their collectives; shared with the tuning that adds to it."""
        self.absent: Sequence[int] = ()
        """Ranks that have not come to this rank's call, as of the latest look; looked at while this rank waits."""
        self.runs: deque[tuple[int, int]] = deque(maxlen=_N_RUNS)
        """Number of each run that has ended, and collectives that it issued."""
        self.odd: dict[int, str] = {}
        self.first_run_s = 0.0
        """Seconds of the first run of the latest call; 0 where it has none yet."""
        self._rank = rank
        self._members = tuple(members)
        self.others = [each for each in members if each != rank]
        self._n_issued, self._n_of_process = n_issued, n_of_process
        self._told: dict[int, tuple[float, str]] = {}
        """Ranks told as late -> since when this rank had waited, and what was told."""
        self._moved: tuple[tuple[Doing, int], float] = ((self.doing, 0), 0.0)
        self._looked_at = 0.0

    def begin(self) -> None:
        """A call begins that may end in a meeting."""
        self.runs.clear()
        self.odd, self.troubles, self.absent, self.call = {}, [], (), None
        self.first_run_s = 0.0
        self.doing = Doing(_FIRST_RUN, time.monotonic(), may_last=True)

    def at(self, text: str, *, may_last: bool = False, is_meeting: bool = False) -> None:
        """Note what this rank does from now on."""
        if text != self.doing.text:
            if self.doing.text == _FIRST_RUN:
                self.first_run_s = time.monotonic() - self.doing.since
            self.doing = Doing(text, time.monotonic(), may_last, is_meeting)

    @contextmanager
    def run(self, number: int, text: str) -> Iterator[None]:
        """A run of the closure; counts its collectives, unless it raises."""
        self.at(text)
        before = self._n_of_process()
        yield
        count = self._n_of_process() - before
        if self.runs and len(self.odd) < _N_ODD and count != Counter(each for _, each in self.runs).most_common(1)[0][0]:
            self.odd[number] = text
        self.runs.append((number, count))

    def late(self) -> tuple[int, str] | None:
        """A rank that this one waits for, and where that was when it was told."""
        return next(((rank, text) for rank, (_, text) in self._told.items()), None)

    def inside(self) -> list[Place]:
        """The calls under way that may end in a meeting."""
        return [place for calls in list(self.calls.values()) for place in list(calls.under_way)]

    def card(self, question: int) -> Card:
        """What this rank says of itself. Called by any thread."""
        doing, call = self.doing, self.call
        # Calls under way are read last: one that begins meanwhile is counted as under way, and not as over.
        n_calls = {closure: calls.n_calls for closure, calls in list(self.calls.items())}
        inside = self.inside()
        return Card(
            question=question, process=process_name(), n_issued=self._n_issued(), n_calls=n_calls, inside=inside, doing=doing.text,
            for_s=round(time.monotonic() - doing.since, 1), may_last=doing.may_last, n_of_process=self._n_of_process(),
            waits=call if self.topic else None, topic=self.topic, first_run_s=round(self.first_run_s, 1),
        )  # fmt: skip

    # -- the minding thread --------------------------------------------------------------------------------------

    def is_waiting(self, tell: Callable[[str], object]) -> bool:
        """True if this rank has waited for so long that its peers are worth a look. ``tell`` gets a line when it goes on."""
        now, doing = time.monotonic(), self.doing
        mine = (doing, self._n_of_process())
        if self._moved[0] != mine:
            for rank, (since, _) in self._told.items():
                tell(f"rank {self._rank} goes on, after {now - since:.1f} s in which rank {rank} was late")
            self._told, self._moved, self.absent = {}, (mine, now), ()
        waited_s = now - self._moved[1]
        every_s = max(_EVERY_S, len(self._members) / _LOOKS_PER_S)
        if not self.others or waited_s < _LATE_S / 2 or now - self._looked_at < every_s:
            return False
        self._looked_at = now
        return bool(self.inside())

    def compare(self, peers: Mapping[int, Peer], tell: Callable[[str], object]) -> None:
        """Tell of ranks that this one waits for, each once."""
        (doing, n_mine), since = self._moved
        inside = self.inside()
        if not inside:
            return  # the call has ended meanwhile
        place, waited_s = inside[-1], time.monotonic() - since
        # In a first run, which may yet issue collectives or not, a peer in a call of either key may be in this one.
        calls = [self.call] if self.call is not None else [Call(place, has_talked, 0) for has_talked in (True, False)]
        inside_of = {rank: peer.card.inside if peer.card is not None else [] for rank, peer in peers.items()}
        here = {rank for rank, places in inside_of.items() if any(call.holds(each) for call in calls for each in places)}
        self.absent = [rank for rank in self.others if rank not in here]
        for rank, peer in peers.items():
            card = peer.card
            n_issued = card.n_of_process if card is not None else 0
            is_elsewhere = n_issued < n_mine or (doing.is_meeting and not (rank in here and card is not None and card.doing == doing.text))
            if rank not in self._told and (peer.silent_s >= _LATE_S or (waited_s >= _SLOW_S and is_elsewhere)):
                # No error follows from this: a step may issue on one rank what another issues after it.
                has_left = rank in here and n_issued < n_mine and not doing.is_meeting
                left = f", after {n_issued} collectives of its process where rank {self._rank} is in number {n_mine}" * has_left
                self._told[rank] = since, f"was late: {peer.text}{left}"
                tell(f"rank {rank} is late: rank {self._rank} waits in {doing.text} of {place.text}; rank {rank}: {peer.text}{left}")
