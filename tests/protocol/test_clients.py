"""Clients of the store: one's own where the host is stopped, tasks by a counter, keys that are not
there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.errors import StoreGoneError
from dist_tune.ranks import WorkQueue, is_symmetric
from dist_tune.ranks.clients import absent
from dist_tune.ranks.meetings import Meetings
from dist_tune.ranks.messages import Reduction
from tests.programs import of_checkout

HOST = """
import torch.distributed as dist, time
store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)  # held: a store that nothing holds has no host
print(store.port, flush=True)
time.sleep(100)
"""  # noqa: E501


@pytest.fixture(scope="module")
def host() -> Generator[tuple[int, int]]:
    """The process and the port of a store."""
    with subprocess.Popen(
        [sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.kill()


@pytest.mark.processes
def test_a_host_that_is_stopped_is_told_within_the_deadline(
    host: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    """Its kernel accepts connections.

    The first call may need no store; its meeting says so, and all is well once the host goes on.
    """
    monkeypatch.setenv("DIST_TUNE_DEADLINE_S", "0.5")
    pid, port = host
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    ranks = Meetings(store, 0, (0, 1), 1.0)
    os.kill(pid, signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, pid, os.WSTOPPED)  # with its threads, one of which answers
        ranks.calls("f")
        with pytest.raises(
            StoreGoneError,
            match=(
                r"no answer within 0.5 s. Is that stopped, or .* out of file descriptors"
                r" \(ulimit -n"
            ),
        ):
            ranks.agree("f", "topic", lambda: 1, Reduction(_total))
    finally:
        os.kill(pid, signal.SIGCONT)
    monkeypatch.setenv("DIST_TUNE_DEADLINE_S", "60")
    ranks.calls("f")
    assert store.check(["card/0"])  # peers know this rank
    ranks.close()


def _total(parts: Mapping[int, int]) -> int:
    return sum(parts.values())


class Counted(dist.HashStore):
    """A store that counts its requests."""

    n_requests = 0

    def add(self, key: str, amount: int) -> int:
        self.n_requests += 1
        return super().add(key, amount)


def test_each_task_is_taken_once_by_the_rank_that_asks_next():
    """Two ranks in turn; all read the results of all.

    A thousand tasks are two thousand requests, not a million.
    """
    store = Counted()
    ranks, taken = [WorkQueue(store, 1000), WorkQueue(store, 1000)], list[int]()
    for pair in zip(*ranks, strict=False):
        for rank, task in zip(ranks, pair, strict=True):
            taken.append(task)
            assert rank.put(task, f"{task} ✓") == len(taken)
    assert sorted(taken) == list(range(1000))
    assert ranks[0].results() == ranks[1].results() == [f"{task} ✓" for task in range(1000)]
    assert store.n_requests <= 2 * 1000 + 2


def test_a_rank_that_stops_the_queue_leaves_no_task_to_others():
    store = dist.HashStore()
    first, second = WorkQueue(store, 5), WorkQueue(store, 5)
    assert next(iter(first)) == 0
    first.stop()
    assert list(second) == []


@given(st.sets(st.integers(0, 40)), st.integers(0, 40))
def test_absent_keys_are_found_with_few_questions(there: set[int], n: int):
    """Exactly those; two questions and log2(n) for each at most."""
    asked = []

    class Store:
        def check(self, keys: list[str]) -> bool:
            asked.append(keys)
            return all(int(key) in there for key in keys)

    lacking = [str(key) for key in range(n) if key not in there]
    assert absent(Store(), [str(key) for key in range(n)]) == lacking
    assert len(asked) <= 1 + 2 * len(lacking) * max(1, n.bit_length())


def test_ordinary_memory_is_told_from_symmetric_without_an_import(monkeypatch: pytest.MonkeyPatch):
    """Torch's module of symmetric memory takes 0.1 s to import, in the first tuning of each
    rank.
    """
    monkeypatch.delitem(sys.modules, "torch.distributed._symmetric_memory", raising=False)
    assert not is_symmetric(torch.zeros(4))
    assert "torch.distributed._symmetric_memory" not in sys.modules


@pytest.mark.processes
def test_a_call_that_was_left_behind_does_not_abort_the_program_at_its_end(tmp_path: Path):
    """Python ends a daemon thread that comes back from the store then, and its C++ frames abort the
    process. Seen once in 260 programs.
    """
    program = """
from datetime import timedelta
import torch.distributed as dist
from dist_tune.ranks.clients import within
store = dist.TCPStore("127.0.0.1", 0, is_master=True)
try:
    within(0.01, lambda: store.wait(["never"], timedelta(seconds=0.3)))
except TimeoutError:
    print("left behind")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=of_checkout(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "left behind\n"), done.stderr


@pytest.mark.processes
def test_a_silent_host_that_answers_while_python_ends_does_not_abort_the_program(
    host: tuple[int, int], tmp_path: Path
):
    """Its exit code is the program's own."""
    program = """
import os, signal, sys, time
import torch.distributed as dist
from dist_tune.ranks.clients import within
host, port = map(int, sys.argv[1:])
class Last:  # deleted when daemon threads that come back do not run any more
    def __del__(self, go_on=(os.kill, host, signal.SIGCONT), sleep=time.sleep):
        go_on[0](*go_on[1:])
        sleep(1.0)
sys.last = Last()
store = dist.TCPStore("127.0.0.1", port, is_master=False)
os.kill(host, signal.SIGSTOP)
try:
    while True:  # it may have answered before it stopped
        within(0.1, lambda: store.check(["key"]))
except TimeoutError:
    sys.exit(3)
"""
    command = [sys.executable, "-c", program, *map(str, host)]
    done = subprocess.run(
        command, env=of_checkout(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
