"""Questions between ranks: where is each, and does it live? A thread of each rank answers for it.

A call with nothing to tune says nothing to any rank, a rank that waits in a collective cannot talk, and one that is stopped cannot say so.
So a rank that waits asks. The thread of each rank waits for questions inside the store, on a client of its own, and costs nothing before.
``ask/{rank}/{i}`` is question i to a rank, and ``card/{rank}`` its latest answer, which says what question it waits for.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from dist_tune.distributed.calls import Card, Peer
from dist_tune.distributed.processes import state_of
from dist_tune.distributed.store import absent, within

_WAIT = timedelta(days=10)
"""Of one wait inside the store, which is repeated; torch counts its milliseconds in 32 bits."""
_FAREWELL_S = 0.5
"""Seconds that rank 0, which may host the store, waits at its end for peers to leave it: torch warns of one that is cut off."""
CARD = TypeAdapter(Card)


class Questions:
    """The questions of one thread to peers."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._open: dict[int, tuple[int, int, float]] = {}
        """Rank -> number of the first question and of the latest one, and when that was put."""

    def ask(self, ranks: Sequence[int]) -> dict[int, Peer]:
        """What is known of these ranks. Does not wait; each that has answered the question before is asked again."""
        keys = [f"card/{rank}" for rank in ranks]
        lacking = set(absent(self._store, keys))
        known = [rank for rank, key in zip(ranks, keys, strict=True) if key not in lacking]
        texts = self._store.multi_get([f"card/{rank}" for rank in known]) if known else []
        peers, now = {rank: Peer(None) for rank in ranks}, time.monotonic()
        for rank, text in zip(known, texts, strict=True):
            with suppress(ValidationError):  # of another version: a rank that says nothing
                peers[rank] = self._peer(rank, CARD.validate_json(text), now)
        return peers

    def _peer(self, rank: int, card: Card, now: float) -> Peer:
        first, latest, since = self._open.get(rank, (card.question, -1, now))
        if card.question != latest:
            since = now
            self._open[rank] = first, card.question, now
            self._store.set(f"ask/{rank}/{card.question}", "")
        silent_s = now - since
        return Peer(replace(card, for_s=card.for_s + silent_s), silent_s, state_of(card.process), is_fresh=card.question > first)


class Presence:
    """The answers of this rank to the members of one group. ``client``: of the same keys as ``store``, for the thread alone."""

    def __init__(self, store: Any, client: Any, rank: int, members: Sequence[int], card: Callable[[int], Card]) -> None:
        self._store = store
        self._client = client
        self._rank = rank
        self._members = members
        self._card = card
        self._question = 0
        self._is_over = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._answer, name="dist_tune presence", daemon=True)
        self._post()  # peers know this process from here on, also if it ends before the thread runs
        with suppress(RuntimeError):  # no more threads: peers take this rank for one that does not answer
            self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Answer no more: a thread inside the store must not outlive the interpreter, or the group."""
        atexit.unregister(self.stop)
        if self._is_over or self._pid != os.getpid():  # not in a forked child, which shares the connection
            return
        self._is_over = True
        with suppress(dist.DistError, TimeoutError):  # the store's host is gone, or silent
            within(4 * _FAREWELL_S, self._say_farewell)

    def _say_farewell(self) -> None:
        store = self._store
        store.set(f"ask/{self._rank}/{self._question}", "")
        self._thread.join(_FAREWELL_S)
        others = [rank for rank in self._members if rank != self._rank] if self._rank == 0 else []
        questions, until = Questions(store), time.monotonic() + _FAREWELL_S
        if others:
            store.set("host over", "")
        while others and time.monotonic() < until:
            others = [rank for rank, peer in questions.ask(others).items() if peer.card is not None and not peer.card.is_over]
            time.sleep(0.005)

    def _post(self) -> None:
        card = self._card(self._question)
        self._client.set(f"card/{self._rank}", CARD.dump_json(replace(card, is_over=self._is_over)).decode())

    def _answer(self) -> None:
        with suppress(dist.DistNetworkError):  # the store's host is gone, and so is the job
            while not self._is_over:
                with suppress(dist.DistStoreError):  # nothing was asked for days
                    self._client.wait([f"ask/{self._rank}/{self._question}"], _WAIT)
                    self._client.delete_key(f"ask/{self._rank}/{self._question}")
                    self._question += 1
                    self._is_over = self._is_over or self._client.check(["host over"])
                    self._post()
