"""An S3 server on 127.0.0.1, in a process of its own that a test may stop or kill."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

_PROGRAM = """
import threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""


class Server(NamedTuple):
    pid: int
    env: dict[str, str]
    """What a client needs."""


@contextmanager
def s3_server(*, is_strict: bool = False) -> Iterator[Server]:
    """``is_strict``: it refuses credentials, because it has given none."""
    strict = {"INITIAL_NO_AUTH_ACTION_COUNT": "0"} if is_strict else {}
    command, env = [sys.executable, "-c", _PROGRAM], {**os.environ, **strict}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            client = {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
                "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
            }  # fmt: skip
            yield Server(process.pid, client)
        finally:
            process.kill()
