"""What a rank says of itself, and what its peers see of it: what it does, where it is, and whether
its process lives.

A call with nothing to tune says nothing to any rank, a rank that waits in a collective cannot talk,
and one that is stopped cannot say so. So a rank that waits asks. The thread of each rank waits for
questions inside the store, on a client of its own, and costs nothing before. ``ask/{rank}/{i}`` is
question i to a rank, and ``card/{rank}`` its latest answer, which says what question it waits for.
A rank that begins what may hold its interpreter for ever cannot answer then, and writes that to
``beat/{rank}`` before.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from dist_tune.files import topics_told
from dist_tune.log import amount
from dist_tune.ranks.calls import Call, Calls, Card, Place, State
from dist_tune.ranks.clients import absent, run_in_thread, within
from dist_tune.ranks.messages import Header

_LATE_S, _SLOW_S = 1.0, 2.0
"""Where this rank waits, a rank is told as late after so long without an answer, or if it answers
and is elsewhere.
"""
_LOOK_S, _LOOKS_PER_S = 0.5, 64.0
"""Of one rank at all others, and of all ranks: at 4096 each looks every 64 s."""
_WAIT = timedelta(days=10)
"""Of one wait inside the store, which is repeated; torch counts its milliseconds in 32 bits."""
_FAREWELL_S = 1.5
"""Seconds that rank 0, which may host the store, waits at its end for peers to leave it: torch
warns of one that is cut off.
"""
CARD = TypeAdapter(Card)


class Doing(NamedTuple):
    """What the tuning's thread does."""

    text: str
    since: float
    """Monotonic clock, in seconds."""
    may_last: bool = False
    is_meeting: bool = False


