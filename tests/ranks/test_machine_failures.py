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

from dist_tune import MachineError, autotune
from dist_tune.cache.fingerprints import read_code
from dist_tune.distributed import group_of
from dist_tune.testing import ExactTime, FakeH200, values
from tests.ranks.stuck import left_with
from tests.steps import accumulate_kernel, add_kernel, autotuned, best, launch, tuned
from tests.worlds import further, on_ranks, over_tcp

BLOCKS = (16, 32, 64, 128)


def _function(rank: int, error: Exception | float, n_times: int) -> Any:
    """On rank 1 the best config raises, or its clock is set by so many seconds while it is timed."""
    met: list[int] = []
    clock, ahead_s = time.perf_counter, 0.0

    @autotune([{"block": block} for block in BLOCKS], None, n_warmup=1, n_repeat=2)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        nonlocal ahead_s
        if rank == 1 and block == 32 and len(met) < n_times:
            met.append(1)
            if isinstance(error, Exception):
                raise error
            ahead_s = error * (len(met) == n_times)
        ExactTime.pass_ms(2 if block == 32 else 10)
        return x + 1

    if not isinstance(error, Exception):
        time.perf_counter = lambda: clock() + ahead_s
    step(torch.zeros(4))
    dist.barrier()  # the record is written by one rank
    record = step.records[0]
    kept = list(Path(os.environ["DIST_TUNE_CACHE_DIR"]).rglob("*.json"))
    return record.best.config, [each.failure for each in record.candidates], bool(kept)


FAILURES = [MemoryError(), OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EMFILE, "Too many open files")]
CLOCKS = [(3600.0, 2), further(-3600.0, 2)]


@pytest.mark.parametrize(("error", "n_times"), [*((each, 1) for each in FAILURES), *CLOCKS], ids=str)
def test_one_failure_of_the_machine_drops_no_config(error: Exception | float, n_times: int):
    """The best config is launched once more, wins, and is kept without a failure; also where a clock is set by an hour."""
    got = values(on_ranks(2, _function, error, n_times))
    assert got[0] == got[1] == ("block=32", [None] * 4, True)


def test_a_config_that_the_machine_failed_twice_is_out_for_this_process_alone():
    """Nothing of that tuning is kept, and the log says why."""
    outcomes = on_ranks(2, _function, MemoryError(), 2)
    got = values(outcomes)
    assert got[0] == got[1]
    winner, failures, is_kept = got[0]
    assert [i for i, each in enumerate(failures) if each is not None] == [1]
    assert (winner != "block=32", is_kept) == (True, False)
    assert "is not kept: candidates were dropped for what was no doing of theirs: candidate 1: rank 1: MemoryError" in outcomes[0].log


def _step() -> Any:
    FakeH200.launch_ms = staticmethod(lambda src, metadata: 1.0 if src.constants[(3,)] == 64 else 20.0)
    kernel = autotuned(blocks=BLOCKS)
    return kernel, tuned(kernel, n_repeat=2)


def _triton_cache_full(rank: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], check=True)
        try:
            os.environ["TRITON_CACHE_DIR"] = folder
            (Path(folder) / "filler").write_bytes(b"x" * 60_000)
            kernel, step = _step()
            with pytest.warns(UserWarning, match=r"Triton's cache folder .* cannot be written \(No space left on device\)"):
                step(torch.zeros(64))
            return best(kernel), [each.failure for each in step.records[0].candidates], FileCacheManager.put.__module__
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="needs a small file system")
def test_a_full_triton_cache_costs_a_warning():
    """The tuning goes on in a temporary folder, ends right, and says which folder is full."""
    assert values(on_ranks(2, _triton_cache_full, mode="fake")) == [([64], [None] * 4, "triton.runtime.cache")] * 2


def _runs_out(rank: int, of: str) -> None:
    _, step = _step()
    start = threading.Thread.start

    def put(self: Any, data: Any, filename: str, binary: bool = True) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    def refuse(self: threading.Thread) -> None:
        if self.name.startswith("dist_tune"):
            raise RuntimeError("can't start new thread")
        start(self)

    if rank == 1 and of == "descriptors":
        FileCacheManager.put = put
        os.environ["TRITON_CACHE_DIR"] += "-1"  # what rank 0 has compiled lies elsewhere
    elif rank == 1:
        threading.Thread.start = refuse  # type: ignore[method-assign]
    step(torch.zeros(64))


