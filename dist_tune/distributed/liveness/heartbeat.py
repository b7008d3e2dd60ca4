"""A thread's beats while a rank may have something to tune: that it lives, where it is, and since when. And its peers' beats.

A rank that waits inside its step cannot talk, and one that is stopped cannot say so; a thread of each rank posts and reads for it, on
a store client of its own. There is none in a steady call. Knows a store, and nothing of meetings or kernels.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from dist_tune.distributed.liveness.host_processes import GONE, STOPPED, process_name, state_of
from dist_tune.distributed.liveness.lives import LIFE, Life, lives_of
from dist_tune.distributed.liveness.outside import WatchedStore
from dist_tune.distributed.protocol.calls import Place, is_inside
from dist_tune.errors import MachineError, StoreGoneError

_EVERY_S = 0.5
_BEATS_PER_S = 512.0
"""Of all ranks together; groups of more than 256 beat more slowly, at 4096 every 8 s."""
_LOOKS_PER_S = 64.0
"""Of all ranks together, each at the beats of all; larger groups look more rarely, at 4096 every 64 s."""
_LATE_S = 1.0
"""A rank without a beat for so long is told as late, where this rank waits as well."""
_SLOW_S = 2.0
"""A rank that beats, but is elsewhere, is told as late after this rank has waited so long."""
_N_RUNS = 64
"""Latest runs whose numbers of collectives are posted."""
_N_ODD = 4


_NO_CALL = Place("", 0)
_NO_LIFE = Life(0, _NO_CALL, "not heard of in this call", 0.0)


class Heartbeat:
    """The beats of this rank, and of its peers."""

    def __init__(self, rank: int, members: Sequence[int], n_collectives: Callable[[], int]) -> None:
        self.troubles: list[str] = []
        """Shared with the tuning that adds to it."""
        self.absent: list[int] = []
        """Ranks that have not come to this rank's call, as far as beats say; looked at while this rank waits."""
        self.has_beaten = False
        """True once the beating thread may stand in a call of the store that never ends, or if there is none."""
        self._rank = rank
        self._others = [each for each in members if each != rank]
        self._every_s = max(_EVERY_S, len(members) / _BEATS_PER_S)
        self._look_every_s, self._looked_at = len(members) / _LOOKS_PER_S, -math.inf
        self._n_collectives = n_collectives
        self._call: Callable[[], Place] = lambda: _NO_CALL
        self._doing, self._may_last, self._since = "", False, time.monotonic()
        self._runs: deque[tuple[int, int]] = deque(maxlen=_N_RUNS)
        self._usual: int | None = None  # collectives of most of these runs, as of the latest run with another number
        self._odd: dict[int, str] = {}
        self._n_beats = 0
        self._seen: dict[int, tuple[int, float]] = {}
        """Rank -> number of its latest beat, and when that was new here."""
        self._told: dict[int, float] = {}
        """Ranks told as late -> since when this rank had waited."""
        self._moved: tuple[object, float] = (None, 0.0)
        self._client: WatchedStore | None = None
        self._users = 0
        self._watches: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    # -- of this rank --------------------------------------------------------------------------------------------

    def begin(self, call: Callable[[], Place]) -> None:
        """This rank is in a first run of this call, which has its place as it is when asked."""
        self._call = call
        self._runs.clear()
        self._odd.clear()
        self._usual, self.troubles, self.absent = None, [], []
        self.at("its first run", may_last=True)

    def at(self, doing: str, *, may_last: bool = False, introduced_on: dist.Store | None = None) -> None:
        """Note what this rank does from now on. Costs no talk, but for the first beat on a store that is given.

        By that beat peers know the process, also of a rank that ends before its beating thread ran.
        """
        self._doing, self._may_last, self._since = doing, may_last, time.monotonic()
        if introduced_on is not None and self._n_beats == 0:
            self.post(introduced_on)

    @contextmanager
    def run(self, number: int, doing: str) -> Iterator[None]:
        """A run of the closure; counts its collectives, unless it raises."""
        self.at(doing)
        before = self._n_collectives()
        yield
        count = self._n_collectives() - before
        if count != self._usual and self._runs:  # only then: counting takes longer than all else in here
            self._usual = Counter(each for _, each in self._runs).most_common(1)[0][0]
            if self._usual != count and len(self._odd) < _N_ODD:
                self._odd[number] = doing
        self._runs.append((number, count))

    @contextmanager
    def beating(self, store: Callable[[], dist.Store], tell: Callable[[str], object], watch: Callable[[], object]) -> Iterator[None]:
        """Beat meanwhile. ``tell`` gets a line for each rank that is late. Tunings of several threads share the beats.

        ``watch``: called before each beat, in the beating thread: the first comes when most calls with a known config are over. After
        that none may come (``has_beaten``).
        """
        with self._lock:
            self._users += 1
            self._watches.append(watch)
            if self._users == 1:
                self.has_beaten = False
                self._ended, self._client = threading.Event(), None  # an earlier thread may still stand in a call of its own
                self._thread = threading.Thread(target=self._beat, args=(self._ended, store, tell), name="dist_tune heartbeat", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # no more threads: peers see the beats of the main thread alone
                    self.has_beaten = True
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                self._watches.remove(watch)
                if self._users == 0:
                    self._ended.set()
                    # One that has not beaten ends by itself at once. A store that is silent would hold the thread for longer.
                    if self._client is not None and self._thread is not None:
                        self._thread.join(2 * _EVERY_S)

    def post(self, store: dist.Store) -> None:
        """One beat."""
        self._n_beats += 1
        life = Life(
            self._n_beats, self._call(), self._doing, round(time.monotonic() - self._since, 1), self._may_last, process_name(),
            n_issued=self._n_collectives(), runs=list(self._runs), odd={str(number): text for number, text in list(self._odd.items())},
            troubles=self.troubles[:1],
        )  # fmt: skip
        store.set(f"alive/{self._rank}", LIFE.dump_json(life).decode())

    def _beat(self, ended: threading.Event, store_of: Callable[[], dist.Store], tell: Callable[[str], object]) -> None:
        if self._pause(ended, tell):  # most calls with a known config are over by then: they cost no client of the store
            return
        self._begin_watches()  # before the store is asked, which may be silent
        with suppress(dist.DistError, StoreGoneError):  # the store's host is gone: the next meeting says so
            try:
                store: Any = WatchedStore(store_of().clone())  # type: ignore[attr-defined]  # missing in torch's stubs
            except MachineError as error:
                tell(f"rank {self._rank} does not beat: {error}")
                return
            self._client = store
            while True:
                self.post(store)
                self._look(store, tell)
                if self._pause(ended, tell):
                    return
                self._begin_watches()

    def _begin_watches(self) -> None:
        self.has_beaten = True  # before: a watch that is wanted from now on is not missed
        for watch in tuple(self._watches):
            watch()

    def _pause(self, ended: threading.Event, tell: Callable[[str], object]) -> bool:
        """Wait for the next beat; True if there is none. Tells of a time in which this process did not run."""
        before, doing = time.monotonic(), self._doing
        is_last = ended.wait(self._every_s)
        now = time.monotonic()
        if (lost_s := now - before - self._every_s) > _LATE_S:
            doing = self._doing if self._since <= now - lost_s else doing  # begun while this thread waited for its next beat
            tell(f"rank {self._rank} did not run for {lost_s:.1f} s in {doing}: stopped, swapped out, or Python's lock held")
            self._seen.clear()  # no peer was looked at meanwhile
        return is_last

    @property
    def unanswered_since(self) -> float | None:
        """Begin of the beating thread's store call that has no answer yet, by the monotonic clock."""
        asked = self._client.asked if self._client is not None else None
        return asked.since if asked is not None else None

    # -- of its peers --------------------------------------------------------------------------------------------

    def quiet_s(self, rank: int) -> float:
        """Seconds in which this rank looked for a new beat of a peer and found none; 0 while it does not look."""
        seen = self._seen.get(rank)  # the beating thread may clear them meanwhile
        return self._looked_at - seen[1] if seen is not None else 0.0

    def _look(self, store: dist.Store, tell: Callable[[str], object]) -> None:
        """Tell of ranks that this one waits for, each once."""
        now, mine = time.monotonic(), (self._doing, self._since, self._n_collectives())
        if self._moved[0] != mine:
            for rank, since in self._told.items():
                tell(f"rank {self._rank} goes on, after {now - since:.1f} s in which rank {rank} was late")
            self._told.clear()
            self._moved = mine, now
        waited_s = now - self._moved[1]
        if waited_s < _LATE_S / 2:
            self.absent = []
            return
        if now - self._looked_at < self._look_every_s:
            return
        lives = lives_of(store, self._others)
        place = self._call()
        # By collectives it is the peer that is in this call, if it has issued some: this rank may still be before them.
        here = {rank for rank, life in lives.items() if is_inside(place, life.call)}
        self.absent = [rank for rank in self._others if rank not in here]
        for rank in self._others:
            life = lives.get(rank, _NO_LIFE)  # stopped before its first beat, or in an ordinary call
            silent_s = self._silent_s(rank, life, now)
            is_elsewhere = life.n_issued < mine[2] or ("meeting" in mine[0] and not (life.doing == mine[0] and rank in here))
            is_silent = silent_s >= _LATE_S
            if rank not in self._told and (is_silent or (waited_s >= _SLOW_S and is_elsewhere)):
                self._told[rank] = self._moved[1]
                # No error follows from this: a step may issue on one rank what another issues after it.
                has_left = rank in here and life.n_issued < mine[2] and "meeting" in life.doing and "meeting" not in mine[0]
                left = f", after {life.n_issued} collectives of its process where rank {self._rank} is in number {mine[2]}"
                tale = self._tale(rank, life) + left * has_left
                tell(f"rank {rank} is late: rank {self._rank} waits in {self._doing} of {place.text}; rank {rank}: {tale}")
        self._looked_at = now  # not before: meanwhile ``quiet_s`` would count from the look before, long ago

    def _silent_s(self, rank: int, life: Life, now: float) -> float:
        n_beats, since = self._seen.get(rank, (-1, now))
        if n_beats != life.n_beats:
            self._seen[rank] = life.n_beats, (since := now)
        return now - since

    def _tale(self, rank: int, life: Life) -> str:
        silent_s = self._silent_s(rank, life, time.monotonic())
        state = {GONE: "its process has ended", STOPPED: "its process is stopped"}.get(state_of(life.process), "")
        told = [life.text, state, f"no sign of life for {silent_s:.1f} s" if silent_s >= 2 * self._every_s else ""]
        return ", ".join(filter(None, told))

    def places(self, store: dist.Store, beats: Mapping[int, str]) -> tuple[dict[int, str], dict[int, str]]:
        """These ranks -> where each is, since when, and how its process does; and the other ranks that beat.

        ``beats``: last sign of progress of each, after its time, in place of a rank that has never beaten.
        """
        place = self._call()
        own = {self._rank: Life(0, place, self._doing, time.monotonic() - self._since)} if place.closure else {}
        tales = {rank: self._tale(rank, life) for rank, life in {**lives_of(store, self._others), **own}.items()}
        return {rank: _place_of(tales.pop(rank, ""), beat) for rank, beat in beats.items()}, tales


def _place_of(tale: str, beat: str) -> str:
    """Where a rank is, by its latest beat and by its last sign of progress, which may be newer: beats stop with the interpreter's lock."""
    at, _, doing = beat.partition(" ")
    if not tale:
        return doing or beat
    return tale if at == "-" or not doing else f"{tale}; its last sign of progress: {doing}"
