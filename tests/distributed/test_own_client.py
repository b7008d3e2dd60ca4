"""A client of the job's store of one's own, where the process has no descriptor left for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.programs import run_python

pytestmark = [pytest.mark.once, pytest.mark.processes]

PROGRAM = """
import json, os, resource, time
import torch.distributed as dist
from dist_tune import MachineError
from dist_tune.distributed.outside import own_client

server = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
store = dist.PrefixStore("job", server)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8,) * 2)
files = []
try:
    while True:
        files.append(open(os.devnull))
except OSError:
    pass
began = time.monotonic()
try:
    own_client(store)
    told = ""
except MachineError as error:
    told = str(error)
seconds = time.monotonic() - began
for file in files:
    file.close()
client = own_client(store)
client.set("key", "value")
print(json.dumps([told, seconds, store.get("key").decode(), store.timeout == client.timeout == server.timeout]))
"""


def test_a_process_without_descriptors_is_told_within_the_deadline(tmp_path: Path):
    """A store of its own would try for half an hour. Once there are some again, the client is one like the store, with its timeout."""
    done = run_python("-c", PROGRAM, cwd=tmp_path, env={"DIST_TUNE_DEADLINE_S": "1"}, timeout_s=60)
    assert done.returncode == 0, done.stderr
    told, seconds, value, has_timeouts = json.loads(done.stdout.splitlines()[-1])
    assert "Too many open files" in told
    assert "ulimit -n" in told
    assert 0.5 < seconds < 6.0
    assert (value, has_timeouts) == ("value", True)
