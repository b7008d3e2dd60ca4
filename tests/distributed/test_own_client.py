"""A client of a store of one's own, where the process has no descriptor left for it, or the host of the store is stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.programs import run_python

pytestmark = [pytest.mark.once, pytest.mark.processes]

PROGRAM = """
import json, os, resource, signal, subprocess, sys, threading, time
from contextlib import contextmanager, suppress
import torch.distributed as dist
from dist_tune import DistTuneError, MachineError
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

@contextmanager
def no_descriptors():
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, most))
    files = []
    with suppress(OSError):
        while True:
            files.append(open(os.devnull))
    yield
    for file in files:
        file.close()

@Reduction
def first(parts: dict[int, str]) -> str:
    return parts[0]

def meet(own):
    return own.agree("f", "topic", lambda: "x", first)

def told(call):
    began = time.monotonic()
    try:
        call()
        text = ""
    except DistTuneError as error:
        text = f"{type(error).__name__}: {error}"
    return text, time.monotonic() - began
"""

OWN = """
server = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
store = dist.PrefixStore("job", server)
with no_descriptors():
    found = told(lambda: own_client(store))
client = own_client(store)
client.set("key", "value")
for thread in threading.enumerate():
    if thread.name == "dist_tune connection":  # the attempt that was given up
        thread.join()
print(json.dumps([found, store.get("key").decode(), store.timeout == client.timeout == server.timeout]))
"""

STOPPED = """
host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
store = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), is_master=False)
os.kill(host.pid, signal.SIGSTOP)
found = [told(lambda: own_client(store))]
os.kill(host.pid, signal.SIGCONT)
own_client(store).set("key", "value")
print(json.dumps([found, store.get("key").decode()]))
host.kill()
"""


LIFE = """
host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
own = Meetings(dist.TCPStore("127.0.0.1", int(host.stdout.readline()), is_master=False), 0, (0, 1), 1.0)

os.kill(host.pid, signal.SIGSTOP)
found = [told(lambda: own.calls("f")), told(lambda: meet(own))]
os.kill(host.pid, signal.SIGCONT)
own.calls("f")
print(json.dumps([found, own._presence is not None]))
own.close()
host.kill()
"""


def _found(program: str, tmp_path: Path) -> Any:
    done = run_python("-c", PROGRAM + program, cwd=tmp_path, env={"DIST_TUNE_DEADLINE_S": "1"}, timeout_s=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _is_of_descriptors(text: str, seconds: float) -> None:
    assert text.startswith("StoreGoneError: "), text
    assert "ulimit -n" in text
    assert 0.5 < seconds < 4.0


def test_a_process_without_descriptors_is_told_within_the_deadline(tmp_path: Path):
    """A store of its own would try for half an hour. Once there are some again, the client is like the store."""
    found, value, has_timeouts = _found(OWN, tmp_path)
    _is_of_descriptors(*found)
    assert (value, has_timeouts) == ("value", True)


def test_a_host_that_is_stopped_is_not_waited_for(tmp_path: Path):
    """It accepts connections, as its kernel does that, and answers none; once it goes on, it does."""
    found, value = _found(STOPPED, tmp_path)
    for text, seconds in found:
        assert text.startswith("StoreGoneError: "), text
        assert "no answer within 1 s. Is that stopped" in text
        assert seconds < 4.0
    assert value == "value"


def test_a_rank_whose_first_call_meets_a_host_that_is_stopped_meets_others_later(tmp_path: Path):
    """The call itself may need no store; its meeting says that it cannot be reached, and one after the host goes on is as any other."""
    ((call, call_s), (meeting, meeting_s)), result = _found(LIFE, tmp_path)
    assert (call, result) == ("", True)
    assert meeting.startswith("StoreGoneError: ")
    assert max(call_s, meeting_s) < 5.0
