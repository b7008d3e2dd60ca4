"""A store for the ranks of one host, in which they bring their parts together before one of them goes to the job's store.

Knows stores, hosts and ranks, and nothing of meetings. In a large group the job's store, which has one thread, is what all wait for.
The first rank of a host hosts it. It only shortens the way: without it, ranks use the job's store, and nothing fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dist_tune.distributed.liveness.host_processes import network_name
from dist_tune.distributed.liveness.outside import Asked, WatchedStore, within_deadline
from dist_tune.errors import MachineError, StoreGoneError

FLAT_RANKS = 64
"""Largest group that meets on one level (logs/meetings-cpu)."""
_MAX_RANKS = 32
"""Of one home; ranks of larger hosts have several."""
_TIMEOUT = timedelta(seconds=10)
"""Of a home's store, for its own host."""
NO_HOME = -1


class Home:
    """A rank's home: of the ranks of its host, as far as it knows."""

    def __init__(self, store: dist.Store, rank: int, members: Sequence[int]) -> None:
        self.leader = NO_HOME
        """The rank that hosts this home's store."""
        self.ranks: list[int] = []
        """Of this home, once all ranks know all homes; empty before, and after its store was lost."""
        self.n_homes = 0
        self._root = store
        self._store: WatchedStore | None = None
        if len(members) <= FLAT_RANKS:
            return
        position, _ = neighbours(rank, members)
        here = position % _MAX_RANKS
        self.leader = members[members.index(rank) - here]
        if here == 0:
            with suppress(dist.DistError, RuntimeError):  # no more descriptors, or threads
                own = dist.TCPStore("127.0.0.1", 0, None, True, _TIMEOUT, wait_for_workers=False)
                self._store = WatchedStore(own)
                store.set(f"home/{rank}", f"{own.port} {network_name()}")

    def joined(self) -> int:
        """The leader's rank, if this rank has reached the store of its home by now and not yet settled; else -1."""
        if self.leader == NO_HOME or self.n_homes:
            return NO_HOME
        if self._store is None and self._root.check([f"home/{self.leader}"]):
            port, _, network = self._root.get(f"home/{self.leader}").decode().partition(" ")
            if network and network == network_name() and port.isdecimal():  # else another host's, whose ranks are not numbered as expected
                try:
                    own = within_deadline(lambda timeout: dist.TCPStore("127.0.0.1", int(port), None, False, timeout))
                    self._store = WatchedStore(own)
                except (MachineError, StoreGoneError):
                    self.leader = NO_HOME  # at the next meeting peers would wait again while this rank tries
        return NO_HOME if self._store is None else self.leader

    @property
    def asked(self) -> Asked | None:
        """A call of the home's store that has no answer yet: the process that hosts it may be stopped."""
        return self._store.asked if self._store is not None else None

    def settle(self, homes: Mapping[int, list[int]]) -> None:
        """All ranks have reached these homes, so all use them from the next meeting on: leader -> ranks."""
        self.n_homes, self.ranks = len(homes), homes.get(self.leader, [])

    def ask(self, question: Callable[[Any], Any]) -> Any:
        """The answer of this home's store; None without one. A store that is lost, with its host, is used no more."""
        if self.ranks:
            try:
                return question(self._store)
            except dist.DistNetworkError:
                self.ranks = []
        return None


def neighbours(rank: int, members: Sequence[int]) -> tuple[int, int]:
    """Position of this rank among the members on its host, and how many these are.

    The ranks of a host have consecutive numbers, and torchrun says how many they are; without it all are taken to be here.
    """
    n_local = int(os.environ.get("LOCAL_WORLD_SIZE", len(members)))
    here = [each for each in members if each // n_local == rank // n_local] if n_local > 0 else [rank]
    return here.index(rank), len(here)
