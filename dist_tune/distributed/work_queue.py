"""Tasks shared out over the ranks of a job, each done by one of them; those of a rank that dies are done by another.

Knows a c10d store and nothing of what a task is. A rank takes the next number of a counter; when there are none left it looks after tasks
whose owner has gone. No collective is ever made, so no rank waits for a dead peer: a rank is alive as long as a thread of it changes a key.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest

import torch.distributed as dist
from pydantic import TypeAdapter

from dist_tune.distributed.group import shared_store
from dist_tune.distributed.messages import read_message
from dist_tune.errors import MachineError, PeerFailedError, RankMismatchError, StoreGoneError
from dist_tune.output import printable
from dist_tune.warn_once import warn_once

_POLL_S = 0.05
_NO_SIGN = "-"
_TASKS = TypeAdapter(list[str])


class WorkQueue:
    """One list of tasks, the same on all ranks. Every rank makes it, in the same order of calls.

    ``name``: tells it from other lists. ``tasks``: what each is, as text that is equal on all ranks. ``deadline_s``: after so many seconds
    without a sign of life a rank counts as dead.
    """

    def __init__(self, name: str, rank: int, members: tuple[int, ...], tasks: Sequence[str], deadline_s: float) -> None:
        self.rank = rank
        self.n_tasks = len(tasks)
        self._tasks = tasks
        self._members = members
        self._deadline_s = deadline_s
        self._name = f"dist_tune/work/{name}"
        self._store = shared_store(self._name)
        self._seen: dict[int, tuple[bytes, float]] = {}
        """Rank -> its last sign of life, and when that was new here."""

    @property
    def n_done(self) -> int:
        """Tasks that are done."""
        return sum(self._store.check([f"done/{task}"]) for task in range(self.n_tasks))

    def run(self, work: Callable[[int], str]) -> list[str]:
        """Do tasks until all are done, and return the results of all. ``work`` returns the result as text.

        Raises:
            RankMismatchError: ranks have other tasks.
            PeerFailedError: another rank has ended it for all (``stop``).
            StoreGoneError: the process that hosts the store has ended.
            Exception: what ``work`` raises: this rank takes no more tasks, and others do what it was at.
        """
        with self._alive():
            self._check_tasks()
            for task in self._owned():
                # The first result stands: others may have read it, if this rank only seemed dead.
                self._store.compare_set(f"done/{task}", "", work(task))
            return [self._store.get(key).decode() for key in map("done/{}".format, range(self.n_tasks))]

    def claim(self, thing: str) -> int:
        """The rank that has claimed a thing first."""
        key = f"claimed/{thing}"
        return int(self._store.compare_set(key, "", str(self.rank)))

    def stop(self, reason: str) -> None:
        """End it on all ranks; they raise with ``reason``. Waits until they have, for this rank may host the store."""
        self._store.compare_set("stopped", "", f"{self.rank} {reason}")
        end = time.monotonic() + self._deadline_s
        others = [rank for rank in self._members if rank != self.rank]
        while time.monotonic() < end and not all(self._store.check([f"gone/{rank}"]) for rank in others):
            time.sleep(_POLL_S)

    def merge(self, save: Callable[[], str]) -> str:
        """Let one rank do what is to be done once with all results, and wait until it has: the first, or the next that is alive.

        Returns that rank's text.

        The rank that hosts the store leaves last.
        """
        with self._alive():
            while not self._store.check(["saved"]):
                if self.rank == next(rank for rank in self._members if rank == self.rank or not self._is_dead(rank)):
                    self._store.compare_set("saved", "", f"1{save()}")
                time.sleep(_POLL_S)
            text = self._store.get("saved").decode()[1:]
            self._store.set(f"left/{self.rank}", "1")
            if self.rank == self._members[0]:
                while not all(self._store.check([f"left/{rank}"]) or self._is_dead(rank) for rank in self._members):
                    time.sleep(_POLL_S)
            return text

    def _check_tasks(self) -> None:
        mine = json.dumps(list(self._tasks))
        first = self._store.compare_set("tasks", "", f"{self.rank} {mine}")
        rank, theirs = _by(first)
        if theirs != mine:
            listed = read_message(_TASKS, theirs.encode(), rank, "its list 'tasks'")
            pairs = zip_longest(self._tasks, listed, fillvalue="none")
            number, (own, other) = next((n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
            reason = (
                f"ranks {rank} and {self.rank} have other problems, first at index {number}: {other!r} and {own!r}. Build the list from "
                f"values that are equal on all ranks"
            )
            self.stop(reason)
            raise RankMismatchError(reason)

    def _owned(self) -> Iterator[int]:
        """Those that this rank is to do."""
        while (task := self._store.add("next", 1) - 1) < self.n_tasks:
            if task < 0:
                raise PeerFailedError(f"the count 'next' on the c10d store is not of this dist_tune's form ({task} tasks are taken)")
            self._check_stopped()
            if self._store.compare_set(f"owner/{task}", "", str(self.rank)) == str(self.rank).encode():
                yield task
        # From here on it only looks after others.
        ownerless_since: dict[int, float] = {}
        while left := [task for task in range(self.n_tasks) if not self._store.check([f"done/{task}"])]:
            self._check_stopped()
            for task in left:
                key = f"owner/{task}"
                owner = self._store.get(key) if self._store.check([key]) else b""
                if owner:
                    is_lost = self._is_dead(int(owner))
                else:  # its taker died between counter and name, if it has not just come
                    is_lost = time.monotonic() - ownerless_since.setdefault(task, time.monotonic()) > self._deadline_s
                if is_lost and self._store.compare_set(key, owner.decode(), str(self.rank)) == str(self.rank).encode():
                    yield task
                    break  # others may have done much meanwhile
            time.sleep(_POLL_S)

    def _check_stopped(self) -> None:
        if self._store.check(["stopped"]):
            rank, reason = _by(self._store.get("stopped"))
            reason = "\n".join(map(printable, reason.split("\n")))
            raise PeerFailedError(f"rank {rank} has ended the tuning: {reason}", rank, reason)

    def _is_dead(self, rank: int) -> bool:
        if rank == self.rank:
            return False
        if self._store.check([f"gone/{rank}"]):
            return True
        sign = self._store.get(f"beat/{rank}") if self._store.check([f"beat/{rank}"]) else _NO_SIGN.encode()
        now = time.monotonic()
        if rank not in self._seen or self._seen[rank][0] != sign:
            self._seen[rank] = sign, now
        return now - self._seen[rank][1] > self._deadline_s

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Give signs of life meanwhile; after an error, say that there will be none."""
        ended = threading.Event()
        thread = threading.Thread(target=self._beat, args=[ended], name="dist_tune signs of life", daemon=True)
        thread.start()
        try:
            yield
        except dist.DistError as error:
            raise StoreGoneError(f"rank {self.rank} cannot reach the store: the process that hosts it has ended ({error})") from error
        except BaseException:
            with suppress(dist.DistError):
                self._store.set(f"gone/{self.rank}", "1")
            raise
        finally:
            ended.set()
            thread.join()

    def _beat(self, ended: threading.Event) -> None:
        try:
            store = shared_store(self._name)  # its own: what another thread waits for on one would hold this up
        except (MachineError, StoreGoneError) as error:
            warn_once(f"rank {self.rank} gives no signs of life, and others take it for dead: {error}")
            return
        count = 0
        while True:
            try:
                store.set(f"beat/{self.rank}", str(count := count + 1))
            except dist.DistError:  # the store is gone, and with it the ranks that read this
                return
            if ended.wait(min(1.0, self._deadline_s / 5)):
                return


def _by(text: bytes) -> tuple[int, str]:
    """A rank, and the text that it posted after its number and a space."""
    number, _, rest = text.decode().partition(" ")
    return int(number), rest
