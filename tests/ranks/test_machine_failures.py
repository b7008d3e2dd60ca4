"""Memory, disk, descriptors and threads that run out on one rank: told as that, and counted against no config."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
from triton.runtime.cache import FileCacheManager

from dist_tune import MachineError, autotune, contextual_autotune
from dist_tune.distributed import group_of
from dist_tune.testing import FakeH200, values
from tests.ranks.kernels import accumulate_kernel, add_kernel, autotuned, best, launch
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once

BLOCKS = (16, 32, 64, 128)


def _fastest_is(block: int) -> None:
    FakeH200.launch_ms = staticmethod(lambda src, metadata: 1.0 if src.constants[(3,)] == block else 20.0)


def _raises_once(rank: int, error: Exception, n_times: int) -> Any:
    raised: list[int] = []

    @autotune([{"block": block} for block in BLOCKS], None, n_warmup=1, n_repeat=2)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        if rank == 1 and block == 32 and len(raised) < n_times:
            raised.append(1)
            raise error
        if block != 32:
            time.sleep(0.01)
        return x + 1

    step(torch.zeros(4))
    dist.barrier()  # the record is written by one rank
    record = step.records[0]
    kept = list(Path(os.environ["DIST_TUNE_CACHE_DIR"]).rglob("*.json"))
    return record.best.config, [each.failure for each in record.candidates], bool(kept)


FAILURES = [MemoryError(), OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EMFILE, "Too many open files")]


@pytest.mark.parametrize("error", FAILURES, ids=lambda each: type(each).__name__ + str(getattr(each, "errno", "")))
def test_one_failure_of_the_machine_drops_no_config(error: Exception):
    """The best config is launched once more, wins, and is kept without a failure."""
    got = values(on_ranks(2, _raises_once, error, 1))
    assert got[0] == got[1] == ("block=32", [None] * 4, True)


@pytest.mark.parametrize("error", FAILURES[:1], ids=lambda each: type(each).__name__)
def test_a_config_that_the_machine_failed_twice_is_out_for_this_process_alone(error: Exception):
    """Nothing of that tuning is kept, and the log says why."""
    outcomes = on_ranks(2, _raises_once, error, 2)
    got = values(outcomes)
    assert got[0] == got[1]
    winner, failures, is_kept = got[0]
    assert winner != "block=32"
    assert [i for i, each in enumerate(failures) if each is not None] == [1]
    assert not is_kept
    assert "is not kept: candidates were dropped for what was no doing of theirs: candidate 1: rank 1: MemoryError" in outcomes[0].log


def _tuned() -> Any:
    _fastest_is(64)
    kernel = autotuned(blocks=BLOCKS)
    step = contextual_autotune(is_dist=True, n_repeat=2, n_warmup=0)(lambda x: launch(kernel, x))
    return kernel, step


def _triton_cache_full(rank: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], check=True)
        try:
            os.environ["TRITON_CACHE_DIR"] = folder
            (Path(folder) / "filler").write_bytes(b"x" * 60_000)
            kernel, step = _tuned()
            y = step(torch.zeros(64))
            put = FileCacheManager.put
            return best(kernel), len(step.records), [each.failure for each in step.records[0].candidates], y is not None, put.__module__
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="needs a small file system")
def test_a_full_triton_cache_costs_a_warning():
    """The tuning goes on in a temporary folder, ends right, and says which folder is full."""
    outcomes = on_ranks(2, _triton_cache_full, mode="fake")
    for each in values(outcomes):
        assert each == ([64], 1, [None] * 4, True, "triton.runtime.cache")
    for outcome in outcomes:
        assert "Triton's cache folder" in outcome.log
        assert "cannot be written (No space left on device)" in outcome.log


def _no_descriptors(rank: int) -> Any:
    _, step = _tuned()
    if rank == 1:

        def put(self: Any, data: Any, filename: str, binary: bool = True) -> str:
            raise OSError(errno.EMFILE, "Too many open files")

        FileCacheManager.put = put
        os.environ["TRITON_CACHE_DIR"] += "-1"  # what rank 0 has compiled lies elsewhere
    step(torch.zeros(64))


def test_descriptors_that_have_run_out_are_told_as_that():
    """On both ranks, with the rank."""
    for each in on_ranks(2, _no_descriptors, mode="fake"):
        assert each.error == "MachineError", f"{each.error}: {each.message}\n{each.notes}"
        assert "rank 1: " in each.message
        assert "Too many open files" in each.message
        assert "BLOCK" not in each.message


def _no_threads(rank: int) -> Any:
    _, step = _tuned()
    if rank == 1:
        start = threading.Thread.start

        def refuse(self: threading.Thread) -> None:
            if self.name.startswith("dist_tune"):
                raise RuntimeError("can't start new thread")
            start(self)

        threading.Thread.start = refuse  # type: ignore[method-assign]
    step(torch.zeros(64))


def test_threads_that_have_run_out_are_told_as_that():
    """The rank says so itself, and is named on the other; no config is."""
    other, short = on_ranks(2, _no_threads, mode="fake")
    assert (short.error, short.message) == ("RuntimeError", "can't start new thread")
    assert other.error == "PeerFailedError"
    assert "rank 1 raised RuntimeError: can't start new thread" in other.message
    assert "BLOCK" not in other.message


def _clock_jumps(rank: int, by_s: float) -> Any:
    clock, at, runs = time.perf_counter, [0.0], []

    @autotune([{"block": block} for block in BLOCKS], None, n_warmup=0, n_repeat=2)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        runs.append(block)
        if rank == 1 and runs.count(32) == 2 and block == 32:
            at[0] = by_s
        time.sleep(0.002 if block == 32 else 0.01)
        return x + 1

    time.perf_counter = lambda: clock() + at[0]
    step(torch.zeros(4))
    record = step.records[0]
    return record.best.config, [each.failure for each in record.candidates], (record.best.latency_ms or 0.0) < 1000


@pytest.mark.parametrize("by_s", [3600.0, pytest.param(-3600.0, marks=pytest.mark.slow)])
def test_a_clock_that_is_set_counts_against_no_config(by_s: float):
    """By an hour while the best config is timed: that replay is run again."""
    assert values(on_ranks(2, _clock_jumps, by_s)) == [("block=32", [None] * 4, True)] * 2


def _over_tcp(rank: int) -> None:
    """A process group whose store is no file, which takes a descriptor for each question."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [store.port if store is not None else 0]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    store = store or dist.TCPStore("127.0.0.1", port[0], is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


