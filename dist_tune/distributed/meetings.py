"""The protocol of a meeting on a c10d store: parts, a count, and one verdict that every rank reads.

Knows a store and the names of ranks, and nothing of process groups. Each meeting has an epoch. Each member brings its part
to each epoch exactly once, or ends the epoch otherwise; one ``compare_set`` on the epoch's key fixes its verdict (agreed,
aborted, timed out, waived), and all read that one, late ones too. So counts agree again after any error.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from dist_tune.distributed.reduction import Part, Reduction, Result
from dist_tune.errors import SHARED_ERRORS, AbsentRanksError, DistTuneError, PeerFailedError, RankMismatchError, StoreGoneError

# Errors of a collective whose peer did not come, or is gone: a consequence, not a cause.
_SECONDARY = re.compile(r"/gloo/|NCCL error|\bnccl\w+Error\b|watchdog|connection (was )?(closed|reset) by peer \[", re.IGNORECASE)
_CHECK_EVERY_S = 0.25
_POLL_S = (1e-4, 0.02)
"""Shortest and longest pause between two looks for a verdict; between them a twentieth of the time waited so far."""
_POLLS_PER_S = 2000.0
"""Store polls per second over all ranks that have waited for long; small groups poll faster."""
_NEVER_MET = "- nothing yet"
"""In place of the time and topic of a rank's last sign of life."""
_FAILED = "failed: "
"""Prefix of the topic of a rank that comes to a meeting with an error which is only a consequence."""

_n_calls: Counter[tuple[tuple[int, ...], str]] = Counter()
"""(ranks, closure) -> calls so far in this process; not of a group object, because a store may outlive it."""
_Reduce = Callable[[dict[int, str]], str]
"""Rank -> part as text, of all ranks, to the result as text."""


def is_secondary(error: BaseException) -> bool:
    """True for a collective that failed because a peer did: such an error is never the root cause."""
    if isinstance(error, DistTuneError):
        return False  # its text holds names of the user's, such as a kernel's
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(_SECONDARY.search(str(error))))


