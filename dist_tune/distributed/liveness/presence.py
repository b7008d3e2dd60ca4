"""A thread that answers peers which ask where this rank is: which calls it has passed, and that it lives.

A call with nothing to tune says nothing to any rank, so a rank that waits for others could not tell one that is late (a checkpoint, data)
from one that has made the call without a miss. It asks; a thread of each rank waits for that inside the store, on a client of its own,
and costs nothing before. Knows a store, and nothing of meetings.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from pydantic import TypeAdapter

from dist_tune.distributed.protocol.calls import Place
from dist_tune.distributed.protocol.messages import count_up, read_message
from dist_tune.distributed.protocol.parts import absent
from dist_tune.errors import PeerFailedError

_WAIT = timedelta(days=10)
"""Of one wait inside the store, which is repeated; torch counts its milliseconds in 32 bits."""
_JOIN_S = 2.0
_FAREWELL_S = 0.5
"""Seconds that rank 0, which may host the store, waits at its end for peers to leave it: torch warns of one that is cut off."""


class Answer(NamedTuple):
    """A rank's latest answer. A JSON array."""

    number: int
    """Of the question."""
    passed: dict[str, list[int]]
    """See ``calls.Passed``."""
    first_run: Place | None
    """Call that the rank is in and that may end in a meeting."""


_ANSWER: TypeAdapter[Answer] = TypeAdapter(Answer)


class Presence:
    """The answers of this rank to the members of one group. ``client``: of the same keys as ``store``, for the thread alone."""

    def __init__(
        self,
        store: dist.Store,
        client: dist.Store,
        rank: int,
        members: tuple[int, ...],
        state: Callable[[], tuple[dict[str, list[int]], Place | None]],
    ) -> None:
        self._store = store
        self._rank = rank
        self._members = members
        self._state = state
        self._is_over = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._answer_all, name="dist_tune presence", daemon=True, args=(client,))
        with suppress(RuntimeError):  # no more threads: peers take this rank for one that has not answered yet
            self._thread.start()
        atexit.register(self.stop)

    def ask(self) -> int:
        """Ask all ranks; returns the number of the question."""
        number = count_up(self._store, "questions")
        self._store.set(f"question/{number}", "")
        return number

    def wake(self, answer: Answer) -> None:
        """Put the question again that the rank of this answer waits for: it may have been deleted before that rank came to wait.

        Only once a later one was asked, or that rank would answer without end.
        """
        self._store.set(f"question/{answer.number + 1}", "")

    def n_asked(self) -> int:
        """Questions so far, of all ranks."""
        return count_up(self._store, "questions", 0)

    def answer_of(self, rank: int) -> Answer | None:
        """The latest answer of a rank; None before its first. Raises ``PeerFailedError`` for what is none."""
        key = f"answer/{rank}"
        return read_message(_ANSWER, self._store.get(key), rank, "its answer") if self._store.check([key]) else None

    def answers_of(self, ranks: Sequence[int]) -> dict[int, Answer]:
        """As ``answer_of``, of these ranks that have answered yet."""
        known = {f"answer/{rank}": rank for rank in ranks}
        for key in absent(self._store, list(known)):
            del known[key]
        texts = self._store.multi_get(list(known)) if known else []
        return {rank: read_message(_ANSWER, text, rank, "its answer") for rank, text in zip(known.values(), texts, strict=True)}

    def has_ended(self, rank: int) -> bool:
        """True for a rank whose program has come to its end."""
        return self._store.check([f"over/{rank}"])

    def stop(self) -> None:
        """Answer no more: a thread inside the store must not outlive the interpreter, or the group."""
        atexit.unregister(self.stop)
        if not self._is_over and self._pid == os.getpid():  # not in a forked child, which shares the connection
            self._is_over = True
            if self._thread.is_alive():
                with suppress(dist.DistError, PeerFailedError):  # the store's host is gone, and the thread with it
                    self._say_farewell()
            if self._thread.ident is not None:
                self._thread.join(_JOIN_S)

    def _say_farewell(self) -> None:
        self._store.set(f"over/{self._rank}", "")
        number, until = self.ask(), time.monotonic() + _FAREWELL_S
        others = [rank for rank in self._members if rank != self._rank and self._rank == 0 and not self.has_ended(rank)]
        while time.monotonic() < until and any((answer := self.answer_of(rank)) and answer.number < number for rank in others):
            time.sleep(0.005)

    def _answer_all(self, store: dist.Store) -> None:
        # The store's host is gone, and so is the job; or questions cannot be counted, as the rank that asks them is told.
        with suppress(dist.DistNetworkError, PeerFailedError):
            number = count_up(store, "questions", 0)
            while True:
                is_last = self._is_over or (0 in self._members and store.check(["over/0"]))
                store.set(f"answer/{self._rank}", json.dumps([number, *self._state()]))
                if is_last:
                    return
                with suppress(dist.DistStoreError):  # nothing was asked for days
                    store.wait([f"question/{number + 1}"], _WAIT)
                    store.delete_key(f"question/{number}")  # the first to come does
                    number = count_up(store, "questions", 0)
