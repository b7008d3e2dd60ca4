"""``make()`` on all ranks: where it fails on one, none goes on, and those that wait for that rank inside of theirs leave.

Knows a store that ``make()`` may take down, and nothing of what is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

from dist_tune.distributed import Ranks, Regroup, StoreError, regroup_of
from dist_tune.errors import StuckConfigError
from dist_tune.output import tuning_log
from dist_tune.settings import Settings
from dist_tune.watch.last_words import EXIT_CODE, LastWords

_POLL_S = 0.25
_POLLS_PER_S = 500.0
"""Of all ranks together."""


@contextmanager
def making(ranks: Ranks, settings: Settings, stuck: StuckConfigError) -> Iterator[None]:
    """Make process groups within this block. Collective: it ends on all ranks, or raises on all of them.

    A process leaves that is still inside one deadline after another rank has failed: it may wait there for that rank.

    Raises:
        StuckConfigError: ``stuck``, where another rank failed.
    """
    made, seen = regroup_of(ranks, 1), regroup_of(ranks, 1)
    if made is None or seen is None:
        yield
        return
    over, why = Event(), ""
    thread = Thread(target=_watch, args=(ranks, settings, seen, over), name="dist_tune make", daemon=True)
    with suppress(RuntimeError):  # no more threads: it runs unwatched
        thread.start()
    try:
        yield
        with suppress(StoreError):  # make() has taken the store down, which says that all ranks have come to it
            why = made.agree(ranks.gather_s)
    except BaseException as error:
        with suppress(StoreError):
            made.refuse(f"make() of rank {ranks.rank} raised {type(error).__name__}: {error}")
        raise
    finally:
        over.set()
        if thread.ident is not None:
            thread.join(1.0)
    if why:
        stuck.add_note(f"process groups are not made anew: {why}")
        raise stuck


def _watch(ranks: Ranks, settings: Settings, made: Regroup, over: Event) -> None:
    with suppress(StoreError):
        while not over.wait(max(_POLL_S, len(ranks.members) / _POLLS_PER_S)):
            if (why := made.verdict()) is None:
                continue
            if why and not over.wait(settings.deadline_s):
                late = f"make() has not returned for {settings.deadline_s:g} s after it failed elsewhere: {why}"
                with tuning_log(settings, ranks.rank, is_first=False) as log:
                    words = LastWords(ranks, settings, log)
                    with words.opened():
                        words.tell(late, f"the process ends with exit code {EXIT_CODE}")
                        words.leave(late, "Mend what it raised")
            return
