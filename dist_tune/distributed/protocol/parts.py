"""The parts of one epoch on their way to the rank that reduces them, and the verdict on its way back.

Each rank brings its part to the job's store, and looks there for the verdict. Knows keys, and nothing of what parts hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dist_tune.distributed.protocol.messages import count_up


class Parts:
    """The way of the parts of one rank's group."""

    def __init__(self, store: Any, rank: int, members: Sequence[int]) -> None:
        self.store = store
        self.rank = rank
        self.members = members
        self._brought: list[int] = []
        """Epochs whose store has this rank's part."""

    def bring(self, epoch: int, part: str) -> bool:
        """Bring this rank's part; True if all parts are there."""
        self.store.set(f"{epoch}/parts/{self.rank}", part)
        self._brought.append(epoch)
        return count_up(self.store, f"{epoch}/count") == len(self.members)

    def texts(self, epoch: int) -> list[bytes]:
        """All parts, in the order of the members."""
        found: list[bytes] = self.store.multi_get([f"{epoch}/parts/{rank}" for rank in self.members])
        return found

    def shown(self, epoch: int) -> Iterator[tuple[int, bytes]]:
        """Ranks that have come, and their parts."""
        for rank in self.members:
            if self.store.check([key := f"{epoch}/parts/{rank}"]):
                yield rank, self.store.get(key)

    def missing(self, epoch: int) -> list[int]:
        """Ranks whose part is not on the store."""
        keys = {f"{epoch}/parts/{rank}": rank for rank in self.members}
        return [keys[key] for key in absent(self.store, list(keys))]

    def has_verdict(self, epoch: int) -> bool:
        """True if there is one. Called again and again by a rank that waits."""
        return bool(self.store.check([f"{epoch}/verdict"]))

    def verdict(self, epoch: int) -> bytes:
        """The verdict, which there is."""
        text: bytes = self.store.get(f"{epoch}/verdict")
        return text

    def forget(self, epochs: range) -> None:
        """Delete keys of epochs that no rank reads any more: each rank what it has brought, the first one what is of all."""
        keys = [f"{epoch}/parts/{self.rank}" for epoch in self._brought if epoch < epochs.stop]
        self._brought = [epoch for epoch in self._brought if epoch >= epochs.stop]
        if self.rank == self.members[0]:
            keys += [f"{epoch}/{name}" for epoch in epochs for name in ("count", "verdict")]
        for key in keys:
            self.store.delete_key(key)


def absent(store: Any, keys: Sequence[str]) -> list[str]:
    """Keys that are not on the store. One question where all are, and about log2(n) for each that is not, as n ranks may ask at once."""
    if not keys or store.check(list(keys)):
        return []
    half = len(keys) // 2
    return list(keys) if not half else absent(store, keys[:half]) + absent(store, keys[half:])
