"""Clients of the store: one's own where no descriptor is left or the host is stopped, tasks by a counter, keys that are not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.distributed import WorkQueue, is_symmetric
from dist_tune.distributed.store import absent
from tests.programs import run_python

pytestmark = pytest.mark.once

PROGRAM = """
import json, os, resource, signal, subprocess, sys, threading, time
from contextlib import suppress
import torch.distributed as dist
from dist_tune import DistTuneError
from dist_tune.distributed.meetings import Meetings
from dist_tune.distributed.store import own_client
from dist_tune.distributed.messages import Reduction

HOST = '''
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(100)
'''

@Reduction
def first(parts: dict[int, str]) -> str:
    return parts[0]

def told(call):
    began = time.monotonic()
    try:
        call()
        text = ""
    except DistTuneError as error:
        text = f"{type(error).__name__}: {error}"
    return text, time.monotonic() - began
"""

NO_DESCRIPTORS = """
server = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
store = dist.PrefixStore("job", server)
limit = len(os.listdir("/proc/self/fd")) + 8
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
files = []
with suppress(OSError):
    while True:
        files.append(open(os.devnull))
found = told(lambda: own_client(store))
for file in files:
    file.close()
client = own_client(store)
client.set("key", "value")
for thread in threading.enumerate():
    if thread.name == "dist_tune connection":  # the attempt that was given up
        thread.join()
print(json.dumps([[found], store.get("key").decode() == "value" and store.timeout == client.timeout == server.timeout]))
"""

STOPPED = """
host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
store = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), is_master=False)
own = Meetings(store, 0, (0, 1), 1.0)
os.kill(host.pid, signal.SIGSTOP)
call = told(lambda: own.calls("f"))
found = [told(lambda: own_client(store)), told(lambda: own.agree("f", "topic", lambda: "x", first))]
os.kill(host.pid, signal.SIGCONT)
own.calls("f")
print(json.dumps([found, call[0] == "" and own._presence is not None]))
own.close()
host.kill()
"""


@pytest.mark.processes
@pytest.mark.parametrize(("program", "told"), [(NO_DESCRIPTORS, "(ulimit -n)"), (STOPPED, "no answer within 1 s. Is that stopped")])
def test_a_store_that_cannot_be_reached_is_told_within_the_deadline(program: str, told: str, tmp_path: Path):
    """A store would try for half an hour. A first call may need none; its meeting says so, and all is well once the store answers."""
    done = run_python("-c", PROGRAM + program, cwd=tmp_path, env={"DIST_TUNE_DEADLINE_S": "1"}, timeout_s=60)
    assert done.returncode == 0, done.stderr
    found, goes_on = json.loads(done.stdout.splitlines()[-1])
    for text, seconds in found:
        assert text.startswith("StoreGoneError: "), text
        assert told in text
        assert seconds < 5.0
    assert goes_on


class Counted(dist.HashStore):
    """A store that counts its requests."""

    n_requests = 0

    def add(self, key: str, amount: int) -> int:
        self.n_requests += 1
        return super().add(key, amount)


def test_each_task_is_taken_once_by_the_rank_that_asks_next():
    """Two ranks in turn; all read the results of all. A thousand tasks are two thousand requests, not a million."""
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
    """Torch's module of symmetric memory takes 0.1 s to import, in the first tuning of each rank."""
    monkeypatch.delitem(sys.modules, "torch.distributed._symmetric_memory", raising=False)
    assert not is_symmetric(torch.zeros(4))
    assert "torch.distributed._symmetric_memory" not in sys.modules
