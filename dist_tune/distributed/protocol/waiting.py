"""Waiting for the verdict of one epoch: for parts of ranks that make progress, or for ranks that may be late or have passed the call.

Knows the keys of an epoch on the store, and what missing ranks show of themselves; nothing of topics, parts or errors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch.distributed as dist

from dist_tune.distributed.liveness.host_processes import GONE, STOPPED, UNKNOWN, state_of
from dist_tune.distributed.liveness.lives import lives_of, state_of_rank
from dist_tune.distributed.liveness.presence import Presence
from dist_tune.distributed.protocol.calls import Place, ahead, is_inside
from dist_tune.distributed.protocol.parts import Parts
from dist_tune.distributed.protocol.verdicts import Verdict
from dist_tune.output import printable

_POLL_S = 1e-4
"""Shortest pause between two looks for a verdict; it grows to a twentieth of the time waited so far."""
_POLLS_PER_S = (20_000.0, 2000.0)
"""Polls of one store per second over all ranks, at first and after long waits."""
_ASK_S = (0.02, 1.0)
"""Shortest and longest pause between two questions to missing ranks."""
_ANSWERS_PER_S = 500.0
"""Answers per second over all ranks, which bounds questions; small groups ask faster."""
_MAX_BEAT = 2000
"""Bytes of a sign of progress that a message quotes."""
_NEVER_MET = "nothing yet"
"""In place of a rank's last sign of progress."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The wait of one rank for one verdict, which it fixes itself if it finds that no other rank will."""

    parts: Parts
    epoch: int
    agree: Callable[[], None]
    """Fixes the verdict that follows from all parts."""
    decide: Callable[[Verdict], None]
    """Fixes this verdict, if there is none."""
    time_out: Callable[[dict[int, str], float], None]
    """Fixes "timed out": missing rank -> its last sign of progress, and the seconds without another one."""

    def for_parts(self, deadline_s: float, patience_s: float, longest_s: float, quiet_s: Callable[[int], float] | None = None) -> None:
        """Wait while missing ranks make progress; without progress for ``patience_s``, fix "timed out".

        A rank that lives in what may last, as a compilation, or whose process is stopped, is waited for up to ``longest_s``.
        ``quiet_s``: rank -> seconds without a beat; if all missing ranks have been quiet for ``deadline_s``, the wait is over, for stopped
        ones too: this is the meeting after a collective that has failed, and no wait saves the tuning.
        """
        seen: dict[int, str] = {}
        since = began = time.monotonic()
        for now in self._looks(deadline_s / 4, deadline_s / 4):
            beats = {rank: beat_of(self.parts.store, rank) for rank in self.parts.missing(self.epoch)}
            if not beats:
                self.agree()  # the rank that should have written the verdict has died over it
                continue
            states = self._states(beats)
            signs = {rank: f"{beat} {states[rank][1]}" for rank, beat in beats.items()}
            if any(state == GONE for state, _ in states.values()):
                self.time_out(beats, round(now - began, 1))
            elif quiet_s is not None and all(quiet_s(rank) >= deadline_s for rank in beats):
                self.time_out(beats, deadline_s)
            elif signs != seen:  # progress, or the first look
                seen, since = signs, now
            elif now - since >= patience_s and (now - began >= longest_s or any(state != STOPPED for state, _ in states.values())):
                self.time_out(beats, patience_s)

    def _states(self, ranks: Collection[int]) -> dict[int, tuple[str, int]]:
        """Rank -> state of its process, and the number of its beat where it is in what may last."""
        lives = lives_of(self.parts.store, list(ranks))
        return {
            rank: (state_of(lives[rank].process), lives[rank].n_beats if lives[rank].may_last else 0) if rank in lives else (UNKNOWN, 0)
            for rank in ranks
        }

    def for_calls(self, presence: Presence, place: Place, deadline_s: float, patience_s: float, *, is_optional: bool) -> None:
        """Wait while missing ranks live and may come; fix "apart" as soon as one is known to have passed the call.

        ``is_optional``: "apart" takes the place of "timed out".
        """
        least_s = len(self.parts.members) / _ANSWERS_PER_S
        since = began = time.monotonic()
        asked, asked_at = 0, 0.0
        for now in self._looks(max(_ASK_S[0], least_s), max(_ASK_S[1], least_s)):
            missing = self.parts.missing(self.epoch)
            answers = presence.answers_of(missing)
            # Answers to earlier questions may be about a time before this call.
            fresh = {rank: answer for rank, answer in answers.items() if answer.number >= asked > 0}
            passed = {rank: answer.passed for rank, answer in fresh.items()}
            is_answered = len(fresh) == len(answers)
            if not missing:
                self.agree()
            elif ahead(place, passed, [rank for rank, each in passed.items() if len(each.get(place.closure, ())) > 1]):
                self.decide({"state": "apart", "passed": passed})
            here = {rank for rank, answer in answers.items() if answer.first_run is not None and is_inside(answer.first_run, place)}
            if here & fresh.keys():
                since = now
            silent = {rank: state_of_rank(self.parts.store, rank) for rank in answers if rank not in fresh} if now - asked_at >= 1.0 else {}
            for rank in silent if asked > 0 else ():
                presence.wake(answers[rank])
            # One that is stopped, or too busy to answer, in this very call comes to it.
            is_coming = all(rank in here and state not in (GONE, UNKNOWN) for rank, state in silent.items())
            is_gone = asked > 0 and not is_answered and now - asked_at >= deadline_s and not is_coming
            is_gone |= GONE in silent.values()
            has_died = any(state == GONE and rank in here for rank, state in silent.items())
            is_gone |= asked > 0 and any(rank not in fresh and presence.has_ended(rank) for rank in answers)
            if is_gone or now - since >= patience_s:
                # A rank that has answered once and does so no more has ended, or its process is busy: the call needs no meeting.
                if is_optional or (is_gone and not has_died):
                    self.decide({"state": "apart", "passed": {self.parts.rank: {place.closure: [place.number]}}})
                else:
                    runs = {rank: answer.first_run for rank, answer in answers.items()}
                    beats = {rank: run.text if (run := runs.get(rank)) is not None else "" for rank in missing}
                    waited_s = round(now - began, 1) if has_died else patience_s
                    self.time_out({rank: beat or beat_of(self.parts.store, rank) for rank, beat in beats.items()}, waited_s)
            elif is_answered or asked == 0:
                n_asked = presence.n_asked()
                asked, asked_at = n_asked if n_asked > asked else presence.ask(), now

    def _looks(self, every_s: float, at_most_s: float) -> Iterator[float]:
        """The time, now and then until there is a verdict, at growing distances."""
        # Not store.wait(): torch writes two lines of warning to stderr whenever that ends without the key.
        began = looked = time.monotonic()
        n = len(self.parts.members)
        shortest_s, longest_s = max(_POLL_S, n / _POLLS_PER_S[0]), n / _POLLS_PER_S[1]
        while not self.parts.has_verdict(self.epoch):
            now = time.monotonic()
            if now - looked >= every_s:
                looked, every_s = now, min(1.5 * every_s, at_most_s)
                yield now
            else:
                time.sleep(min(max((now - began) / 20, shortest_s), longest_s))


def beat_of(store: dist.Store, rank: int) -> str:
    """A rank's last sign of progress, after its time: "12.345 closure: replay 3"."""
    return printable(store.get(f"beat/{rank}")[:_MAX_BEAT].decode(errors="replace")) if store.check([f"beat/{rank}"]) else f"- {_NEVER_MET}"
