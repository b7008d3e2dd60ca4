"""``tune_all``: calls of a step, made one after the other before the job needs what they tune."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from dist_tune.files import rank_of_job
from dist_tune.log import Story, closure_name
from dist_tune.settings import read_settings
from dist_tune.validation import spelled

if TYPE_CHECKING:
    from dist_tune.records import TuningRecord


def tune_all(step: Callable[..., object], calls: Iterable[object]) -> list[TuningRecord]:
    """Make these calls of a step, so that their sizes are tuned before graphs are captured and
    memory is given away.

    For a step that decides with other ranks all of them make as many calls, in the same order. Each
    is an ordinary call: one that other ranks do not make is not tuned, and a step that may not be
    replayed is tuned in the calls of the job. One line says so.

    Args:
        step: of ``contextual_autotune`` or ``autotune``; ``functools.partial(step,
            autotune_pg=group)`` for ranks of a group.
        calls: the arguments of each call: a tuple of positional ones, a dict of keyword arguments,
            anything else as the only one, or a function without arguments that makes these when
            their turn comes, and whose result is free after the call.

    Returns:
        The records that these calls have added to ``step.records``; equal on all ranks but for
        facts that only this rank measured.

    Raises:
        TypeError: this is no such step, or no list of calls.
        Exception: what a call raises, with its number in a note.
    """
    tuned: Any = getattr(step, "func", step)
    if not hasattr(tuned, "records"):
        raise TypeError(
            "tune_all takes a step of contextual_autotune or a function of autotune, got"
            f" {spelled(step)}"
        )
    if isinstance(calls, Mapping | str) or not isinstance(calls, Iterable):
        raise TypeError(
            f"calls must be a list with the arguments of each call, got {spelled(calls)}"
        )
    listed, n_known, rank, shown_at = [*calls], len(tuned.records), rank_of_job(), 0.0
    with closing(Story(read_settings(), rank, is_first=rank == 0)) as story:
        for number, given in enumerate(listed, 1):
            # Those that tune nothing come by the hundred.
            if (now := time.monotonic()) - shown_at >= 1.0 or number == len(listed):
                shown_at = now
                story.info(
                    f"{closure_name(tuned.__qualname__)}: call {number} of {len(listed)}",
                    shown=True,
                )
            try:
                _call(step, given)
            except Exception as error:
                error.add_note(f"in call {number} of {len(listed)} of tune_all")
                raise
    return list(tuned.records[n_known:])


def _call(step: Callable[..., object], given: Any) -> None:
    if callable(given):
        given = given()
    if isinstance(given, Mapping):
        step(**given)
    else:
        step(*(given if isinstance(given, tuple) else (given,)))