class Activity:
    """What one rank does in one group, noted by the tuning's thread, which it costs no talk.

    ``n_issued``, ``n_of_process``: collectives issued on the group, and on all groups.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        n_issued: Callable[[], int],
        n_of_process: Callable[[], int],
    ) -> None:
        self.rank = rank
        self.members = tuple(members)
        self.others = [member for member in members if member != rank]
        self.calls: dict[str, Calls] = {}
        """Of each closure that these ranks tune, on this one."""
        self.inside: list[Place] = []
        """Calls under way that may end in a meeting."""
        self.call = Call(Place("", 0), has_talked=False, n_issued=0)
        """The latest call that may end in a meeting."""
        self.is_first_run = False
        """True until the first run of that call has returned; what collectives it issues is not
        known before.
        """
        self.waits = False
        """True while this rank waits in the first meeting of that call."""
        self.doing = Doing("", time.monotonic())
        self.first_run_s = 0.0
        """Seconds of the first run of that call; 0 where it has none yet."""
        self.last_run = self.doing
        """The run of the closure that began last."""
        self.troubles: list[str] = []
        """Candidates that failed here between two of their collectives; shared with the tuning that
        adds to it.
        """
        self.absent: Sequence[int] = ()
        """Ranks that have not come to this rank's call, as of the latest look; looked at while this
        rank waits.
        """
        self.late = ""
        """Which rank this one waits for, for how long and where that is, for the terminal, as of
        the latest look; empty if for none, and
        on all ranks but the first that is not late.
        """
        self._n_issued, self._n_of_process = n_issued, n_of_process
        self._process = process_name() if self.others else ""
        self._told: list[int] = []
        """Ranks told as late."""
        self._moved: tuple[tuple[Doing, int], float] = ((self.doing, 0), 0.0)
        self._looked_at = 0.0

    def begin(self, place: Place) -> None:
        """A call begins that may end in a meeting."""
        self.call, self.is_first_run = Call(place, has_talked=False, n_issued=place.before), True
        self.troubles, self.absent, self.first_run_s = [], (), 0.0
        self.doing = self.last_run = Doing("its first run", time.monotonic(), may_last=True)

    def enter(self, call: Call, *, has_raised: bool) -> None:
        """A call comes to its meetings."""
        if self.is_first_run:
            self.first_run_s = time.monotonic() - self.doing.since
        self.call, self.is_first_run = call, has_raised
        self.at("work before the first exchange")

    def at(self, text: str, *, may_last: bool = False, is_meeting: bool = False) -> None:
        """Note what this rank does from now on."""
        if text != self.doing.text:
            self.doing = Doing(text, time.monotonic(), may_last, is_meeting)

    def run(self, text: str) -> None:
        """A run of the closure begins."""
        self.at(text)
        self.last_run = self.doing

    def header(self, step: str, topic: str) -> Header:
        """What this rank says with its part of a meeting."""
        last = f"{self.last_run.text}, begun {time.monotonic() - self.last_run.since:.1f} s before"
        if self.troubles:
            last += f", having left {self.troubles[0]}, between two of its collectives"
        return Header(step, topic, last, topics_told())

    def card(self, question: int = 0, *, is_over: bool = False) -> Card:
        """What this rank says of itself. Called by any thread."""
        doing = self.doing
        # Calls under way are read last: one that begins meanwhile is counted as under way, and not
        # as over.
        n_calls = {closure: calls.n_calls for closure, calls in list(self.calls.items())}
        return Card(
            question,
            self._process,
            self._n_issued(),
            self._n_of_process(),
            n_calls,
            list(self.inside),
            self.call if self.waits else None,
            doing.text,
            round(time.monotonic() - doing.since, 1),
            doing.may_last,
            round(self.first_run_s, 1),
            is_over,
        )

    # -- the minding thread ------------------------------------------------------------------------

    def is_waiting(self, tell: Callable[[str], object]) -> bool:
        """True if this rank has waited for so long that its peers are worth a look.

        ``tell`` gets a line when it goes on.
        """
        now, mine = time.monotonic(), (self.doing, self._n_of_process())
        if self._moved[0] != mine:
            for rank in self._told:
                tell(
                    f"rank {self.rank} goes on, after {now - self._moved[1]:.1f} s in which rank"
                    f" {rank} was late"
                )
            self._told, self._moved, self.absent, self.late = [], (mine, now), (), ""
        # The first rank, which has the terminal, as often in large groups.
        every_s = (
            _LOOK_S
            if self.rank == self.members[0]
            else max(_LOOK_S, len(self.members) / _LOOKS_PER_S)
        )
        if not self.others or now - self._moved[1] < _LATE_S / 2 or now - self._looked_at < every_s:
            return False
        self._looked_at = now
        return bool(self.inside)

    def compare(self, cards: Mapping[int, Card], tell: Callable[[str], object]) -> None:
        """Tell of ranks that this one waits for, each once."""
        (doing, n_mine), since = self._moved
        if not (inside := list(self.inside)):
            return  # the call has ended meanwhile
        waited_s = time.monotonic() - since
        is_slow, late = waited_s >= _SLOW_S, list[int]()
        # In a first run, which may yet issue collectives or not, a peer in a call of either key may
        # be in this one.
        calls = (
            [self.call._replace(has_talked=each) for each in (True, False)]
            if self.is_first_run
            else [self.call]
        )
        here = {
            rank for rank, card in cards.items() if any(call.holds(*card.inside) for call in calls)
        }
        self.absent = [rank for rank in self.others if rank not in here]
        for rank, card in cards.items():
            is_behind = card.n_of_process < n_mine
            is_elsewhere = is_behind or (
                doing.is_meeting and not (rank in here and card.doing == doing.text)
            )
            if not (card.silent_s >= _LATE_S or (is_slow and is_elsewhere)):
                continue
            late.append(rank)
            if rank in self._told:
                continue
            text = card.text
            if rank in here and is_behind and not doing.is_meeting:
                # No error follows from this: a step may issue on one rank what another issues after
                # it.
                text += (
                    f", after {card.n_of_process} collectives of its process where rank {self.rank}"
                    f" is in number {n_mine}"
                )
            self._told.append(rank)
            tell(
                f"rank {rank} is late: rank {self.rank} waits in {doing.text} of {inside[-1].text};"
                f" rank {rank}: {text}"
            )
        self.late = ""
        if (
            late
            and self._moved[1] == since
            and all(rank in late for rank in self.members if rank < self.rank)
        ):
            others = f" ({amount(len(late) - 1, 'more rank')} late)" if len(late) > 1 else ""
            self.late = (
                cards[late[0]].late_text(late[0], inside[-1], waited_s, is_here=late[0] in here)
                + others
            )


class Questions:
    """The questions of one thread to peers."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._open: dict[int, tuple[int, int, float]] = {}
        """Rank -> number of the first question and of the latest one, and when that was put."""

    def ask(self, ranks: Sequence[int]) -> dict[int, Card]:
        """What is known of these ranks.

        Does not wait; each that has answered the question before is asked again.
        """
        kinds = ("card", "beat")
        lacking = {
            int(key.partition("/")[2])
            for key in absent(self._store, [f"{kind}/{rank}" for kind in kinds for rank in ranks])
        }
        known = [rank for rank in ranks if rank not in lacking]
        texts = (
            self._store.multi_get([f"{kind}/{rank}" for kind in kinds for rank in known])
            if known
            else []
        )
        cards, now = dict.fromkeys(ranks, Card()), time.monotonic()
        for rank, text, beat in zip(known, texts[: len(known)], texts[len(known) :], strict=True):
            with suppress(ValidationError):  # of another version: a rank that says nothing
                cards[rank] = self._seen(
                    rank, CARD.validate_json(text), beat[:2000].decode(errors="replace"), now
                )
        return cards

    def _seen(self, rank: int, card: Card, beat: str, now: float) -> Card:
        first, latest, since = self._open.get(rank, (card.question, -1, now))
        if card.question != latest:
            since = now
            self._open[rank] = first, card.question, now
            self._store.set(f"ask/{rank}/{card.question}", "")
        silent_s, state = now - since, state_of(card.process)
        return replace(
            card,
            for_s=card.for_s + silent_s,
            beat=beat,
            silent_s=silent_s,
            state=state,
            is_fresh=card.question > first,
        )


