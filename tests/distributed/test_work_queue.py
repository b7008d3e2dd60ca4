"""Tasks shared out by a counter on the store: each is done once, with one request of the store for each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from dist_tune.distributed import WorkQueue

pytestmark = pytest.mark.once


class Counted(dist.HashStore):
    """A store that counts its requests."""

    n_requests = 0

    def add(self, key: str, amount: int) -> int:
        self.n_requests += 1
        return super().add(key, amount)


@pytest.fixture
def queue() -> Callable[[int], WorkQueue]:
    """The queue of a call, as each rank makes it."""
    store = Counted()
    return lambda n_tasks: WorkQueue(store, n_tasks)


def test_each_task_is_taken_once_by_the_rank_that_asks_next(queue: Callable[[int], WorkQueue]):
    """Two ranks in turn; all read the results of all. A thousand tasks are two thousand requests, not a million."""
    first, second = queue(1000), queue(1000)
    taken: list[list[int]] = [[], []]
    for pair in zip(first, second, strict=False):
        for own, rank, task in zip(taken, (first, second), pair, strict=True):
            own.append(task)
            assert rank.put(task, f"{task} ✓") == sum(map(len, taken))
    assert [len(own) for own in taken] == [500, 500]
    assert first.results() == second.results() == [f"{task} ✓" for task in range(1000)]
    assert first._store.n_requests <= 2 * 1000 + 2


def test_a_rank_that_stops_the_queue_leaves_no_task_to_others(queue: Callable[[int], WorkQueue]):
    first, second = queue(5), queue(5)
    assert next(iter(first)) == 0
    first.stop()
    assert list(second) == []
