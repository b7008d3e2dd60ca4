"""The protocol of meetings on a c10d store: parts, a count, and one verdict that every rank reads. docs/distributed.md has it on one page.

Knows a store and the names of ranks, nothing of process groups. Keys are of one call, ``{closure}/{id}/{k}/...``: calls share none. ``id``
is ``c{collectives before the call}`` if its first run has issued some on the group, because those take all ranks, and else the call's
number on this rank, ``n{number}``; ``k`` counts the meetings of the call. Each member brings its part to each meeting once, or ends the
call; one ``compare_set`` fixes the verdict of a meeting, and all read that one, late ones too. The first verdict that is not "agreed" is
the end of the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import torch.distributed as dist

from dist_tune.distributed.activity import Activity
from dist_tune.distributed.calls import Call, Calls, Limits, Place, has_passed, key_of
from dist_tune.distributed.messages import (
    Aborted,
    Agreed,
    Alone,
    Header,
    Mismatch,
    Part,
    Reduction,
    Result,
    TimedOut,
    Verdict,
    part_text,
    read_part,
    read_verdict,
    verdict_text,
)
from dist_tune.distributed.presence import Presence, Questions
from dist_tune.distributed.store import Asked, WatchedStore, absent, own_client
from dist_tune.distributed.verdicts import FAILED, cause_of, end_by, error_of, is_secondary, text_of
from dist_tune.errors import DistTuneError, MachineError, StoreGoneError

_CHECK_EVERY_S, _CHECKS_PER_S = 0.25, 1024.0  # of one rank, and of all
_POLL_S = 1e-4
"""Shortest pause between two looks for a verdict; it grows to a twentieth of the time waited so far."""
_POLLS_PER_S = (20_000.0, 2000.0)
"""Polls of one store per second over all ranks, at first and after long waits."""
_ASK_S = (0.02, 0.25)
"""Shortest and longest pause between two questions to missing ranks."""
_ANSWERS_PER_S = 500.0
"""Answers per second over all ranks, which bounds questions; small groups ask faster."""


class Meetings:
    """The meetings of some ranks, as one of them sees them. A rank without others meets itself, and needs no store."""

    def __init__(self, store: Any, rank: int, members: tuple[int, ...], deadline_s: float) -> None:
        self.rank = rank
        self.members = members
        self._has_peers = len(members) > 1
        self.deadline_s = deadline_s
        self.gather_s = deadline_s
        """Seconds that a rank with something to tune waits in a call's first meeting for those that live."""
        self.activity = Activity(rank, members, self._n_issued, lambda: self.n_of_process)
        self._is_even = True
        """False once ranks were seen to count collectives differently: calls go by their numbers from then on."""
        self._root = store
        self._store: Any = WatchedStore(store)
        self._presence: Presence | None = None
        self._lacks: StoreGoneError | None = None
        """Why there is no presence; the first meeting raises it."""
        self._first_run: Place | None = None
        """The call whose first run this rank is in, or has left by an exception."""
        self._call = Call(Place("", 0), has_talked=False, n_issued=0)
        self._step, self._k = "", 0
        self._doubted: Aborted | None = None
        """The end of this call by a rank that has called again, as collectives show."""
        self._is_over = False
        self._last_check = 0.0
        self._garbage: list[str] = []
        """Keys of meetings, which no rank reads any more once all have come to another one."""

    @property
    def n_issued(self) -> int:
        """Collectives that this rank has issued on the group so far; 0 where it is not known."""
        return 0

    @property
    def n_of_process(self) -> int:
        """Collectives that this process has issued on all groups."""
        return self.n_issued

    # -- calls ---------------------------------------------------------------------------------------------------

    def calls(self, closure: str) -> Calls:
        """The calls of ``closure`` by these ranks: this rank counts, and answers peers that ask."""
        if self._presence is None and self._has_peers:
            try:
                with self._hosted("the first call"):
                    self._presence = Presence(self._root, own_client(self._root), self.rank, self.members, self.activity.card)
            except StoreGoneError as error:
                self._lacks = error
        return self.activity.calls.setdefault(closure, Calls())

    @contextmanager
    def calling(self, closure: str) -> Iterator[int]:
        """A call that may end in a meeting, with its number; peers that ask learn that this rank is inside it."""
        calls = self.calls(closure)
        place = Place(closure, calls.n_calls + 1, self._n_issued())
        calls.under_way.append(place)  # first: a peer that asks between these lines would take the call for one that is over
        calls.n_calls += 1
        if self._call.place not in self.activity.inside():  # another thread is tuning: what is said until that ends is about its call
            self._first_run = place
            self.activity.begin()
        try:
            yield place.number
        finally:
            calls.under_way.remove(place)

    def enter(self, closure: str, number: int = 0, options: str = "", *, has_raised: bool = False, is_broken: bool = False) -> None:
        """Come to the meetings of a call of ``closure``, whose first run ``has_raised``; ``is_broken``: because a collective failed.

        Raises:
            DistTuneError: a rank has ended this very call.
        """
        known = [each for each in self.activity.inside() if (each.closure, each.number) == (closure, number)]
        n_issued = self._n_issued()
        place = known[-1] if known else Place(closure, number, n_issued)
        self._call = self.activity.call = Call(place, n_issued > place.before, n_issued)
        self._step, self._k, self._doubted, self._is_over = f"{closure}{options}", 0, None, False
        self._first_run = place if has_raised else None
        self.activity.at("work before the first meeting")
        found: Verdict | None = None
        with suppress(dist.DistNetworkError):  # the store's host is gone: the first meeting says so
            while self._presence is not None and self._has_verdict():  # nothing is agreed without this rank
                found, _ = self._verdict()
                if isinstance(found, Alone) and not has_raised:
                    return  # the first meeting says so
                self._k += 1
                if not is_broken and not self._has_gone_on(found):
                    raise self._error(found)
        if found is not None and is_broken:
            raise self._error(found)
        self._doubted = found if isinstance(found, Aborted) else None

    def agree(self, closure: str, topic: str, work: Callable[[], Part], fn: Reduction[Part, Result]) -> Result:
        """A call that all ranks make to meet, and for nothing else: ``fn`` of what the ``work`` of each gives. Collective.

        The others wait for a rank at its work as long as it lives; an error there ends the call on all ranks. Raises as ``reduce``.
        """
        with self.calling(closure) as number:
            try:
                part = work()
            except BaseException as error:
                self.enter(closure, number, has_raised=True)
                self.abort(error)
                raise
            self.enter(closure, number)
            return self.reduce(topic, part, fn)

    # -- meetings ------------------------------------------------------------------------------------------------

    def reduce(self, topic: str, part: Part, fn: Reduction[Part, Result]) -> Result:
        """Bring a part and take ``fn`` of all parts away. Collective: every member calls this for the same closure and topic.

        Costs about a millisecond at 4 ranks (logs/contextual-4xH200). The last rank to come reads all parts, so what the others
        read does not grow with the group. Waits for a rank as long as that rank makes progress.

        Raises:
            AbsentRanksError: a rank died, or made no progress; all ranks that come raise it.
            PeerFailedError: another rank aborted; the first to do so is named on all ranks.
            RankMismatchError: ranks are in different closures, or at different steps of one.
        """
        if not self._has_peers:
            return fn({self.rank: part})
        with self._hosted(topic):
            return fn.load(self._met(topic, fn.dump(part), fn.of_texts, self._limits(is_broken=topic.startswith(FAILED))))

    def gather(self, topic: str, part: Part, fn: Reduction[Part, Result], *, is_optional: bool = False) -> Result:
        """As ``reduce``, in a call that other ranks may come to late, or may have passed.

        Waits for a rank that lives for ``gather_s``, and longer while it is in its first run of this call; with ``is_optional``, if
        this rank can do without the result, for ``deadline_s``.

        Raises:
            AloneError: another rank has passed this call without coming to a meeting; or this rank's patience is at its end.
            AbsentRanksError, PeerFailedError, RankMismatchError: as ``reduce``.
        """
        if not self._has_peers:
            return fn({self.rank: part})
        with self._hosted(topic):
            self._call = self.activity.call = self._call._replace(n_issued=self._n_issued())  # a run may have come in between
            limits = self._limits(is_gathering=True, is_optional=is_optional)
            return fn.load(self._met(topic, fn.dump(part), fn.of_texts, limits))

    def beat(self, doing: str, *, is_new: bool = False, may_last: bool = False) -> None:
        """Between replays: note what begins, and at most four times a second leave if the call was ended.

        ``is_new``: also posted, as what begins may hold the interpreter for ever; the store does not answer that, so it costs microseconds.

        Raises:
            PeerFailedError: another rank aborted.
            AbsentRanksError: the others gave up waiting.
        """
        if not self._has_peers:
            return
        now = time.monotonic()
        self.activity.at(doing, may_last=may_last)
        is_due = now - self._last_check >= max(_CHECK_EVERY_S, len(self.members) / _CHECKS_PER_S)
        if is_new or is_due:
            with self._hosted(doing):
                if is_new:
                    self._store.set(f"beat/{self.rank}", doing)
                if is_due:
                    self._last_check = now
                    if self._has_verdict():  # none is agreed without this rank
                        raise self._error(self._read_verdict()[0])

    def abort(self, error: BaseException) -> None:
        """End the call on all ranks because of ``error``. Returns if this rank shall raise ``error`` itself.

        A collective that failed because a peer did not come is not posted as a cause: this rank comes to the meeting
        instead, and learns there which rank is missing or failed.

        Raises:
            DistTuneError: ``error`` is only the consequence of what another rank did; says which rank, and what.
        """
        if self._is_over or not self._has_peers:
            return  # it was the others' end that was raised here
        if is_secondary(error):
            with self._hosted("abort"):
                try:
                    self._met(f"{FAILED}{text_of(error)}", "", lambda parts: "", self._limits(is_broken=True))
                except DistTuneError as cause:
                    raise cause from error
            return
        self._is_over = True
        try:
            with self._hosted("abort"):
                if (before := self._end(self._store, error)) is not None:
                    error.add_note(f"rank {self.rank}: the tuning had been ended before this: {before}")
        except (StoreGoneError, MachineError) as gone:
            error.add_note(str(gone))  # no peer can be reached any more

    # -- for the minding thread ----------------------------------------------------------------------------------

    @property
    def asked(self) -> Asked | None:
        """A call of the store for this rank's tuning that has no answer yet."""
        return self._store.asked if self._presence is not None else None

    def minder(self, tell: Callable[[str], object]) -> Callable[[], None]:
        """What another thread calls a few times a second while this rank tunes: ``tell`` gets a line for each rank that is late."""
        questions: list[Questions] = []
        looks: list[Thread] = []

        def compare() -> None:
            with suppress(dist.DistError, StoreGoneError):  # the next meeting says so
                if not questions:
                    questions.append(Questions(own_client(self._root)))
                self.activity.compare(questions[0].ask(self.activity.others), tell)

        def look() -> None:
            # On a thread of its own: the store may be silent, and the calling thread has more to mind.
            if self._has_peers and self.activity.is_waiting(tell) and not (looks and looks[-1].is_alive()):
                looks[:] = [Thread(target=compare, name="dist_tune look", daemon=True)]
                with suppress(RuntimeError):  # no more threads
                    looks[0].start()
                    looks[0].join(0.25)

        return look

    def last_signs(self) -> dict[int, str]:
        """Rank -> its last sign of progress. For another thread than the tuning's; it may wait for ever, like the next."""
        if not self._has_peers:
            return {}
        store = self._beside()
        return {rank: text for rank in self.members if rank != self.rank and (text := _last_beat(store, rank))}

    def end_from_outside(self, error: DistTuneError) -> str:
        """End the call on all ranks from another thread, because the tuning's hangs. The error of the peer that has done so before."""
        return "" if not self._has_peers else str(self._end(self._beside(), error) or "")

    def close(self) -> None:
        """Answer no peers any more, because the group is gone."""
        if self._presence is not None:
            self._presence.stop()

    # -- one meeting ---------------------------------------------------------------------------------------------

    def _limits(self, *, is_gathering: bool = False, is_optional: bool = False, is_broken: bool = False) -> Limits:
        return Limits(self.deadline_s, self.gather_s, self._k == 0, is_gathering, is_optional, is_broken)

    def _met(self, topic: str, part: str, reduce: Callable[[dict[int, bytes]], str], limits: Limits) -> bytes:
        """The result of a meeting; it is held again while a rank that had ended this call is on its way to it."""
        while True:
            self.activity.topic = topic if limits.is_first else ""
            try:
                verdict, result = self._meet(topic, part, reduce, limits)
            finally:
                self.activity.topic = ""
            if isinstance(verdict, Agreed):
                return result
            if limits.is_gathering and self._has_gone_on(verdict):
                assert isinstance(verdict, Aborted)
                self._doubted = verdict
                continue
            # A rank that seemed to have called again has not: its end stands.
            raise self._error(self._doubted if isinstance(verdict, Alone) and self._doubted is not None else verdict)

    def _meet(self, topic: str, part: str, reduce: Callable[[dict[int, bytes]], str], limits: Limits) -> tuple[Verdict, bytes]:
        """Bring a part, and take the verdict away. The last to come writes it."""
        if self._lacks is not None and self._presence is None:
            self._is_over = True  # peers cannot be told
            raise self._lacks
        activity, key = self.activity, self._key()
        late = activity.late() if limits.is_broken else None
        activity.at(f"the meeting for {topic!r}", is_meeting=True)
        header = Header(self._step, topic, list(activity.runs), activity.odd, self.n_issued, activity.troubles[:1], late)
        self._store.set(f"{key}/part/{self.rank}", part_text(header, part))
        if self._store.add(f"{key}/count", 1) == len(self.members):
            self._agree(key, reduce)
        else:
            self._wait(key, topic, reduce, limits)
        verdict, result = self._read_verdict()
        if isinstance(verdict, Agreed):
            self._forget(key)
        else:
            self._garbage += [f"{key}/{name}" for name in (f"part/{self.rank}", "count", "verdict")]
        return verdict, result

    def _agree(self, key: str, reduce: Callable[[dict[int, bytes]], str]) -> None:
        texts = self._store.multi_get([f"{key}/part/{rank}" for rank in self.members])
        read = {rank: read_part(text, rank) for rank, text in zip(self.members, texts, strict=True)}
        headers = {rank: header for rank, (header, _) in read.items()}
        steps = {rank: (header.step, header.topic) for rank, header in headers.items()}
        if len(set(steps.values())) == 1 and not next(iter(steps.values()))[1].startswith(FAILED):
            is_even = len({header.n_issued for header in headers.values()}) == 1
            self._decide(key, Agreed(is_even=is_even), reduce({rank: part for rank, (_, part) in read.items()}))
            return
        doing = {rank: _last_beat(self._store, rank) for rank in self.members}
        self._decide(key, Mismatch(steps=steps, doing=doing, cause=cause_of(headers)))

    def _wait(self, key: str, topic: str, reduce: Callable[[dict[int, bytes]], str], limits: Limits) -> None:
        """Wait for a verdict; fix it if no other rank will."""
        questions = Questions(self._store)
        began = here_at = time.monotonic()
        parts = {f"{key}/part/{rank}": rank for rank in self.members}
        for now in self._looks(key):
            missing = [parts[each] for each in absent(self._store, list(parts))]
            if not missing:
                if now - here_at >= self.deadline_s / 4:
                    self._agree(key, reduce)  # the rank that should have written the verdict has died over it
                continue
            peers = questions.ask(missing)
            if any(peer.card is not None and any(map(self._call.holds, peer.card.inside)) for peer in peers.values()):
                here_at = now
            outcome, ranks = limits.outcome(self._call, self.activity.card(0), peers, now - here_at)
            if outcome == "alone":
                gone = {rank: peers[rank] for rank in ranks if (card := peers[rank].card) is None or not has_passed(self._call, card)}
                where = "; ".join(f"rank {rank} has not come to it: {self._where(rank, peer.text)}" for rank, peer in gone.items())
                self._decide(key, Alone(passed=ranks, where=where))
            elif outcome == "timed out":
                last = {rank: self._where(rank, peers[rank].text) for rank in ranks}
                others = {self.rank: self.activity.card(0).text}
                verdict = TimedOut(missing=last, others=others, topic=topic, by=self.rank, within_s=round(now - began, 1))
                self._decide(key, verdict)
            elif outcome == "mismatch":
                (other,) = ranks
                card = peers[other].card
                assert card is not None
                assert card.waits is not None
                mine, theirs = self._call.place, card.waits.place
                crossed: Verdict = Mismatch(steps={self.rank: (mine.closure, topic), other: (theirs.closure, card.topic)})
                if limits.is_gathering or self._call.holds(theirs):
                    where = f"rank {self.rank} waits in {mine.text} and rank {other} in {theirs.text}"
                    crossed = Alone(passed=sorted([self.rank, other]), where=where, is_even=not self._call.holds(theirs))
                for each in (key, f"{card.waits.key}/0"):
                    self._decide(each, crossed)

    def _looks(self, key: str) -> Iterator[float]:
        """The time, now and then until there is a verdict, at growing distances."""
        # Not store.wait(): torch writes two lines of warning to stderr whenever that ends without the key.
        n, began = len(self.members), time.monotonic()
        looked, every_s = began, max(_ASK_S[0], n / _ANSWERS_PER_S)
        shortest_s, longest_s = max(_POLL_S, n / _POLLS_PER_S[0]), n / _POLLS_PER_S[1]
        while not self._store.check([f"{key}/verdict"]):
            now = time.monotonic()
            if now - looked >= every_s:
                looked, every_s = now, min(1.5 * every_s, max(_ASK_S[1], n / _ANSWERS_PER_S))
                yield now
            else:
                time.sleep(min(max((now - began) / 20, shortest_s), longest_s))

    def _where(self, rank: int, text: str) -> str:
        """Where a rank is, by its latest answer and by its last sign of progress: it answers no more if it holds the interpreter's lock."""
        beat = _last_beat(self._store, rank)
        return text if not beat or beat in text else f"{text}; its last sign of progress: {beat}"

    # -- verdicts ------------------------------------------------------------------------------------------------

    def _n_issued(self) -> int:
        return self.n_issued if self._is_even else 0

    def _key(self) -> str:
        return f"{self._call.key}/{self._k}"

    def _has_verdict(self) -> bool:
        return self._has_peers and bool(self._store.check([f"{self._key()}/verdict"]))

    def _read_verdict(self) -> tuple[Verdict, bytes]:
        """The verdict of this meeting; the next one has the next number."""
        found = self._verdict()
        self._k += 1
        return found

    def _verdict(self) -> tuple[Verdict, bytes]:
        verdict, result = read_verdict(self._store.get(f"{self._key()}/verdict"), self.rank)
        if isinstance(verdict, Agreed | Alone):
            self._is_even &= verdict.is_even
        return verdict, result

    def _decide(self, key: str, verdict: Verdict, result: str = "") -> None:
        """Only the first verdict of a meeting counts."""
        self._store.compare_set(f"{key}/verdict", "", verdict_text(verdict, result))

    def _end(self, store: Any, error: BaseException) -> DistTuneError | None:
        """End the call at its first meeting from here on without a verdict; the error of a rank that has ended it before."""
        mine = end_by(self.rank, error, self._n_issued())
        place, keys = self._call.place, [(self._call.key, self._k)]
        if self._first_run is not None:  # its peers may have issued collectives since, or not
            place = self._first_run
            keys = [(key_of(place, has_talked=True), 0)]
            if mine.n_issued == place.before:
                keys.append((key_of(place, has_talked=False), 0))
        before = None
        for key, k in keys:
            text = verdict_text(mine)
            while (found := store.compare_set(f"{key}/{k}/verdict", "", text)) != text.encode():
                verdict, _ = read_verdict(found, self.rank)
                before = before or (None if isinstance(verdict, Agreed) else error_of(verdict, self.rank, place))
                k += 1
            self._garbage.append(f"{key}/{k}/verdict")
        return before

    def _has_gone_on(self, verdict: Verdict) -> bool:
        """True if the rank that has ended this call has called again since: it had issued fewer collectives, and each takes all ranks."""
        return isinstance(verdict, Aborted) and self._call.has_talked and verdict.n_issued < self._call.n_issued

    def _error(self, verdict: Verdict) -> DistTuneError:
        assert not isinstance(verdict, Agreed)
        self._is_over = True
        return error_of(verdict, self.rank, self._call.place)

    def _forget(self, key: str) -> None:
        """Delete the agreed meeting before this one, which all have left: each rank its part, the first one what is of all."""
        for each in self._garbage:
            self._store.delete_key(each)
        # The parts of this one stay: another rank may have fixed the verdict for the last to come, which has yet to read them.
        self._garbage = [f"{key}/{name}" for name in (f"part/{self.rank}", *(("count", "verdict") if self.rank == self.members[0] else ()))]

    def _beside(self) -> Any:
        """A client for a few words from another thread: this one's own, which costs no connection, unless that has no answer."""
        return self._root if self._store.asked is None else own_client(self._root)

    @contextmanager
    def _hosted(self, topic: str) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError as error:
            raise StoreGoneError(
                f"rank {self.rank}: the c10d store cannot be reached at {topic!r} of {self._call.place.closure}: its host (rank 0, or "
                f"torchrun's agent) has exited, or its link was cut. The first error in its log is the cause."
            ) from error


def _last_beat(store: Any, rank: int) -> str:
    """A rank's last sign of progress, empty before it gave one."""
    return store.get(f"beat/{rank}")[:2000].decode(errors="replace") if store.check([f"beat/{rank}"]) else ""
