"""The protocol of a meeting on a c10d store: parts, a count, and one verdict that every rank reads.

Knows a store and the names of ranks, and nothing of process groups. Each meeting has an epoch. Each member brings its part
to each epoch exactly once, or ends the epoch otherwise; one ``compare_set`` on the epoch's key fixes its verdict (agreed,
aborted, timed out, apart), and all read that one, late ones too. So counts agree again after any error.

The first meeting of a call gathers the ranks, which may come late, or have passed that call with nothing to tune. A meeting is about one
call: the verdict is "apart" when a rank has passed the call that another waits in. The one left behind goes on alone; the rest meet again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch.distributed as dist

from dist_tune.distributed.calls import ISSUED, Calls, Place, ahead, all_passed, calls_of, is_apart, is_one_call
from dist_tune.distributed.heartbeat import Heartbeat
from dist_tune.distributed.homes import NO_HOME
from dist_tune.distributed.lives import cause_of, lives_of
from dist_tune.distributed.messages import count_up, read_part, read_verdict
from dist_tune.distributed.outside import WatchedStore
from dist_tune.distributed.parts import Parts
from dist_tune.distributed.presence import Presence
from dist_tune.distributed.reduction import Part, Reduction, Result
from dist_tune.distributed.verdicts import FAILED, Verdict, end_by, error_of, is_secondary, mismatch_of, text_of
from dist_tune.distributed.waiting import Wait, beat_of
from dist_tune.errors import AloneError, DistTuneError, StoreGoneError

_CHECK_EVERY_S, _CHECKS_PER_S = 0.25, 1024.0  # of one rank, and of all
_Reduce = Callable[[dict[int, str]], str]
"""Rank -> part as text, of all ranks, to the result as text."""


class Meetings:
    """The meetings of some ranks, as one of them sees them."""

    def __init__(self, store: dist.Store, rank: int, members: tuple[int, ...], deadline_s: float, life: Heartbeat | None = None) -> None:
        self.rank = rank
        self.members = members
        self.deadline_s = deadline_s
        self.gather_s = deadline_s
        """Seconds that a rank with something to tune waits in a call's first meeting for those that live."""
        self._closure, self._place = "", Place("", 0)
        self._first_run, self._issued_before = "", 0
        self._patience_s: float | None = None
        self._epoch = self._agreed = 0
        self._last_check, self._is_over, self._root = 0.0, False, store
        self._store: Any = store
        self._presence: Presence | None = None
        self._parts: Parts
        self.life = life or Heartbeat(rank, members, lambda: self.n_issued)

    @property
    def n_issued(self) -> int:
        """Collectives that this rank has issued on the group so far; 0 where it is not known."""
        return 0

    # -- calls ---------------------------------------------------------------------------------------------------

    def calls(self, closure: str) -> Calls:
        """The calls of ``closure`` by these ranks: this rank counts, and answers peers that ask."""
        with suppress(dist.DistError):  # the store's host is gone: the first meeting says so
            self._begin_life()
        return calls_of(self.members, closure)

    def next_call(self, closure: str) -> int:
        """Number of the next call of ``closure``, where all ranks meet in each and so count alike."""
        calls = self.calls(closure)
        calls.n_calls += 1
        return calls.n_calls

    def begin_first_run(self, closure: str, number: int) -> None:
        """Show peers that this rank is inside a call that may end in a meeting, until it comes there: ``enter``."""
        self._first_run, self._issued_before = Place(closure, number).text, self.n_issued
        self.life.begin(self._first_run)

    def enter(self, closure: str, number: int = 0, options: str = "", *, is_inside: bool = False) -> None:
        """Come to the meetings of a call of ``closure``, past those that were ended before; ``is_inside``: from within its first run.

        Raises:
            DistTuneError: the others have ended this very call, and none of them is waiting now.
        """
        self._closure, self._place = f"{closure}{options}", Place(closure, number, self.n_issued, self.n_issued > self._issued_before)
        self._is_over = False
        verdict = None
        with suppress(dist.DistNetworkError):  # as in calls()
            self._begin_life()
            # What comes after may be about calls that this rank has yet to make.
            while verdict is None and self._store.check([f"{self._epoch}/verdict"]):
                ended = self._read_verdict()
                # The end of a call without a meeting does not concern this rank.
                if ended["state"] != "apart" and ended["call"] == self._place.text:
                    verdict = ended
            if verdict is not None and not self._is_awaited():
                self._first_run = ""
                raise self._error(verdict)
        self._first_run = self._first_run if is_inside else ""

    def close(self) -> None:
        """Answer no peers any more, because the group is gone."""
        if self._presence is not None:
            self._presence.stop()

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
            verdict = self._attend(topic, fn.dump(part), fn.of_texts)
            return fn.load(self._result_of(verdict))

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
                verdict = self._attend(topic, fn.dump(part), fn.of_texts, is_gathering=True, is_optional=is_optional)
                if verdict["state"] == "apart":
                    passed = {int(rank): calls for rank, calls in verdict["passed"].items()}
                    if behind := ahead(self._place, passed):
                        others = [rank for rank in behind if rank != self.rank]  # itself, if its patience is at its end
                        why = f"ranks {others} have passed it, or go on without it" if others else "other ranks have not come to it"
                        raise AloneError(f"rank {self.rank} is alone in {self._place.text}: {why}", others)
                elif verdict["state"] == "agreed" or verdict["call"] == self._place.text:
                    return fn.load(self._result_of(verdict))

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
            except StoreGoneError as gone:
                error.add_note(str(gone))  # no peer can be reached any more
            return
        with self._hosted("abort"):
            verdict = self._attend(f"{FAILED}{text_of(error)}", "", lambda parts: "")
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

    def _begin_life(self) -> None:
        if self._presence is None:
            # The store may outlive a process group (torchrun's does): each time ranks make this object anew, they leave older keys alone.
            life = count_up(self._root, f"lives/{self.rank}")
            self._store = WatchedStore(dist.PrefixStore(f"{life}", self._root))
            self._parts = Parts(self._store, self.rank, self.members)
            self._presence = Presence(self._store, self.rank, self.members, self._state)

    def _state(self) -> tuple[dict[str, list[int]], str]:
        """For peers that ask: calls that this rank has passed, and the one that it is in."""
        return all_passed(self.members) | {ISSUED: [self.n_issued]}, self._first_run

    def _post_abort(self, error: BaseException) -> None:
        mine = end_by(self.rank, error)
        self._decide(mine)
        while (verdict := self._read_verdict())["state"] not in ("aborted", "timed out"):
            self._decide(mine)  # the interrupt came between a verdict and the reading of it: peers are on their way to the next meeting
        if verdict.get("message") != mine["message"]:
            error.add_note(f"rank {self.rank}: the tuning had been ended before this: {self._error(verdict)}")

    def _is_awaited(self) -> bool:
        """True if a rank has come to the meeting under way for this call; one that has called again may wait there for the next."""
        return any(is_one_call([read_part(text, rank).place, self._place]) for rank, text in self._parts.shown(self._epoch))

    def _attend(self, topic: str, part: str, reduce: _Reduce, *, is_gathering: bool = False, is_optional: bool = False) -> Verdict:
        """Bring a part, take the verdict away. The last to come writes it."""
        self.life.at(f"the meeting for {topic!r}", introduced_on=self._store)
        mine = [self._closure, topic, part, self._place, self._state()[0] if is_gathering else None, self._parts.home.joined()]
        if self._parts.bring(self._epoch, json.dumps(mine), is_direct=is_gathering):
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
        closures, topics, parts, places, passed, homes = zip(*map(read_part, texts, self.members), strict=True)
        steps = list(zip(closures, topics, strict=True))
        known = {rank: each or {} for rank, each in zip(self.members, passed, strict=True)}
        if None not in passed and is_apart(dict(zip(self.members, places, strict=True)), known):
            self._decide({"state": "apart", "passed": known})
        elif len(set(steps)) > 1 or topics[0].startswith(FAILED):
            cause = cause_of(lives_of(self._store, self.members))
            self._decide({"state": "agreed", "steps": steps, "cause": cause})  # on nothing: each rank says why, in _result_of
        else:
            result = reduce(dict(zip(self.members, parts, strict=True)))
            self._decide({"state": "agreed", "result": result, **({} if NO_HOME in homes else {"homes": homes})})

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
        self._store.compare_set(f"{self._epoch}/verdict", "", json.dumps({**verdict, "call": self._place.text}))

    def _read_verdict(self) -> Verdict:
        self._epoch += 1
        verdict = read_verdict(self._parts.verdict(self._epoch - 1), self.rank)
        self._parts.settle(verdict.get("homes", ()))
        return verdict

    def _time_out(self, topic: str, beats: dict[int, str], within_s: float) -> None:
        missing, others = self.life.places(self._store, beats)
        where = {"topic": topic, "closure": self._closure, "by": self.rank}
        self._decide({"state": "timed out", "missing": missing, "others": others, "within_s": within_s, **where})

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
