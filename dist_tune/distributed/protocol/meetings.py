"""The protocol of a meeting on a c10d store: parts, a count, and one verdict that every rank reads.

Knows a store and the names of ranks, and nothing of process groups. Each meeting has an epoch. Each member brings its part
to each epoch exactly once, or ends the epoch otherwise; one ``compare_set`` on the epoch's key fixes its verdict (agreed,
aborted, timed out, apart), and all read that one, late ones too. So counts agree again after any error.

The first meeting of a call gathers the ranks, which may come late, or have passed that call with nothing to tune. A meeting is about one
call: the verdict is "apart" when a rank has passed the call that another waits in. The one left behind goes on alone; the rest meet again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from dist_tune.distributed.liveness.heartbeat import Heartbeat
from dist_tune.distributed.protocol.calls import Calls, Place, ahead, calls_of, is_one_call, last_raised
from dist_tune.distributed.protocol.endings import Endings, has_gone_on, is_end_of
from dist_tune.distributed.protocol.epochs import Epochs
from dist_tune.distributed.protocol.messages import read_part
from dist_tune.distributed.protocol.reduction import Part, Reduction, Result
from dist_tune.distributed.protocol.verdicts import FAILED, Verdict, end_by, error_of, is_secondary, mismatch_of, text_of
from dist_tune.distributed.protocol.waiting import beat_of
from dist_tune.errors import AloneError, DistTuneError, MachineError, StoreGoneError

_CHECK_EVERY_S, _CHECKS_PER_S = 0.25, 1024.0  # of one rank, and of all


class Meetings(Epochs):
    """The meetings of some ranks, as one of them sees them."""

    def __init__(self, store: dist.Store, rank: int, members: tuple[int, ...], deadline_s: float, life: Heartbeat | None = None) -> None:
        super().__init__(store, rank, members, deadline_s, life)
        self._endings = Endings()
        self._doubted: Verdict | None = None  # the end of this call by a rank that seems to have called again
        self._last_check, self._is_over = 0.0, False

    # -- calls ---------------------------------------------------------------------------------------------------

    def calls(self, closure: str) -> Calls:
        """The calls of ``closure`` by these ranks: this rank counts, and answers peers that ask."""
        self._begin_life()
        return calls_of(self.members, closure)

    def next_call(self, closure: str) -> int:
        """Number of the next call of ``closure``, where all ranks meet in each and so count alike."""
        calls = self.calls(closure)
        calls.n_calls += 1
        return calls.n_calls

    def begin_first_run(self, closure: str, number: int) -> None:
        """Show peers that this rank is inside a call that may end in a meeting, until it comes there: ``enter``."""
        self._first_run = Place(closure, number, self.n_issued, before=self.n_issued)
        self.life.begin(self.place)

    def enter(self, closure: str, number: int = 0, options: str = "", *, is_broken: bool = False) -> None:
        """Come to the meetings of a call of ``closure``, past those that were ended before.

        ``is_broken``: a collective of its first run has failed.

        Raises:
            DistTuneError: the others have ended this very call, and none of them is waiting now.
        """
        first_run = self._first_run if self._first_run is not None and self._first_run.closure == closure else None
        n_issued = self.n_issued
        before = n_issued if first_run is None else first_run.before
        self._closure, self._place = f"{closure}{options}", Place(closure, number, n_issued, before, last_raised(self.members))
        self._is_over, self._doubted = False, None
        verdict = self._endings.take(self._place)
        if self._presence is None and self._lacks is None:
            self._begin_life()
        with suppress(dist.DistNetworkError):  # the store's host is gone: the first meeting says so
            # What comes after may be about calls that this rank has yet to make.
            while self._lacks is None and (verdict is None or is_broken) and self._store.check([f"{self._epoch}/verdict"]):
                # The end of a call without a meeting does not concern this rank. A peer may have made this call again after its first
                # end, and ended it once more: for that the collective has failed.
                verdict = self._end_in(self._read_verdict()) or verdict
            if verdict is not None and not self._is_awaited():
                if first_run is None or is_broken or not has_gone_on(verdict, self._place):
                    self._first_run = None
                    raise self._error(verdict)
                self._doubted = verdict
        self._first_run = None

    # -- meetings ------------------------------------------------------------------------------------------------

    def reduce(self, topic: str, part: Part, fn: Reduction[Part, Result]) -> Result:
        """Bring a part and take ``fn`` of all parts away. Collective: every member calls this for the same closure and topic.

        Costs about a millisecond at 4 ranks (logs/contextual-4xH200). The last rank to come reads all parts, so what the others
        read does not grow with the group. Waits for a rank as long as that rank makes progress (``beat``).

        Raises:
            AbsentRanksError: a rank made no progress for ``deadline_s``; all ranks that come raise it.
            PeerFailedError: another rank aborted; the first to do so is named on all ranks.
            RankMismatchError: ranks are in different closures, or at different steps of one.
        """
        with self._hosted(topic):
            return fn.load(self._result_of(self._attend_one(topic, fn.dump(part), fn.of_texts)))

    def gather(self, topic: str, part: Part, fn: Reduction[Part, Result], *, is_optional: bool = False) -> Result:
        """As ``reduce``, in a call that other ranks may come to late, or may have passed.

        Waits for a rank that lives for ``gather_s``, and longer while it is in its first run of this call; with ``is_optional``, if
        this rank can do without the result, for ``deadline_s``.

        Raises:
            AloneError: another rank has passed this call without coming to a meeting; or this rank's patience is at its end.
            AbsentRanksError, PeerFailedError, RankMismatchError: as ``reduce``.
        """
        with self._hosted(topic):
            while True:
                self._note_collectives()  # a run may have come in between
                verdict = self._attend(topic, fn.dump(part), fn.of_texts, is_gathering=True, is_optional=is_optional)
                if verdict["state"] == "apart":
                    passed = {int(rank): calls for rank, calls in verdict["passed"].items()}
                    raised = verdict.get("raised", "")
                    if (behind := ahead(self._place, passed)) or verdict.get("is_crossed"):
                        if self._doubted is not None:
                            raise self._error(self._doubted)
                        others = [rank for rank in behind if rank != self.rank]  # itself, if its patience is at its end
                        why = f"ranks {others} have passed it, or go on without it" if others else "other ranks have not come to it"
                        raise AloneError(f"rank {self.rank} is alone in {self._place.text}: {why}{raised and f' ({raised})'}", others)
                elif verdict["state"] == "agreed":
                    self._count_as(verdict.get("number", self._place.number))
                    return fn.load(self._result_of(verdict))
                elif self._end_in(verdict) is not None:
                    raise self._error(verdict)

    def beat(self, doing: str, *, is_new: bool = False) -> None:
        """Between replays, at most four times a second: post a sign of progress, and leave if the tuning was ended.

        ``is_new``: posted in any case, as what begins may never return; the store does not answer that, so it costs microseconds.

        Raises:
            PeerFailedError: another rank aborted.
            AbsentRanksError: the others gave up waiting.
        """
        now = time.monotonic()
        if not (is_due := now - self._last_check >= max(_CHECK_EVERY_S, len(self.members) / _CHECKS_PER_S)) and not is_new:
            return
        self.life.at(doing, may_last=doing.startswith(("compiling", "loading")))
        with self._hosted(doing):
            self._store.set(f"beat/{self.rank}", f"{now:.3f} {self._closure}: {doing}")
            self._last_check = now if is_due else self._last_check
            # No meeting can be agreed without this rank's part: a verdict that is there already ends the tuning.
            if is_due and self._store.check([f"{self._epoch}/verdict"]):
                raise self._error(self._read_verdict())

    def abort(self, error: BaseException) -> None:
        """End the tuning on all ranks because of ``error``. Returns if this rank shall raise ``error`` itself.

        A collective that failed because a peer did not come is not posted as a cause: this rank comes to the meeting
        instead, and learns there which rank is missing or failed.

        Raises:
            DistTuneError: ``error`` is only the consequence of what another rank did; says which rank, and what.
        """
        if self._is_over:
            return  # it was the others' end that was raised here
        if not is_secondary(error):
            self._is_over = True
            try:
                with self._hosted("abort"):
                    self._post_abort(error)
            except (StoreGoneError, MachineError) as gone:
                error.add_note(str(gone))  # no peer can be reached any more
            return
        with self._hosted("abort"):
            verdict = self._attend_one(f"{FAILED}{text_of(error)}", "", lambda parts: "")
        try:
            self._result_of(verdict)
        except DistTuneError as cause:
            raise cause from error

    @contextmanager
    def patient(self, patience_s: float) -> Iterator[None]:
        """Wait this long for a rank without progress, in place of the deadline: it may wait for a peer inside the closure."""
        before, self._patience_s = self._patience_s, patience_s
        try:
            yield
        finally:
            self._patience_s = before

    # -- one epoch -----------------------------------------------------------------------------------------------

    def _post_abort(self, error: BaseException) -> None:
        self._come_to_store()
        mine = end_by(self.rank, error)
        self._decide(mine)
        while (verdict := self._end_in(self._read_verdict())) is None:
            # The interrupt came between a verdict and the reading of it, or a peer has ended another call: peers come to the next meeting.
            self._decide(mine)
        if verdict.get("message") != mine["message"]:
            error.add_note(f"rank {self.rank}: the tuning had been ended before this: {self._error(verdict)}")

    def _is_awaited(self) -> bool:
        """True if a rank has come to the meeting under way for this call; one that has called again may wait there for the next."""
        return any(is_one_call([read_part(text, rank).place, self._place]) for rank, text in self._parts.shown(self._epoch))

    def _note_collectives(self) -> None:
        self._place = self._place._replace(issued=self.n_issued)

    def _count_as(self, number: int) -> None:
        calls_of(self.members, self._place.closure).count_as(self._place.number, number)
        self._place = self._place._replace(number=number)

    def _end_in(self, verdict: Verdict) -> Verdict | None:
        """The verdict, if it is the end of this rank's call; that of another one is kept until this rank comes to it."""
        if verdict["state"] not in ("aborted", "timed out"):
            return None
        if is_end_of(verdict, self._place):
            return verdict
        self._endings.keep(verdict)
        return None

    def _result_of(self, verdict: Verdict) -> str:
        if verdict["state"] != "agreed":
            raise self._error(verdict)
        if "result" not in verdict:
            self._is_over = True
            doing, _ = self.life.places(self._store, {rank: beat_of(self._store, rank) for rank in self.members})
            raise mismatch_of(self.members, verdict["steps"], self._closure, doing, verdict.get("cause"))
        return str(verdict["result"])

    def _error(self, verdict: Verdict) -> DistTuneError:
        self._is_over = True
        return error_of(verdict, self.rank, self._closure)
