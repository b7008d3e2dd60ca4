"""Two ranks whose records lie in an S3 bucket: tuned once for all, and tuned all the same when the store fails in any way."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune.cache import Cache, record_bytes
from dist_tune.cache.remote import remote_folder
from dist_tune.testing import values
from tests.cached_records import record
from tests.ranks.jobs import RUNS, folder, is_hit, is_tuned, job, records, work
from tests.ranks.s3_server import s3_server
from tests.worlds import on_ranks

pytestmark = pytest.mark.processes

URL = "s3://bucket/records"
FIRST = {"CACHE_PATH": URL, "DEADLINE_S": "12"}
"""Three seconds for the store."""


def bucket() -> Any:
    from fsspec.core import url_to_fs

    return url_to_fs("s3://bucket", skip_instance_cache=True)[0]


def files() -> list[str]:
    return sorted(bucket().find(URL.removeprefix("s3://")))


def another_job(path: Path) -> Any:
    """Of another process, which has asked for nothing."""
    remote_folder.cache_clear()
    return job("contextual", path, FIRST)


def share(rank: int) -> dict[str, Any]:
    """A job that writes, one of another machine that reads, one that finds its copy, and one for which the record is broken."""
    if rank == 0:
        bucket().mkdir("bucket")
    first, second = folder() / "first", folder() / "second"
    jobs = [another_job(path) for path in (first, second)]
    dist.barrier()
    found: dict[str, Any] = {"files": files(), "copies": len(records(second))}
    if rank == 0:
        bucket().pipe_file(found["files"][0], b"{")
    jobs += [another_job(path) for path in (second, folder() / "third", folder() / "fourth")]
    return found | {
        "hits": [is_hit(each, each.winner) for each in jobs],
        "tuned": [is_tuned(each) for each in jobs],
        "warned": [each.warned for each in jobs],
    }


def test_a_bucket_is_a_folder_for_all_machines():
    """One file for a record, which other machines hit and copy. One that is broken costs a warning, and is tuned and written anew."""
    with s3_server() as server:
        outcomes = values(on_ranks(2, share, env=server.env))
    for rank, each in enumerate(outcomes):
        (file,) = each["files"]
        assert file.startswith("bucket/records/tests.steps.add_kernel/")
        assert each["copies"] == 1
        assert each["hits"] == [False, True, True, False, True]
        assert each["tuned"] == [True, False, False, True, False]
        assert [len(warned) for warned in each["warned"]] == [0, 0, 0, rank == 0, 0]
        assert rank or f"cache file s3://{file} is not used" in each["warned"][3][0]


def other_work(x: torch.Tensor, *, BLOCK: int) -> torch.Tensor:
    RUNS.append(BLOCK)
    return x + 1.0


def lose(rank: int, pid: int, how: int) -> list[Any]:
    """A job that writes, and two after the store's end, whose functions it has not been asked for."""
    if rank == 0:
        bucket().mkdir("bucket")
    before = job("contextual", folder() / "first", FIRST)
    dist.barrier()
    if rank == 0:
        os.kill(pid, how)
    began = time.monotonic()
    after = [job("function", folder(), FIRST, function=each) for each in (work, other_work)]
    return [is_tuned(before), *map(is_tuned, after), [each.warned for each in after], time.monotonic() - began]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_bucket_that_is_lost_costs_a_warning_and_three_seconds(how: int):
    """Killed or stopped between two jobs of a process: they tune, the first rank says so once, and the second job asks no more."""
    with s3_server() as server:
        outcomes = values(on_ranks(2, lose, server.pid, how, env=server.env))
    for rank, (*are_tuned, warned, seconds) in enumerate(outcomes):
        assert are_tuned == [True] * 3
        assert [len(each) for each in warned] == [rank == 0, 0]
        assert rank or f"records in {URL} are not read any more by this process" in warned[0][0]
        assert seconds < 20.0


def be_refused(rank: int) -> tuple[bool, list[str]]:
    done = job("contextual", folder(), FIRST)
    return is_tuned(done), done.warned


def test_refused_credentials_cost_a_warning():
    """Which says so; the step is tuned."""
    with s3_server(is_strict=True) as server:
        outcomes = values(on_ranks(2, be_refused, env=server.env))
    assert [is_done for is_done, _ in outcomes] == [True, True]
    assert [len(warned) for _, warned in outcomes] == [1, 0]
    assert "PermissionError" in outcomes[0][1][0]


def look_again(_rank: int) -> list[bool]:
    bucket().mkdir("bucket")
    cache = Cache([folder()])
    cache.remotes = [remote_folder(URL, 10.0)]
    found = []
    for one in (record(key="[1]"), record()):
        found.append(cache.find(record().cache_key))
        bucket().pipe_file(f"{URL}/{cache.path_of(one.cache_key).relative_to(folder())}", record_bytes(one))
    found.append(cache.find(record().cache_key))
    return [each == record() for each in found]


def test_what_another_machine_has_written_since_is_found():
    """The store's package remembers listings without an end."""
    with s3_server() as server:
        assert values(on_ranks(1, look_again, env=server.env, is_dist=False)) == [[False, False, True]]