class Presence:
    """The answers of this rank to the members of one group.

    ``client``: of the same keys as ``store``, for the thread alone.
    """

    def __init__(self, store: Any, client: Any, activity: Activity) -> None:
        self._store = store
        self._client = client
        self._activity = activity
        self._question = 0
        self._is_over = False
        self._pid = os.getpid()
        self._thread: Thread | None = None
        self._client.set(f"beat/{activity.rank}", "")
        self._post()  # peers know this process from here on, also if it ends before the thread runs
        # No more threads: peers take this rank for one that does not answer.
        with suppress(RuntimeError):
            self._thread = run_in_thread(self._answer, "presence")
        atexit.register(self.stop)

    def stop(self, *, is_exit: bool = True) -> None:
        """Answer no more: a thread inside the store must not outlive the interpreter, or the group.

        ``is_exit``: the program ends.
        """
        atexit.unregister(self.stop)
        # Not in a forked child, which shares the connection.
        if self._is_over or self._pid != os.getpid():
            return
        self._is_over = True
        with suppress(dist.DistError, TimeoutError):  # the store's host is gone, or silent
            within(2 * _FAREWELL_S, lambda: self._say_farewell(waits=is_exit))

    def _say_farewell(self, *, waits: bool) -> None:
        ends_at = time.monotonic() + _FAREWELL_S
        self._store.set(self._awaited(), "")
        if self._thread is not None:
            self._thread.join(_FAREWELL_S)
        others, questions = (
            self._activity.others if self._activity.rank == 0 and waits else [],
            Questions(self._store),
        )
        if others:
            self._store.set("host over", "")
        while others and time.monotonic() < ends_at:
            cards = questions.ask(others)
            others = [
                rank
                for rank, card in cards.items()
                if card.question >= 0 and not card.is_over and card.state != "gone"
            ]
            time.sleep(0.005)

    def _awaited(self) -> str:
        return f"ask/{self._activity.rank}/{self._question}"

    def _post(self) -> None:
        card = self._activity.card(self._question, is_over=self._is_over)
        self._client.set(
            f"card/{self._activity.rank}", CARD.dump_json(card, exclude_defaults=True).decode()
        )

    def _answer(self) -> None:
        with suppress(dist.DistNetworkError):  # the store's host is gone, and so is the job
            while not self._is_over:
                with suppress(dist.DistStoreError):  # nothing was asked for days
                    self._client.wait([self._awaited()], _WAIT)
                    self._client.delete_key(self._awaited())
                    self._question += 1
                    self._is_over = self._is_over or self._client.check(["host over"])
                    self._post()


# -- processes, as others of the same host see them ------------------------------------------------


def process_name() -> str:
    """This process among all of all hosts: boot, namespace of process numbers, number, and start;
    empty where that cannot be read.
    """
    try:
        return f"{_namespace()} {os.getpid()} {_fields(os.getpid())[19]}"
    except OSError:
        return ""


def state_of(name: str) -> State:
    """The state of the process of this ``process_name``."""
    here, pid, start = [*name.rsplit(" ", 2), "", ""][:3]
    if not here or here != _namespace() or not pid.isdecimal():
        return ""
    try:
        fields = _fields(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    except OSError:  # no descriptor is left to look
        return ""
    if fields[19] != start or fields[0] in "ZX":
        return "gone"
    return "stopped" if fields[0] in "Tt" else "runs"


def _fields(pid: int) -> list[str]:
    # Of /proc/PID/stat, from the state on: the second field is a program's name in parentheses,
    # which may hold any character.
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].decode().split()


@cache
def _namespace() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""