class Meetings:
    """The meetings of some ranks, as one of them sees them."""

    def __init__(self, store: dist.Store, rank: int, members: tuple[int, ...], deadline_s: float) -> None:
        self.rank = rank
        self.members = members
        self.deadline_s = deadline_s
        self._closure = ""
        self._call = ""
        self._epoch = 0
        self._agreed: int | None = None
        self._last_check = 0.0
        self._is_over = False
        self._root = store
        self._store = store
        self._has_begun = False

    def enter(self, closure: str, call: int = 0) -> None:
        """Begin the ``call``-th call of ``closure``: leave behind meetings that were ended before this rank came.

        Raises:
            DistTuneError: the others have ended this very call, and none of them is waiting now.
        """
        self._closure, self._call = closure, f"{closure}, call {call}"
        self._is_over = False
        with self._hosted("enter"):
            if not self._has_begun:
                # The store may outlive a process group (torchrun's does): each time all ranks make this object anew,
                # they count one up and leave the keys of the last time alone.
                life = self._root.add(f"lives/{self.rank}", 1)
                self._store, self._has_begun = dist.PrefixStore(f"{life}", self._root), True
            verdict = None
            # What comes after may be about calls that this rank has yet to make.
            while verdict is None and self._store.check([f"{self._epoch}/verdict"]):
                passed = self._read_verdict()
                # The end of a call that this rank made without a meeting does not concern it.
                if passed["state"] != "waived" and passed["call"] == self._call:
                    verdict = passed
            if verdict is not None and not self._is_awaited():
                raise self._error(verdict)

    def next_call(self, closure: str) -> int:
        """Number of the next call of ``closure`` in which ranks meet: all count alike, since all make it."""
        _n_calls[self.members, closure] += 1
        return _n_calls[self.members, closure]

    def reduce(self, topic: str, part: Part, fn: Reduction[Part, Result], *, is_optional: bool = False) -> Result:
        """Bring a part and take ``fn`` of all parts away. Collective: every member calls this for the same closure and topic.

        Costs about a millisecond at 4 ranks (logs/contextual-4xH200). The last rank to come reads all parts, so what the others
        read does not grow with the group. Waits for a rank as long as that rank makes progress (``beat``). ``is_optional``: this rank
        can do without the result; if it gives up, the others see no error later on.

        Raises:
            AbsentRanksError: a rank made no progress for ``deadline_s``; all ranks that come raise it.
            PeerFailedError: another rank aborted; the first to do so is named on all ranks.
            RankMismatchError: ranks are in different closures, or at different steps of one.
        """
        epoch = self._epoch
        with self._hosted(topic):
            verdict = self._attend(topic, fn.dump(part), fn.of_texts, is_optional)
            if verdict["state"] != "agreed":
                raise self._error(verdict)
            self._forget_old(epoch)
        return fn.load(self._result_of(verdict))

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
            verdict = self._attend(f"{_FAILED}{_text(error)}", "", lambda parts: "")
        try:
            if verdict["state"] != "agreed":
                raise self._error(verdict)
            self._result_of(verdict)
        except DistTuneError as cause:
            raise cause from error

    # -- one epoch -----------------------------------------------------------------------------------------------

    def _post_abort(self, error: BaseException) -> None:
        mine = {"state": "aborted", "rank": self.rank, "kind": type(error).__name__, "error": _text(error), "message": str(error)}
        self._decide(mine)
        verdict = self._read_verdict()
        if verdict.get("message") != mine["message"]:
            error.add_note(f"rank {self.rank}: the tuning had been ended before this: {self._error(verdict)}")

    def _is_awaited(self) -> bool:
        """True if a rank has come to the meeting under way for the same closure; it may have gone on to another one."""
        parts = [f"{self._epoch}/parts/{rank}" for rank in self.members]
        return any(json.loads(self._store.get(part))[0] == self._closure for part in parts if self._store.check([part]))

    def _attend(self, topic: str, part: str, reduce: _Reduce, is_optional: bool = False) -> dict[str, Any]:
        """Bring a part, take the verdict away. The last to come writes it."""
        self._store.set(f"{self._epoch}/parts/{self.rank}", json.dumps([self._closure, topic, part]))
        if self._store.add(f"{self._epoch}/count", 1) == len(self.members):
            return self._passed(self._agree(reduce))
        self._await_verdict(topic, reduce, is_optional)
        return self._read_verdict()

    def _agree(self, reduce: _Reduce) -> bytes:
        texts = self._store.multi_get([f"{self._epoch}/parts/{rank}" for rank in self.members])
        closures, topics, parts = zip(*map(json.loads, texts), strict=True)
        steps = list(zip(closures, topics, strict=True))
        if len(set(steps)) > 1 or topics[0].startswith(_FAILED):
            return self._decide({"state": "agreed", "steps": steps})  # on nothing: each rank says why, in _result_of
        return self._decide({"state": "agreed", "result": reduce(dict(zip(self.members, parts, strict=True)))})

    @contextmanager
    def _hosted(self, topic: str) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError as error:
            raise StoreGoneError(
                f"rank {self.rank}: the c10d store is gone at {topic!r} of {self._closure}; the process that hosts it (rank 0, or "
                f"torchrun's agent) has exited. The first error in its log is the cause."
            ) from error

    def _decide(self, verdict: dict[str, Any]) -> bytes:
        """Only the first verdict of an epoch counts: returns that one."""
        first: bytes = self._store.compare_set(f"{self._epoch}/verdict", "", json.dumps({**verdict, "call": self._call}))
        return first

    def _read_verdict(self) -> dict[str, Any]:
        return self._passed(self._store.get(f"{self._epoch}/verdict"))

    def _passed(self, text: bytes) -> dict[str, Any]:
        verdict: dict[str, Any] = json.loads(text)
        self._epoch += 1
        return verdict

    def _await_verdict(self, topic: str, reduce: _Reduce, is_optional: bool) -> None:
        """Wait for the verdict while missing ranks make progress; without progress for the deadline, fix "timed out"."""
        # Not store.wait(): torch writes two lines of warning to stderr whenever that ends without the key.
        seen: dict[int, str] = {}
        began = looked = since = time.monotonic()
        while not self._store.check([f"{self._epoch}/verdict"]):
            now = time.monotonic()
            if now - looked < self.deadline_s / 4:
                time.sleep(min(max((now - began) / 20, _POLL_S[0]), min(_POLL_S[1], len(self.members) / _POLLS_PER_S)))
                continue
            looked = now
            beats = {rank: self._beat_of(rank) for rank in self._missing()}
            if not beats:
                self._agree(reduce)  # the rank that should have written the verdict has died over it
            elif beats != seen:  # progress, or the first look
                seen, since = beats, now
            elif now - since >= self.deadline_s:
                state = "waived" if is_optional else "timed out"
                self._decide({"state": state, "missing": beats, "topic": topic, "closure": self._closure, "by": self.rank})

    def _missing(self) -> list[int]:
        return [rank for rank in self.members if not self._store.check([f"{self._epoch}/parts/{rank}"])]

    def _beat_of(self, rank: int) -> str:
        return self._store.get(f"beat/{rank}").decode() if self._store.check([f"beat/{rank}"]) else _NEVER_MET

    def _forget_old(self, epoch: int) -> None:
        if self.rank != self.members[0]:
            return
        # All ranks have read the verdict before this one, since all have come to this one.
        old, self._agreed = self._agreed, epoch
        if old is not None:
            for name in ("count", "verdict", *(f"parts/{rank}" for rank in self.members)):
                self._store.delete_key(f"{old}/{name}")

    def _result_of(self, verdict: dict[str, Any]) -> str:
        if "result" in verdict:
            return str(verdict["result"])
        self._is_over = True
        steps = dict(zip(self.members, verdict["steps"], strict=True))
        failed = {rank: topic.removeprefix(_FAILED) for rank, (_, topic) in steps.items() if topic.startswith(_FAILED)}
        if failed:
            rank, error = next(iter(failed.items()))
            others = [f"rank {each} at {topic!r}" for each, (_, topic) in steps.items() if each not in failed]
            raise PeerFailedError(
                f"rank {rank} left {self._closure} with {error} while it was being tuned; ranks {list(failed)} failed so, "
                f"{', '.join(others) or 'no other'} did not. A collective of the closure did not find all its ranks: does every rank call "
                f"the same collectives in the same order in every replay?",
                rank,
                error,
            )
        first, *rest = (f"rank {rank} is in {closure}, step {topic!r}" for rank, (closure, topic) in steps.items())
        other = next(text for text in rest if text.partition(" is in ")[2] != first.partition(" is in ")[2])
        raise RankMismatchError(f"{first}, {other}. Call tuned closures in the same order on all ranks of their group.")

    def _error(self, verdict: dict[str, Any]) -> DistTuneError:
        self._is_over = True
        if verdict["state"] in ("timed out", "waived"):
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
