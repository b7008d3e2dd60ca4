"""The store as another thread sees it while a rank hangs: a client of its own, since when a call has no answer, words to the peers.

Knows a store and the keys of an epoch; nothing of meetings.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from dist_tune.distributed.protocol.verdicts import Verdict
from dist_tune.errors import MachineError, StoreGoneError, is_machine_failure
from dist_tune.settings import read_settings

_BOTH_SILENT = 0.25
"""Deadlines without an answer after which a call is taken to meet the silence that another thread's has met before."""

Result = TypeVar("Result")
_before: dict[dist.Store, tuple[timedelta, int]] = {}
"""Store whose timeout is lowered -> what it was before, and threads that have lowered it; one may do so long after it was given up."""
_lock = threading.Lock()


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
        """Another client, for another thread; not watched. Raises as ``own_client``."""
        return own_client(self._store)

    def beside(self) -> dist.Store:
        """A client for a few words from another thread: this one's own, which costs no connection, unless that has no answer.

        Raises:
            MachineError, StoreGoneError: as ``own_client``.
        """
        return self._store if self.asked is None else self.clone()

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
    """Another client of a store: on a shared one, a set() waits until another thread's wait() is over.

    Raises:
        MachineError, StoreGoneError: as ``within_deadline``.
    """

    def connect(timeout: timedelta) -> dist.Store:
        with _lowered(store, timeout) as before:
            client: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        client.set_timeout(before)
        return client

    return within_deadline(connect)


@contextmanager
def _lowered(store: dist.Store, timeout: timedelta) -> Iterator[timedelta]:
    """A store has this timeout meanwhile, which its clones take over; the one that it has otherwise. Several threads may lower it."""
    root: Any = store._underlying_non_prefix_store if isinstance(store, dist.PrefixStore) else store  # type: ignore[attr-defined]
    with _lock:
        before, n_users = _before.pop(root, (root.timeout, 0))
        _before[root] = before, n_users + 1
        root.set_timeout(timeout)
    try:
        yield before
    finally:
        with _lock:
            before, n_users = _before.pop(root)
            if n_users == 1:
                root.set_timeout(before)
            else:
                _before[root] = before, n_users - 1


def within_deadline(talk: Callable[[timedelta], Result]) -> Result:
    """The result of a talk with a store outside of any tuning, as of a new connection. ``talk`` is given the timeout of an attempt.

    With a store's own timeout a connection is tried for half an hour where no descriptors are left; and no timeout limits the wait for an
    answer of a host that is stopped. A talk under way is left to its thread, which ends with it.

    Raises:
        MachineError: this process has no descriptor left.
        StoreGoneError: the store's host does not answer.
    """
    deadline_s = read_settings().deadline_s
    results, errors = list[Result](), list[Exception]()

    def run() -> None:
        try:
            results.append(talk(timedelta(seconds=deadline_s)))
        except Exception as error:  # noqa: BLE001  # raised below, in the thread that asked
            errors.append(error)

    thread = threading.Thread(target=run, name="dist_tune connection", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads
        run()
    else:
        thread.join(deadline_s)
    if results:
        return results[0]
    if errors and not isinstance(errors[0], dist.DistError):
        raise errors[0]
    found = errors[0] if errors else _shortage()
    reason = str(found).splitlines()[0] if found is not None else "its host does not answer. Is it stopped, or the link to it cut?"
    told = f"this process cannot reach the c10d store within {deadline_s:g} s: {reason}"
    if found is not None and is_machine_failure(found):
        raise MachineError(f"{told} Raise its limit (ulimit -n), or close files") from found
    raise StoreGoneError(f"{told} Its host is rank 0, or torchrun's agent") from found


def _shortage() -> OSError | None:
    """The error of a process that has no descriptor left."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error
    return None


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
