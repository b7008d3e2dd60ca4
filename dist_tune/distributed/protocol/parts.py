"""The parts of one epoch on their way to the rank that reduces them, and the verdict on its way back.

On one level each rank brings its part to the job's store. On two levels it brings it to its home's (see ``homes``); the last of a home to
come brings all of them to the job's store in one message. It looks there for the verdict, as does the first one after a moment, and copies
it into the home. A rank that has waited for a moment brings its part to the job's store as well, so that those that time out, abort or have
lost their home see the same keys on both levels. Knows keys, and nothing of what parts hold.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from pydantic import TypeAdapter

from dist_tune.distributed.protocol.homes import Home
from dist_tune.distributed.protocol.messages import MAX_BYTES, count_up, read_message

_MOMENT_S = 0.1
"""Waiting for longer, a rank shows itself on the job's store."""
_LOOKS_PER_S = 1024.0
"""Of ranks that look on the job's store beside their home's; at most four a second each."""
_TEXTS: TypeAdapter[dict[int, str]] = TypeAdapter(dict[int, str])


class Parts:
    """The way of the parts of one rank's group."""

    def __init__(self, store: Any, rank: int, members: Sequence[int]) -> None:
        self.home = Home(store, rank, members)
        self.store = store
        self.rank = rank
        self.members = members
        self._homes: dict[int, list[int]] = {}
        """Leader -> ranks of its home."""
        self._near = -1
        """Epoch whose verdict this rank looks for in its home."""
        self._part, self._is_shown, self._n_here = "", False, 0
        self._brought_at = self._look_at = 0.0
        self._left: list[tuple[bool, int, str]] = []
        """(Is in the home, epoch, key) of what this rank has brought."""

    @property
    def n_polling(self) -> int:
        """Ranks that a meeting lets poll one store after another, which says how long it takes."""
        return len(self.home.ranks) + self.home.n_homes if self.home.n_homes else len(self.members)

    def settle(self, leaders: Sequence[int]) -> None:
        """Use these homes from the next meeting on: leader, by member."""
        if len(leaders) == len(self.members) and not self._homes:
            for rank, leader in zip(self.members, leaders, strict=True):
                self._homes.setdefault(leader, []).append(rank)
            self.home.settle(self._homes)

    def bring(self, epoch: int, part: str, *, is_direct: bool) -> bool:
        """Bring this rank's part; True if all parts are there. ``is_direct``: not by way of the home, so that others see it at once."""
        self._part, self._is_shown, self._brought_at = part, False, time.monotonic()
        self._near, self._look_at = -1, self._brought_at + _MOMENT_S
        n_here = None if is_direct else self.home.ask(lambda home: self._bring_home(home, epoch))
        if n_here is None:
            self._show(epoch)
            return count_up(self.store, f"{epoch}/count") == len(self.members)
        self._near, self._n_here = epoch, n_here
        texts = self._texts_of_home(epoch) if n_here == len(self.home.ranks) else None
        if texts is None:
            return False
        self._is_shown = True
        message = json.dumps(texts)
        if len(message) <= MAX_BYTES:
            self._set(epoch, f"host/{self.home.leader}", message)
        else:
            for rank, text in texts.items():
                self._set(epoch, f"parts/{rank}", text)
        return count_up(self.store, f"{epoch}/count", len(texts)) == len(self.members)

    def texts(self, epoch: int) -> list[bytes]:
        """All parts, in the order of the members."""
        found: dict[int, bytes] = {}
        hosts = [f"{epoch}/host/{leader}" for leader in self._homes]
        if hosts:
            lacking = set(absent(self.store, hosts))
            hosts = [key for key in hosts if key not in lacking]
            for key, message in zip(hosts, self.store.multi_get(hosts) if hosts else [], strict=True):
                leader = int(key.rpartition("/")[2])
                texts = read_message(_TEXTS, message, leader, "the parts of its host's ranks")
                found |= {rank: text.encode() for rank, text in texts.items() if rank in self._homes[leader]}
        rest = [rank for rank in self.members if rank not in found]
        found |= zip(rest, self.store.multi_get([f"{epoch}/parts/{rank}" for rank in rest]) if rest else [], strict=True)
        return [found[rank] for rank in self.members]

    def shown(self, epoch: int) -> Iterator[tuple[int, bytes]]:
        """Ranks that have waited for a moment, or not come by way of a home, and their parts."""
        for rank in self.members:
            if self.store.check([key := f"{epoch}/parts/{rank}"]):
                yield rank, self.store.get(key)

    def missing(self, epoch: int) -> list[int]:
        """Ranks whose part is not on the job's store."""
        homes = set(absent(self.store, [f"{epoch}/host/{leader}" for leader in self._homes]))
        there = {rank for leader, ranks in self._homes.items() if f"{epoch}/host/{leader}" not in homes for rank in ranks}
        keys = {f"{epoch}/parts/{rank}": rank for rank in self.members if rank not in there}
        return [keys[key] for key in absent(self.store, list(keys))]

    def has_verdict(self, epoch: int) -> bool:
        """True if there is one. Called again and again by a rank that waits."""
        key = f"{epoch}/verdict"
        if self._near == epoch:
            now = time.monotonic()
            if not self._is_shown and now - self._brought_at >= _MOMENT_S:
                self._show(epoch)
            is_scout = self._n_here == len(self.home.ranks) or (self._n_here == 1 and self._is_shown)
            if not is_scout and (is_near := self.home.ask(lambda home: home.check([key]))) is not None:
                if is_near or now < self._look_at:
                    return bool(is_near)
                self._look_at = now + max(0.25, len(self.members) / _LOOKS_PER_S)
        return bool(self.store.check([key]))

    def verdict(self, epoch: int) -> bytes:
        """The verdict, which there is."""
        key = f"{epoch}/verdict"
        if self._near == epoch:
            near: bytes | None = self.home.ask(lambda home: home.get(key) if home.check([key]) else None)
            if near is not None:
                return near
        text: bytes = self.store.get(key)
        if self._near == epoch:
            self.home.ask(lambda home: home.compare_set(key, "", text))
        return text

    def forget(self, epochs: range) -> None:
        """Delete keys of epochs that no rank reads any more: each rank what it has brought, first ranks what is of all."""
        names = [f"{epoch}/{name}" for epoch in epochs for name in ("count", "verdict")]
        near = [key for is_near, epoch, key in self._left if is_near and epoch < epochs.stop]
        far = [key for is_near, epoch, key in self._left if not is_near and epoch < epochs.stop]
        self._left = [each for each in self._left if each[1] >= epochs.stop]
        for key in far + (names if self.rank == self.members[0] else []):
            self.store.delete_key(key)
        near += names if self.rank == self.home.leader else []
        self.home.ask(lambda home: [home.delete_key(key) for key in near])

    def _bring_home(self, home: dist.Store, epoch: int) -> int:
        home.set(f"{epoch}/parts/{self.rank}", self._part)
        self._left.append((True, epoch, f"{epoch}/parts/{self.rank}"))
        return count_up(home, f"{epoch}/count")

    def _texts_of_home(self, epoch: int) -> dict[int, str] | None:
        ranks = self.home.ranks
        texts = self.home.ask(lambda home: home.multi_get([f"{epoch}/parts/{rank}" for rank in ranks]))
        return None if texts is None else {rank: text.decode() for rank, text in zip(ranks, texts, strict=True)}

    def _show(self, epoch: int) -> None:
        self._set(epoch, f"parts/{self.rank}", self._part)
        self._is_shown = True

    def _set(self, epoch: int, name: str, text: str) -> None:
        self.store.set(f"{epoch}/{name}", text)
        self._left.append((False, epoch, f"{epoch}/{name}"))


def absent(store: Any, keys: Sequence[str]) -> list[str]:
    """Keys that are not on the store. One question where all are, and about log2(n) for each that is not, as n ranks may ask at once."""
    if not keys or store.check(list(keys)):
        return []
    half = len(keys) // 2
    return list(keys) if not half else absent(store, keys[:half]) + absent(store, keys[half:])
