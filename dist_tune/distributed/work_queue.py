"""Tasks shared out over the ranks of a job by one counter on the c10d store: each free rank takes the next one.

Knows nothing of what a task is. The task of a rank that dies is done by nobody else; ranks learn of that where they meet afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator

from dist_tune.distributed.group import shared_store


class WorkQueue:
    """The tasks 0 to ``n_tasks`` - 1 of one call. Every rank makes it, with the same name."""

    def __init__(self, name: str, n_tasks: int) -> None:
        self._store = shared_store(f"dist_tune/work/{name}")
        self._n_tasks = n_tasks

    def __iter__(self) -> Iterator[int]:
        """Tasks that this rank is to do, each taken when it is asked for."""
        while (task := self._store.add("next", 1) - 1) < self._n_tasks:
            yield task

    def put(self, task: int, result: str) -> int:
        """Keep the result of a task for all ranks; the number of tasks that are done."""
        self._store.set(f"done/{task}", result)
        return self._store.add("n_done", 1)

    def results(self) -> list[str]:
        """The results of all tasks, when all ranks have done theirs."""
        return [self._store.get(f"done/{task}").decode() for task in range(self._n_tasks)]

    def stop(self) -> None:
        """Let no rank take another task."""
        self._store.add("next", self._n_tasks)
