"""Clients of the job's c10d store: what another thread can see of one that has no answer, and a
queue of tasks.

A store call has no timeout of its own: it waits for ever where packets are lost or the store's host
is stopped. So a connection is made on a thread that is left behind after the deadline, and the
watchdog sees since when a call of the tuning's thread has no answer.
"""

from __future__ import annotations

import atexit
import ctypes
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch.distributed as dist

from dist_tune.errors import StoreGoneError
from dist_tune.settings import read_settings

Result = TypeVar("Result")
_connecting = threading.Lock()
_EXIT_WAIT_S = 1.5
_ours: WeakSet[threading.Thread] = WeakSet()


class Asked(NamedTuple):
    """A call of the store that has no answer yet."""

    call: str
    since: float
    """Monotonic clock, in seconds."""


class WatchedStore:
    """A client of a store that shows another thread since when a call of it has no answer."""

    def __init__(self, store: dist.Store) -> None:
        self.asked: Asked | None = None
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.asked = Asked(name, time.monotonic())
            try:
                return getattr(self._store, name)(*args)
            finally:
                self.asked = None

        return call


class WorkQueue:
    """The tasks 0 to ``n_tasks`` - 1, shared out by one counter: each free rank takes the next one.

    No other rank does the task of one that dies; the ranks learn of it in their next meeting.
    """

    def __init__(self, store: Any, n_tasks: int) -> None:
        self._store = store
        self._n_tasks = n_tasks

    def __iter__(self) -> Iterator[int]:
        """Tasks that this rank is to do, each taken when it is asked for."""
        while (task := self._store.add("next", 1) - 1) < self._n_tasks:
            yield task

    def put(self, task: int, result: str) -> int:
        """Keep the result of a task for all ranks; the number of tasks that are done."""
        self._store.set(f"done/{task}", result)
        return int(self._store.add("n_done", 1))

    def results(self) -> list[str]:
        """The results of all tasks, when all ranks have done theirs."""
        return [self._store.get(f"done/{task}").decode() for task in range(self._n_tasks)]

    def stop(self) -> None:
        """Let no rank take another task."""
        self._store.add("next", self._n_tasks)


def own_client(store: dist.Store) -> dist.Store:
    """Another client of a store: on a shared one, a set() waits until another thread's wait() is
    over.

    Raises:
        StoreGoneError: the store cannot be reached within the deadline: its host is gone or
            stopped, or no descriptor is left here.
    """
    deadline_s = read_settings().deadline_s
    root: Any = store._underlying_non_prefix_store if isinstance(store, dist.PrefixStore) else store  # type: ignore[attr-defined]

    def connect() -> dist.Store:
        # With the store's own timeout an attempt goes on for half an hour where no descriptors are
        # left.
        with _connecting:
            before = root.timeout
            root.set_timeout(timedelta(seconds=deadline_s))
            try:
                client: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
            finally:
                root.set_timeout(before)
        client.set_timeout(before)
        return client

    try:
        return within(deadline_s, connect)
    except (dist.DistError, TimeoutError) as error:
        reason = str(error).partition("\n")[0] or f"no answer within {deadline_s:g} s"
        raise StoreGoneError(
            "this process cannot reach the c10d store, whose host is rank 0 or torchrun's agent:"
            f" {reason}. Is that stopped, or this process out of file descriptors (ulimit -n)?"
        ) from error


def within(seconds: float, talk: Callable[[], Result]) -> Result:
    """The result of a talk with a store, or of what may wait for ever, too, on a thread that is
    left behind then with ``TimeoutError``.
    """
    future = Future[Result]()

    def run() -> None:
        try:
            future.set_result(talk())
        except Exception as error:  # noqa: BLE001  # raised below, in the thread that asked
            future.set_exception(error)

    try:
        run_in_thread(run)
    except RuntimeError:  # no more threads
        run()
    return future.result(seconds)


def run_in_thread(run: Callable[[], object], name: str = "talk") -> threading.Thread:
    """A thread that may be inside C++, as in the store or a compiler.

    It may be left behind: the program's end waits a moment for it.

    Raises:
        RuntimeError: there are no more threads.
    """
    thread = threading.Thread(target=run, name=f"dist_tune {name}", daemon=True)
    thread.start()
    _ours.add(thread)
    return thread


@atexit.register
def _let_end() -> None:
    # Python ends a daemon thread that comes back from C++ while it finalizes, and the frames there
    # abort the process then.
    ends_at = time.monotonic() + _EXIT_WAIT_S
    try:
        for thread in list(_ours):
            thread.join(max(0.0, ends_at - time.monotonic()))
    finally:  # also after a signal whose handler raises
        if any(thread.is_alive() for thread in _ours):
            # In a store that is silent, which may answer in a moment: let a thread that aborts
            # sleep for 6 s before, the number of the signal, and the process ends as it would
            # without it.
            libc = ctypes.CDLL(None)
            libc.signal(signal.SIGABRT, libc.sleep)


def absent(store: Any, keys: Sequence[str]) -> list[str]:
    """Keys that are not on the store.

    One question where all are, and about log2(n) for each that is not, as n ranks may ask at once.
    """
    if not keys or store.check(list(keys)):
        return []
    half = len(keys) // 2
    return list(keys) if not half else absent(store, keys[:half]) + absent(store, keys[half:])
