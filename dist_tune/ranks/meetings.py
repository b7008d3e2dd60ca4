"""The protocol of meetings on a c10d store: parts, a count, and one verdict that every rank reads.
docs/how-it-works.md has it on one page.

Knows a store and the names of ranks, nothing of process groups. Each member brings its part to each
meeting once, or ends the call; one ``compare_set`` fixes the verdict of a meeting, and all read
that one, late ones too. The first verdict that is not "agreed" is the end of the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import torch.distributed as dist

from dist_tune.errors import DistTuneError, JobEndedError, MachineError, StoreGoneError
from dist_tune.files import tell_held
from dist_tune.ranks import messages
from dist_tune.ranks.calls import Call, Calls, Limits, Place, has_passed
from dist_tune.ranks.clients import Asked, WatchedStore, absent, own_client, run_in_thread
from dist_tune.ranks.messages import FAILED, MISSED_ADVICE, Header, Part, Reduction, Result, Verdict
from dist_tune.ranks.presence import Activity, Presence, Questions

# Seconds between two requests of one rank, and requests a second of all ranks, which bound those of
# large groups:
_CHECK_S, _CHECKS_PER_S = 0.25, 1024.0
# Questions to missing ranks, the first ones and later ones.
_ASK_S, _LATER_S, _ANSWERS_PER_S = (0.02, 0.25, 500.0)
# Of a verdict; the pause grows to a twentieth of the time waited so far.
_POLL_S, _POLLS_PER_S, _LATER_PER_S = (1e-4, 20_000.0, 2000.0)


class Meetings:
    """The meetings of some ranks, as one of them sees them.

    A rank without others meets itself, and needs no store.
    """

    def __init__(self, store: Any, rank: int, members: tuple[int, ...], deadline_s: float) -> None:
        self.rank = rank
        self.members = members
        self._has_peers = self._can_look = len(members) > 1
        self.deadline_s = deadline_s
        self.gather_s = deadline_s
        """Seconds that a rank with something to tune waits in a call's first meeting for those that
        live.
        """
        self.rest_s = 0.0
        """Pause between two looks for a verdict, once it has not come at once; 0: by the number of
        ranks.
        """
        self.activity = Activity(rank, members, lambda: self.n_issued, lambda: self.n_of_process)
        self._root = store
        self._store: Any = WatchedStore(store)
        self._presence: Presence | None = None
        self._lacks: StoreGoneError | None = None
        """Why there is no presence; the first meeting raises it."""
        self._step, self._k = "", 0
        self.is_ending = False
        """True once the program ends, which waits a moment for a thread that is in a meeting."""
        self._is_over = False
        self._last_check = 0.0
        self._looking, self._questions = Thread(), Questions(store)
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

    # -- calls -------------------------------------------------------------------------------------

    def calls(self, closure: str) -> Calls:
        """The calls of ``closure`` by these ranks: this rank counts, and answers peers that ask."""
        if self._presence is None and self._has_peers:
            try:
                with self._hosted("the first call"):
                    self._presence = Presence(self._root, own_client(self._root), self.activity)
            except StoreGoneError as error:
                self._lacks = error
        return self.activity.calls.setdefault(closure, Calls())

    @contextmanager
    def calling(self, closure: str) -> Iterator[Place]:
        """A call that may end in a meeting; peers that ask learn that this rank is inside it."""
        calls, inside = self.activity.calls.setdefault(closure, Calls()), self.activity.inside
        place = Place(closure, calls.n_calls + 1, self.n_issued)
        # Else another thread is tuning: what is said until that ends is about its call.
        if self.activity.call.place not in inside:
            self.activity.begin(place)
        # First: a peer that asks between these lines would take the call for one that is over.
        inside.append(place)
        calls.n_calls += 1
        try:
            self.calls(
                closure
                # The first card says that this rank is inside: its process may end before a peer
                # asks
            )
            yield place
        finally:
            inside.remove(place)

    def enter(self, place: Place, options: str = "", *, has_raised: bool = False) -> None:
        """Come to the meetings of a call, whose first run ``has_raised``.

        The first meeting says if a rank has ended it.
        """
        n_issued = self.n_issued
        self.activity.enter(Call(place, n_issued > place.before, n_issued), has_raised=has_raised)
        self._step, self._k, self._is_over = f"{place.closure}{options}", 0, False

    def agree(
        self, closure: str, topic: str, work: Callable[[], Part], fn: Reduction[Part, Result]
    ) -> Result:
        """A call that all ranks make to meet, and for nothing else: ``fn`` of what the ``work`` of
        each gives. Collective.

        The others wait for a rank at its work as long as it lives; an error there ends the call on
        all ranks. Raises as ``reduce``.
        """
        with self.calling(closure) as place:
            try:
                part = work()
            except BaseException as error:
                self.enter(place, has_raised=True)
                self.abort(error)
                raise
            self.enter(place)
            return self.reduce(topic, part, fn)

    # -- meetings ----------------------------------------------------------------------------------

    def reduce(
        self,
        topic: str,
        part: Part,
        fn: Reduction[Part, Result],
        *,
        is_gathering: bool = False,
        is_optional: bool = False,
    ) -> Result:
        """Bring a part and take ``fn`` of all parts away.

        Collective: every member calls this for the same closure and topic.

        Costs about a millisecond at 4 ranks (logs/contextual-4xH200). Waits for a rank as long as
        that rank makes progress. With ``is_gathering``, in a call that other ranks may come to late
        or may have passed, for ``gather_s``, and longer for one in its first run of this call; with
        ``is_optional``, if this rank can do without the result, for ``deadline_s``.

        Raises:
            AloneError: where it gathers: another rank has passed this call without a meeting, or
                this rank's patience is at its end.
            AbsentRanksError: a rank died, or made no progress; all ranks that come raise it.
            PeerFailedError: another rank aborted; the first to do so is named on all ranks.
            RankMismatchError: ranks are in different closures, or at different steps of one.
        """
        if not self._has_peers:
            return fn({self.rank: part})
        if is_gathering:
            # A run may have come in between.
            self.activity.call = self.activity.call._replace(n_issued=self.n_issued)
        with self._hosted(topic):
            limits = Limits(self.deadline_s, self.gather_s, self._k == 0, is_gathering, is_optional)
            return fn.load(self._met(topic, fn.dump(part), fn.of_texts, limits))

    def beat(self, doing: str, *, is_new: bool = False, may_last: bool = False) -> None:
        """Between replays: note what begins, and at most four times a second leave if the call was
        ended.

        ``is_new``: also posted, as what begins may hold the interpreter for ever; the store does
        not answer that, so it costs microseconds.

        Raises:
            PeerFailedError: another rank aborted.
            AbsentRanksError: the others gave up waiting.
        """
        if not self._has_peers:
            return
        now = time.monotonic()
        self.activity.at(doing, may_last=may_last)
        is_due = now - self._last_check >= max(_CHECK_S, len(self.members) / _CHECKS_PER_S)
        with self._hosted(doing):
            if is_new:
                self._store.set(f"beat/{self.rank}", doing)
            if is_due:
                self._last_check = now
                if self._has_verdict():  # none is agreed without this rank
                    raise self._error(self._read_verdict()[0])

    def abort(self, error: BaseException) -> None:
        """End the call on all ranks because of ``error``.

        Returns if this rank shall raise ``error`` itself.

        A collective that failed because a peer did not come is not posted as a cause: this rank
        comes to the meeting instead, and learns there which rank is missing or failed.

        Raises:
            DistTuneError: ``error`` is only the consequence of what another rank did; says which
                rank, and what.
        """
        if self._is_over:
            return  # it was the others' end that was raised here
        if not self._has_peers:
            if messages.is_secondary(error):
                error.add_note(f"rank {self.rank} tunes without other ranks. {MISSED_ADVICE}")
            return
        if messages.is_secondary(error):
            try:
                with self._hosted("abort"):
                    limits = Limits(self.deadline_s, self.gather_s, self._k == 0, is_broken=True)
                    self._met(f"{FAILED}{messages.text_of(error)}", "", lambda parts: "", limits)
            except DistTuneError as cause:
                raise cause from error
        self._is_over = True
        try:
            with self._hosted("abort"):
                if (before := self._end(self._store, error)) is not None:
                    error.add_note(
                        f"rank {self.rank}: the tuning had been ended before this: {before}"
                    )
        except (StoreGoneError, MachineError) as gone:
            error.add_note(str(gone))  # no peer can be reached any more

    # -- for the minding thread --------------------------------------------------------------------

    @property
    def asked(self) -> Asked | None:
        """A call of the store for this rank's tuning that has no answer yet."""
        return self._store.asked if self._presence is not None else None

    def look(self, tell: Callable[[str], object]) -> None:
        """Called a few times a second while this rank tunes: ``tell`` gets a line for each rank
        that is late.
        """
        # On a thread of its own: the store may be silent, and the calling thread has more to mind.
        if self._can_look and self.activity.is_waiting(tell) and not self._looking.is_alive():
            with suppress(RuntimeError):  # no more threads
                self._looking = run_in_thread(lambda: self._compare(tell))
                self._looking.join(0.25)

    def _compare(self, tell: Callable[[str], object]) -> None:
        try:
            self.activity.compare(self._questions.ask(self.activity.others), tell)
        except dist.DistNetworkError:
            # Its host is gone, and torch tells of each further request at length.
            self._can_look, self.activity.late = False, ""
        except dist.DistError:
            pass  # the next meeting says so

    def last_signs(self) -> dict[int, str]:
        """Rank -> where it is.

        For another thread than the tuning's; it may wait for ever, like the next.
        """
        return (
            {
                rank: card.text
                for rank, card in Questions(self._other_client()).ask(self.activity.others).items()
            }
            if self._has_peers
            else {}
        )

    def end_from_outside(self, error: DistTuneError) -> str:
        """End the call on all ranks from another thread, because the tuning's hangs.

        The error of the peer that has done so before.
        """
        return "" if not self._has_peers else str(self._end(self._other_client(), error) or "")

    def close(self) -> None:
        """Answer no peers any more, because the group is gone."""
        if self._presence is not None:
            self._presence.stop(is_exit=False)

    # -- one meeting -------------------------------------------------------------------------------

    def _met(
        self, topic: str, part: str, reduce: Callable[[dict[int, bytes]], str], limits: Limits
    ) -> bytes:
        """The result of a meeting."""
        if self._lacks is not None and self._presence is None:
            self._is_over = True  # peers cannot be told
            raise self._lacks
        key = self._key()
        self.activity.waits = limits.is_first
        try:
            self._bring(key, topic, part, reduce, limits)
            verdict, result = self._read_verdict()
        finally:
            self.activity.waits = False
        # The parts of an agreed one stay: another rank may have fixed it for the last to come,
        # which has yet to read them.
        mine, of_all = f"{key}/part/{self.rank}", [f"{key}/count", f"{key}/verdict"]
        if not verdict.kind:  # all have left the ones before
            tell_held(verdict.warned)
            for each in self._garbage:
                self._store.delete_key(each)
            self._garbage = [mine, *of_all] if self.rank == self.members[0] else [mine]
            return result
        self._garbage += [mine, *of_all]
        if self._has_gone_on(verdict) and limits.is_gathering:
            raise self._error(
                messages.alone(
                    f"ranks {verdict.ranks} have raised in it and called again", verdict.ranks
                )
            )
        # Of its next attempt, which is the cause.
        while self._has_gone_on(verdict) and limits.is_broken and self._has_verdict():
            verdict, _ = self._read_verdict()
        raise self._error(verdict)

    def _bring(
        self,
        key: str,
        topic: str,
        part: str,
        reduce: Callable[[dict[int, bytes]], str],
        limits: Limits,
    ) -> None:
        """Bring a part; there is a verdict after it, which the last to come writes."""
        header = self.activity.header(self._step, topic)
        at = (
            "the end, after a failed collective"
            if topic.startswith(FAILED)
            else f"the exchange {topic!r}"
        )
        self.activity.at(at, is_meeting=True)
        self._store.set(f"{key}/part/{self.rank}", messages.spell(messages.HEADER, header, part))
        if self._store.add(f"{key}/count", 1) == len(self.members):
            self._agree(key, reduce)
        else:
            self._wait(key, topic, reduce, limits)

    def _agree(self, key: str, reduce: Callable[[dict[int, bytes]], str]) -> None:
        texts = self._store.multi_get([f"{key}/part/{rank}" for rank in self.members])
        headers, parts = dict[int, Header](), dict[int, bytes]()
        for rank, text in zip(self.members, texts, strict=True):
            headers[rank], parts[rank] = messages.read(
                messages.HEADER, text, rank, "its part of a meeting"
            )
        if len({header[:2] for header in headers.values()}) > 1 or headers[
            self.rank
        ].topic.startswith(FAILED):
            self._decide(key, messages.mismatched(headers, self.activity.call.place))
        else:
            self._decide(key, Verdict(warned=messages.tellers(headers)), reduce(parts))

    def _wait(
        self, key: str, topic: str, reduce: Callable[[dict[int, bytes]], str], limits: Limits
    ) -> None:
        """Wait for a verdict; fix it if no other rank will."""
        questions, call = Questions(self._store), self.activity.call
        began = here_at = time.monotonic()
        parts = {f"{key}/part/{rank}": rank for rank in self.members}
        for now in self._looks(key):
            missing = [parts[each] for each in absent(self._store, list(parts))]
            if not missing:
                if now - here_at >= self.deadline_s / 4:
                    # The rank that should have written the verdict has died over it.
                    self._agree(key, reduce)
                continue
            cards = questions.ask(missing)
            if any(call.holds(*card.inside) for card in cards.values()):
                here_at = now
            mine = self.activity.card()
            outcome, ranks = limits.outcome(call, mine, cards, now - here_at)
            if outcome == "alone":
                passed = [rank for rank in ranks if has_passed(call, cards[rank])]
                late = [
                    f"rank {rank} has not come to it: {cards[rank].text}"
                    for rank in ranks
                    if rank not in passed
                ]
                if passed:
                    late.insert(0, f"ranks {passed} have passed it")
                self._decide(key, messages.alone("; ".join(late), ranks))
            elif outcome == "timed out":
                seen = {rank: card.text for rank, card in cards.items()}
                here = [rank for rank in self.members if rank not in cards]
                when = f"within {now - began:.1f} s, for which ranks {here} waited"
                self._decide(key, messages.timed_out(seen, ranks, topic, call.place, when))
            elif outcome == "crossed":
                (rank,) = ranks
                theirs = cards[rank].waits
                assert theirs is not None
                verdict = messages.crossed(
                    {self.rank: call.place, rank: theirs.place},
                    is_gathering=limits.is_gathering,
                )
                # Else this call had ended, and theirs may be the next: it looks itself.
                if self._decide(key, verdict):
                    self._decide(f"{theirs.key}/0", verdict)

    def _looks(self, key: str) -> Iterator[float]:
        """The time, now and then until there is a verdict, at growing distances."""
        # Not store.wait(): torch writes two lines of warning to stderr whenever that ends without
        # the key.
        n, began = len(self.members), time.monotonic()
        looked, every_s = began, max(_ASK_S, n / _ANSWERS_PER_S)
        shortest_s, longest_s = max(_POLL_S, n / _POLLS_PER_S), max(n / _LATER_PER_S, self.rest_s)
        while not self._store.check([f"{key}/verdict"]):
            if self.is_ending:
                raise JobEndedError("the program ends")
            now = time.monotonic()
            if now - looked >= every_s:
                looked, every_s = now, min(1.5 * every_s, max(_LATER_S, n / _ANSWERS_PER_S))
                yield now
            else:
                time.sleep(min(max((now - began) / 20, shortest_s), longest_s))

    # -- verdicts ----------------------------------------------------------------------------------

    def _key(self) -> str:
        return f"{self.activity.call.key}/{self._k}"

    def _has_verdict(self) -> bool:
        return self._has_peers and bool(self._store.check([f"{self._key()}/verdict"]))

    def _read_verdict(self) -> tuple[Verdict, bytes]:
        """The verdict of this meeting; the next one has the next number."""
        verdict, result = self._understood(self._store.get(f"{self._key()}/verdict"))
        self._k += 1
        return verdict, result

    def _understood(self, verdict: bytes) -> tuple[Verdict, bytes]:
        return messages.read(
            messages.VERDICT,
            verdict,
            -1,
            f"the verdict of a meeting, as rank {self.rank} reads it,",
        )

    def _decide(self, key: str, verdict: Verdict, result: str = "") -> bool:
        """Only the first verdict of a meeting counts; true if it is this one."""
        text = messages.spell(messages.VERDICT, verdict, result)
        return bool(self._store.compare_set(f"{key}/verdict", "", text) == text.encode())

    def _end(self, store: Any, error: BaseException) -> DistTuneError | None:
        """End the call at its first meeting from here on without a verdict; the error of a rank
        that has ended it before.
        """
        call, n_issued = self.activity.call, self.n_issued
        mine = messages.spell(
            messages.VERDICT, messages.aborted(error, self.rank, call.place, n_issued)
        )
        meetings = [(call.key, self._k)]
        if self.activity.is_first_run:  # its peers may have issued collectives since, or not
            keys = [call._replace(has_talked=each).key for each in (True, False)]
            meetings = [(key, 0) for key in (keys if n_issued == call.place.before else keys[:1])]
        before = None
        for key, k in meetings:
            while (found := store.compare_set(f"{key}/{k}/verdict", "", mine)) != mine.encode():
                verdict, _ = self._understood(found)
                before = before or (
                    None if not verdict.kind else messages.error_of(verdict, self.rank, call.place)
                )
                k += 1
            self._garbage.append(f"{key}/{k}/verdict")
        return before

    def _has_gone_on(self, ended: Verdict) -> bool:
        """True if the rank that has ended this call has called again since: it had issued fewer
        collectives, and each takes all ranks.
        """
        return self.activity.call.has_talked and 0 <= ended.n_issued < self.activity.call.n_issued

    def _error(self, verdict: Verdict) -> DistTuneError:
        self._is_over = True
        return messages.error_of(verdict, self.rank, self.activity.call.place)

    def _other_client(self) -> Any:
        """A client for a few words from another thread: this one's own, which costs no connection,
        unless that has no answer.
        """
        return self._root if self._store.asked is None else own_client(self._root)

    @contextmanager
    def _hosted(self, topic: str) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError as error:
            where = (
                f"rank {self.rank}: the c10d store cannot be reached at {topic!r} of"
                f" {self.activity.call.place.closure}"
            )
            raise StoreGoneError(
                f"{where}: its host (rank 0, or torchrun's agent) has exited, or its link was cut."
                " The first error in its log is the cause."
            ) from error