@pytest.mark.parametrize(
    ("of", "kinds", "text"),
    [
        ("descriptors", ["MachineError", "MachineError"], "Too many open files"),
        ("threads", ["PeerFailedError", "RuntimeError"], "can't start new thread"),
    ],
)
def test_what_has_run_out_is_told_with_its_rank(of: str, kinds: list[str], text: str):
    """On both ranks; no config is named."""
    outcomes = on_ranks(2, _runs_out, of, mode="fake")
    assert [each.error for each in outcomes] == kinds, outcomes
    assert "rank 1" in outcomes[0].message
    for each in outcomes:
        assert text in each.message
        assert "BLOCK" not in each.message


def _take_descriptors() -> list[int]:
    """All that are left to this process."""
    files: list[int] = []
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 4, most))
    with suppress(OSError):
        while True:
            files.append(os.open(os.devnull, os.O_RDONLY))
    return files


def _hangs_without_descriptors(rank: int) -> None:
    def hook(full: dict[str, Any]) -> None:
        if rank == 1 and full["BLOCK"] == 64 and len(runs) > 2:
            _take_descriptors()
            time.sleep(1000)

    over_tcp(rank)
    runs: list[int] = []
    kernel = autotuned(configs=[triton.Config({"BLOCK": block}, pre_hook=hook) for block in BLOCKS])

    def step(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return launch(kernel, x)

    tuned(kernel, step, n_repeat=2, search="exhaustive")(torch.zeros(64))


def test_a_config_that_hangs_where_no_descriptor_is_left_is_named():
    """The end is told over the connection that is there: a new one would not come about before the rank has left."""
    first, second = on_ranks(2, _hangs_without_descriptors, timeout_s=25)
    left_with(second, 86)
    assert first.error == "StuckConfigError", f"{first.error}: {first.message}"
    assert "BLOCK=64" in first.message


def _no_descriptor_for_presence(rank: int) -> Any:
    over_tcp(rank)
    _, step = _step()
    group_of(None, 3.0)  # has the first connection
    read_code(add_kernel)  # a file that cannot be read makes the kernel another one than that of its peers
    files = _take_descriptors() if rank == 1 else []
    began = time.monotonic()
    step(torch.zeros(64))
    for file in files:
        os.close(file)
    step(torch.zeros(64))
    return time.monotonic() - began < 15.0, len(step.records) > 0


def test_a_rank_that_gets_no_second_connection_to_the_store_goes_on_alone():
    """It goes on with a config that it has, which is no error; the same call is tuned once there are descriptors again."""
    assert values(on_ranks(2, _no_descriptor_for_presence, timeout_s=40)) == [(True, True)] * 2


def _no_temporary_folder(rank: int, n_compiled: int) -> Any:
    over_tcp(rank)
    x = torch.zeros(64)
    for block in BLOCKS[:n_compiled]:  # in this process, which needs no folder for them any more
        add_kernel[(1,)](x, x, 64, BLOCK=block)
        accumulate_kernel[(1,)](x, x, 64, BLOCK=block)
    kernels = [autotuned(blocks=BLOCKS), autotuned(accumulate_kernel, blocks=BLOCKS)]
    step = tuned(None, lambda x: (launch(kernels[1], x, torch.zeros(64)), launch(kernels[0], x)), n_repeat=2)
    if rank == 1:
        tempfile.tempdir = None
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        with pytest.raises(MachineError) as told:
            step(x)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(told.value), list(Path(os.environ["DIST_TUNE_CACHE_DIR"]).rglob("*.json"))


@pytest.mark.parametrize("n_compiled", [0, 1])
def test_a_rank_without_a_temporary_folder_ends_the_tuning_with_its_name(n_compiled: int):
    """On all ranks, with what to do; no config is blamed, none wins as the only one that runs, and no record is written."""
    for told, kept in values(on_ranks(2, _no_temporary_folder, n_compiled, mode="fake")):
        assert "rank 1: OSError: [Errno 27] File too large" in told
        assert "disk space" in told
        assert "BLOCK" not in told
        assert not kept
