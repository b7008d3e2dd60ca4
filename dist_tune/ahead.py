"""``tune_all``: calls of a step that all ranks make one after the other, before the job needs what they tune.

Before each call ranks compare how many they have, so that lists of different lengths end in an error and not in a wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import closing
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from dist_tune.distributed import Reduction
from dist_tune.errors import AbsentRanksError, AloneError, NestedTuningError, RankMismatchError
from dist_tune.output import Story, amount, closure_name
from dist_tune.runtime import interception
from dist_tune.settings import read_settings
from dist_tune.validation import spelled

if TYPE_CHECKING:
    from dist_tune.cache import TuningRecord


def tune_all(step: Callable[..., object], calls: Iterable[object]) -> list[TuningRecord]:
    """Make these calls of a step, so that their sizes are tuned before graphs are captured and memory is given away.

    Collective for a step that decides with other ranks: all of them make as many calls. Arguments and values are free after each. A step
    that may not be replayed is not tuned here: each call is made once, and one line says so.

    Args:
        step: of ``contextual_autotune`` or ``autotune``; ``functools.partial(step, autotune_pg=group)`` for ranks of a group.
        calls: the arguments of each call: a tuple of positional ones, a dict of keyword arguments, anything else as the only one, or a
            function without arguments that makes these when their turn comes.

    Returns:
        The records that these calls have added to ``step.records``; equal on all ranks but for facts that only this rank measured.

    Raises:
        TypeError: this is no such step, or no list of calls.
        RankMismatchError: on all ranks: the numbers of calls differ.
        NestedTuningError: inside a tuned step, where ranks do not talk.
        Exception: what a call raises, with its number in a note; other ranks raise a ``PeerFailedError``.
    """
    tuner: Any = getattr(getattr(step, "func", step), "_tuner", None)
    if tuner is None:
        raise TypeError(f"tune_all takes a step of contextual_autotune or a function of autotune, got {spelled(step)}")
    if isinstance(calls, Mapping | str) or not isinstance(calls, Iterable):
        raise TypeError(f"calls must be a list with the arguments of each call, got {spelled(calls)}")
    if interception.listener_here() is not None:
        raise NestedTuningError(f"tune_all of {tuner.name} is called inside a tuned step, where ranks do not talk: call it before the step")
    settings, name, n_known = read_settings(), closure_name(tuner.name), len(tuner.records)
    ranks = tuner.ranks(settings.deadline_s, getattr(step, "keywords", {}).get("autotune_pg"))
    items, n_calls, told_at = iter(calls), len(calls) if isinstance(calls, Sized) else None, 0.0
    made, failed = list[Any](), list[BaseException]()

    def coming() -> int:
        """Make the arguments of the next call. How many calls there are, or -n for at least n."""
        if failed:  # here peers hear of it, which may have come through that call
            raise failed.pop()
        for item in items:
            made.append(item() if callable(item) else item)
            return -number if n_calls is None else n_calls
        return number - 1

    with closing(Story(settings, ranks.rank, is_first=ranks.writes_progress)) as story:
        for number in count(1):
            try:
                differing = ranks.agree(
                    f"tune_all of {tuner.name}", "the next call", coming, _differing, partial(story.warning, shown=True)
                )
            except AloneError as error:
                raise AbsentRanksError(str(error), error.ranks) from None
            if differing:
                raise RankMismatchError(f"tune_all of {name}: {differing}. Pass as many calls on all ranks")
            if not made:
                break
            if (now := time.monotonic()) - told_at >= 1.0 or number == n_calls:  # those that tune nothing come by the hundred
                told_at = now
                story.info(f"{name}: call {number}{f' of {n_calls}' * (n_calls is not None)}", shown=True)
            given = made.pop()
            try:
                step(**given) if isinstance(given, Mapping) else step(*(given if isinstance(given, tuple) else (given,)))
            except BaseException as error:  # noqa: BLE001  # raised again before the next call
                error.add_note(f"in call {number} of tune_all of {tuner.name}")
                failed.append(error)
            del given
        if tuner.online is not None:
            why = "its calls may not be repeated, so each was made once, and it is tuned in the calls of the job"
            story.warning(f"{name} was not tuned ahead: {why}. With reset= it is replayed", shown=True)
    return list(tuner.records[n_known:])


@Reduction
def _differing(parts: Mapping[int, int]) -> str:
    """Words about the numbers of calls where they differ; empty while they may be the same."""
    known, least = {n for n in parts.values() if n >= 0}, max(-n for n in parts.values())
    if len(known) <= 1 and min(known, default=least) >= least:
        return ""
    told = {n: [rank for rank, each in parts.items() if each == n] for n in parts.values()}
    return ", ".join(f"ranks {told[n]} have {amount(abs(n), 'call')}{' or more' * (n < 0)}" for n in told)