def _take_descriptors() -> list[int]:
    """All that are left to this process."""
    files: list[int] = []
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 4, most))
    with suppress(OSError):
        while True:
            files.append(os.open(os.devnull, os.O_RDONLY))
    return files


def _hangs_without_descriptors(rank: int) -> Any:
    def hook(full: dict[str, Any]) -> None:
        if rank == 1 and full["BLOCK"] == 64 and len(runs) > 2:
            _take_descriptors()
            time.sleep(1000)

    _over_tcp(rank)
    runs: list[int] = []
    kernel = autotuned(configs=[triton.Config({"BLOCK": block}, pre_hook=hook) for block in BLOCKS])

    def step(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return launch(kernel, x)

    contextual_autotune(is_dist=True, n_repeat=2, n_warmup=0, search="exhaustive")(step)(torch.zeros(64))


def test_a_config_that_hangs_where_no_descriptor_is_left_is_named():
    """The end is told over the connection that is there: a new one would not come about before the rank has left."""
    first, second = on_ranks(2, _hangs_without_descriptors, timeout_s=25)
    assert "exit code 86" in second.message, f"{second.error}: {second.message}\n{second.notes}"
    assert first.error == "StuckConfigError", f"{first.error}: {first.message}"
    assert "BLOCK=64" in first.message


def _no_descriptor_for_presence(rank: int) -> Any:
    _over_tcp(rank)
    _, step = _tuned()
    group_of(None, 3.0)  # has the first connection
    files = _take_descriptors() if rank == 1 else []
    began = time.monotonic()
    try:
        step(torch.zeros(64))
        told = ""
    except MachineError as error:
        told = str(error)
    for file in files:
        os.close(file)
    step(torch.zeros(64))
    return told, time.monotonic() - began, len(step.records)


def test_a_rank_that_gets_no_second_connection_to_the_store_goes_on_alone():
    """It goes on with a config that it has, which is no error; the same call is tuned once there are descriptors again."""
    outcomes = on_ranks(2, _no_descriptor_for_presence, timeout_s=40)
    assert [(told, n_records > 0, seconds < 15.0) for told, seconds, n_records in values(outcomes)] == [("", True, True)] * 2


def _no_temporary_folder(rank: int, n_compiled: int) -> Any:
    _over_tcp(rank)
    x = torch.zeros(64)
    for block in BLOCKS[:n_compiled]:  # in this process, which needs no folder for them any more
        add_kernel[(1,)](x, x, 64, BLOCK=block)
        accumulate_kernel[(1,)](x, x, 64, BLOCK=block)
    kernels = [autotuned(blocks=BLOCKS), autotuned(accumulate_kernel, blocks=BLOCKS)]

    def closure(x: torch.Tensor) -> torch.Tensor:
        launch(kernels[1], x, torch.zeros(64))
        return launch(kernels[0], x)

    step = contextual_autotune(is_dist=True, n_repeat=2, n_warmup=0)(closure)
    if rank == 1:
        tempfile.tempdir = None
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        step(x)
    except MachineError as error:
        return str(error), list(Path(os.environ["DIST_TUNE_CACHE_DIR"]).rglob("*.json"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return "ended well", step.records


@pytest.mark.parametrize("n_compiled", [0, 1])
def test_a_rank_without_a_temporary_folder_ends_the_tuning_with_its_name(n_compiled: int):
    """On all ranks, with what to do; no config is blamed, none wins as the only one that runs, and no record is written."""
    for told, kept in values(on_ranks(2, _no_temporary_folder, n_compiled, mode="fake")):
        assert "rank 1: OSError: [Errno 27] File too large" in told
        assert "disk space" in told
        assert "BLOCK" not in told
        assert not kept
