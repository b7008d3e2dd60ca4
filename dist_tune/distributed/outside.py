"""The store as another thread sees it while a rank hangs: a client of its own, since when a call has no answer, words to the peers.

Knows a store and the keys of an epoch; nothing of meetings.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from dist_tune.distributed.verdicts import Verdict
from dist_tune.errors import MachineError, is_machine_failure
from dist_tune.settings import read_settings

_BOTH_SILENT = 0.25
"""Deadlines without an answer after which a call is taken to meet the silence that another thread's has met before."""


class Asked(NamedTuple):
    """A call of the store that has no answer yet: a store call has no timeout of its own, and waits for ever where packets are lost."""

    call: str
    since: float
    """Monotonic clock, in seconds."""


class WatchedStore:
    """A client of a store that shows another thread since when a call of it has no answer."""

    def __init__(self, store: dist.Store) -> None:
        self.asked: Asked | None = None
        self._store = store

    def clone(self) -> dist.Store:
        """Another client, for another thread; not watched."""
        return self._store.clone()  # type: ignore[attr-defined, no-any-return]  # missing in torch's stubs

    def __getattr__(self, name: str) -> Callable[..., Any]:
        own = getattr(self._store, name)

        def call(*args: Any) -> Any:
            self.asked = Asked(name, time.monotonic())
            try:
                return own(*args)
            finally:
                self.asked = None

        setattr(self, name, call)  # found before __getattr__ from here on
        return call


def own_client(store: dist.Store) -> dist.Store:
    """Another client of the job's store: on a shared one, a set() waits until another thread's wait() is over.

    For one thread at a time: it lowers the store's timeout meanwhile.

    Raises:
        MachineError: this process has no descriptor left for it.
        torch.distributed.DistNetworkError: the store's host does not answer within the deadline.
    """
    before: timedelta = store.timeout  # type: ignore[attr-defined]  # missing in torch's stubs
    deadline_s = read_settings().deadline_s
    # With its own timeout, a store tries for half an hour to connect where no descriptors are left.
    store.set_timeout(timedelta(seconds=deadline_s))
    try:
        client: dist.Store = store.clone()  # type: ignore[attr-defined]  # as above
    except dist.DistNetworkError as error:
        if not is_machine_failure(error):
            raise
        raise MachineError(
            f"this process cannot reach the c10d store: {str(error).splitlines()[0]} Raise its limit (ulimit -n), or close files"
        ) from error
    finally:
        store.set_timeout(before)
    client.set_timeout(before)
    return client


def silent_since(own: float, beating: float | None, now: float, deadline_s: float) -> float:
    """Since when the store is silent, by the monotonic clock: the beating thread may have asked while this rank was in a collective.

    ``own``, ``beating``: begin of the call of either thread that has no answer yet. The beating thread's counts once the other one has
    waited, too: where one connection alone is lost, the other is answered.
    """
    return own if beating is None or now - own < _BOTH_SILENT * deadline_s else min(own, beating)


def post_end(store: dist.Store, epoch: int, verdict: Verdict) -> str:
    """End the first epoch from this one on that has no verdict; returns the message of a peer that has ended one, or nothing."""
    before = ""
    while store.check([f"{epoch}/verdict"]):
        before = before or json.loads(store.get(f"{epoch}/verdict")).get("message", "")
        epoch += 1
    store.compare_set(f"{epoch}/verdict", "", json.dumps(verdict))
    return before


def last_signs(store: dist.Store, members: Sequence[int]) -> dict[int, str]:
    """Rank -> its last sign of progress, of those that have given one."""
    return {rank: store.get(f"beat/{rank}").decode().partition(" ")[2] for rank in members if store.check([f"beat/{rank}"])}
