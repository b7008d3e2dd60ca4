"""Configs, calls, machines and processes that fail on some rank: all hear of it or go on together,
and later calls are tuned as always.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
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
import triton.language as tl
from triton.runtime.cache import FileCacheManager

from dist_tune import MachineError, NoValidConfigError, autotune
from dist_tune.launches import read_code
from dist_tune.ranks import group_of
from dist_tune.testing import ExactTime, FakeH200, values
from tests.steps import (
    FACES,
    Face,
    Step,
    accumulate_kernel,
    add_kernel,
    all_reduced,
    autotuned,
    best,
    launch,
    product_kernel,
    tuned,
)
from tests.worlds import (
    Wire,
    caught,
    further,
    left_with,
    log,
    log_of,
    on_each_rank,
    on_ranks,
    over_tcp,
    until,
)

X = torch.zeros(64)
BLOCKS = (16, 32, 64, 128)
On = dict[int, list[int]]
"""Rank -> configs that fail there."""

# -- configs ---------------------------------------------------------------------------------------


def failing(
    rank: int, on: On, at_launch: int = 0, face: Face = "contextual", **options: Any
) -> Step:
    """A step whose configs raise, always or at their n-th launch."""

    def act(block: int) -> None:
        index = BLOCKS.index(block)
        if index in on.get(rank, []) and at_launch in (0, step.ran.count(block)):
            raise RuntimeError(f"config {index} is out on rank {rank}")

    step: Step = Step(face, BLOCKS, act=act, n_repeat=2, n_warmup=1, search="exhaustive", **options)
    return step


@on_each_rank(
    cases=[({1: [0]}, 0), ({1: [2]}, 0, "function"), ({0: [0], 1: [1]}, 0), ({1: [3]}, 2)]
)
def test_a_launch_that_fails_on_one_rank_drops_the_config_on_all(rank: int, case: Any):
    """Another config stands in, the step's collective stays matched, and nobody ends with the
    failed config.
    """
    step, on = failing(rank, *case, rest=all_reduced), case[0]
    assert step(X)[0].item() == 2.0
    out = {
        index: f"rank {each}: RuntimeError: config {index} is out"
        for each, indices in on.items()
        for index in indices
    }
    assert {i for i, failure in enumerate(step.failures) if failure} == {*out}
    assert all(text in str(step.failures[index]) for index, text in out.items())
    assert BLOCKS.index(step.best[0]) not in out
    return step.best


@on_each_rank(cases=[{0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}, {0: [0, 1], 1: [2, 3]}, {1: [0, 1, 2, 3]}])
def test_all_configs_failing_is_one_clear_error_on_every_rank(rank: int, on: On):
    """Also where every config works somewhere, and where one rank alone has none."""
    with pytest.raises(NoValidConfigError, match=r"(add_kernel|step)\[64(.|\n)*is out on rank"):
        failing(rank, on)(X)


@on_each_rank(cases=FACES)
def test_the_slowest_rank_decides(rank: int, face: Face):
    """Block 16 is faster on rank 0 and in the mean, and slower on rank 1: both take 32."""
    step = Step(face, {16: [10.0, 25.0][rank], 32: 20.0, 64: 30.0}, n_repeat=3)
    step(X)
    assert (step.best, {*step.records[0].best.rank_latencies_ms}) == ([32], {0, 1})


@triton.jit
def _rank_kernel(x_ptr, y_ptr, n, RANK: tl.constexpr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK != 32 or RANK != 1, "not on rank 1")
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


@on_each_rank(modes=("fake",))
def test_a_config_that_does_not_compile_on_one_rank_is_never_launched(rank: int):
    """The fastest config does not compile on rank 1: it is dropped on both before the first
    measured replay.
    """
    FakeH200.launch_ms = staticmethod(
        lambda src, metadata: 1.0 if src.constants[(4,)] == 32 else 2.0
    )
    kernel = autotuned(_rank_kernel)
    step = tuned(kernel, lambda: kernel[(1,)](X, X, 64, rank), n_repeat=2, search="exhaustive")
    step()
    (record,) = step.records
    assert "rank 1: CompileTimeAssertionFailure" in record.candidates[1].failure
    assert record.n_replays == 2 + 2 * 2 + 1
    assert record.winner != 1
    return best(kernel)


@on_each_rank(modes=("fake",), is_alone=True)
def test_out_of_resources_on_one_rank_is_found_by_loading(rank: int):
    """Rank 1 has less shared memory: what does not fit there is dropped on both, with Triton's own
    reason.
    """
    FakeH200.launch_ms = staticmethod(lambda src, metadata: 1e5 / max(metadata.shared, 1))
    kernel = autotuned(
        product_kernel, configs=[triton.Config({"BLOCK": 64}, num_stages=n) for n in (2, 3, 4, 8)]
    )
    a = torch.zeros(64, 64, dtype=torch.float16)
    step = tuned(kernel, lambda: kernel[(1,)](a, a, 64))
    FakeH200.shared_limit_bytes = 40_000 if rank else FakeH200.shared_limit_bytes
    step()
    out = {i: each.failure for i, each in enumerate(step.records[0].candidates) if each.failure}
    assert out
    assert all("rank 1: OutOfResources" in each for each in out.values())
    assert step.records[0].winner == max({0, 1, 2, 3} - {*out})


# -- an error in a tuning --------------------------------------------------------------------------


@on_each_rank(
    cases=["block size must be a multiple of the NCCL channel count", "no collective", "interrupt"]
)
def test_an_error_in_a_tuning_is_the_rank_s_own_and_names_it_on_the_others(rank: int, how: str):
    """Also one with the words of a broken collective, and Ctrl-C in an exchange; without a
    collective, others hear within the batch.
    """
    group, is_interrupt = dist.new_group([0, 1]), how == "interrupt"

    def rest(y: torch.Tensor) -> None:
        if len(step.ran) == 4 and rank == 1:
            if not is_interrupt:
                raise RuntimeError(how)
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        if len(step.ran) >= 4 and rank == 0 and "multiple" not in how:
            until(lambda: " ended by " in log_of(1))
            threading.Event().wait(0.05)
        if "multiple" in how:
            dist.all_reduce(y, group=group)

    step: Step = Step(
        "contextual",
        rest=rest,
        group=group,
        n_repeat=1 if is_interrupt else 50,
        search="exhaustive",
    )
    kind, words = ("KeyboardInterrupt", "") if is_interrupt else ("RuntimeError", how)
    if rank == 1:
        with pytest.raises((KeyboardInterrupt, RuntimeError), match=words) as own:
            step(X)
        assert own.type.__name__ == kind
    else:
        error = caught(lambda: step(X))
        assert error.kind == "PeerFailedError", error.message
        assert f"rank 1 raised {kind}" in error.message
        assert words in error.message
        assert len(step.ran) < 50


@on_each_rank(1)
def test_an_interrupt_after_a_first_run_that_failed_is_raised_as_it_is(rank: int):
    """Not the error of that run in its place."""

    def rest(y: torch.Tensor) -> None:
        raise ValueError if len(step.ran) == 1 else KeyboardInterrupt

    step = Step("function", rest=rest)
    with pytest.raises(KeyboardInterrupt):
        step(X)


def _slow_store(rank: int) -> int:
    over_tcp(rank, lambda port: Wire(port, delay_s=0.1).port)
    step = Step("contextual", BLOCKS, n_repeat=2, search="exhaustive", cache=False)
    step(X)
    return int(step.records[0].n_replays)


def test_a_slow_store_costs_no_meeting_for_every_replay():
    """Its answers between replays are no time of theirs."""
    outcomes = on_ranks(2, _slow_store)
    for n_replays, outcome in zip(values(outcomes), outcomes, strict=True):
        assert outcome.log.count("meeting='report'") < n_replays / 2, outcome.log


# -- ranks that end or are late in a collective ----------------------------------------------------


def _leaves(rank: int, face: Face, where: str) -> None:
    def leave(at: str) -> None:
        if (rank, where) == (1, at):
            os._exit(3)

    def rest(y: torch.Tensor) -> torch.Tensor:
        leave("before the collective")
        dist.all_reduce(y)
        leave("after it")
        return y

    step = Step(face, rest=rest)
    leave("before the call")
    step(X)


@pytest.mark.parametrize(
    ("face", "where"),
    [
        ("contextual", "before the collective"),
        ("function", "after it"),
        ("contextual", "before the call"),
        further("contextual", "after it"),
        further("function", "before the collective"),
    ],
)
def test_a_rank_whose_process_ends_in_its_first_call_is_told_at_once(face: Face, where: str):
    """Long before the deadline, as ours: gloo's error is the cause of that, and no part of its
    text.
    """
    first, second = on_ranks(2, _leaves, face, where, env={"DIST_TUNE_DEADLINE_S": "40"})
    left_with(second, 3)
    assert first.error == "AbsentRanksError", f"{first.error}: {first.message}\n{first.notes}"
    # Its latest answer to rank 0, which may ask before, in and after the meeting that comes before
    # the first run of a function.
    doing = (
        "its first run"
        if face == "contextual"
        else "(work before the first exchange|its first run|the exchange 'manifest'|replay 0, .*)"
    )
    seen = (
        "no call with this group yet"
        if where == "before the call"
        else rf"{doing} of .*, call 1 for \d+\.\d s, its process has ended"
    )
    assert re.match(
        rf"rank 1 last seen at: {seen}\. So ranks \[1\] did not come ", first.message
    ), first.message
    assert ("/gloo/" in first.message, "/gloo/" in first.notes) == (False, where != "after it")
    assert first.seconds < 30


@on_each_rank(
    cases=[
        ("function", 1, "replay 0"),
        ("function", 32, r"replay \d"),
        ("contextual", 2, "the second run"),
    ]
)
def test_a_config_that_comes_too_late_for_a_collective_is_named(
    rank: int, case: tuple[Face, int, str]
):
    """On both ranks, with what to do and without gloo's text; also in a function's first run, and
    in the second one of a step.
    """
    (face, slow, run), group = case, dist.new_group([0, 1])
    failed = Path(os.environ["DIST_TUNE_LOG_DIR"], "failed")

    def rest(y: torch.Tensor) -> torch.Tensor:
        if rank == 1 and slow in (len(step.ran), step.ran[-1]):
            until(failed.exists)
        try:
            dist.all_reduce(y, group=group)
        except RuntimeError:
            failed.touch()
            raise
        return y

    step = Step(face, rest=rest, **({"group": group} if face == "contextual" else {}))
    error = caught(lambda: step(X, **({"autotune_pg": group} if face == "function" else {})))
    assert error.kind == "PeerFailedError", f"{error.kind}: {error.message}"
    assert re.search(rf"{run}[ ,].*candidate \d \"(block|BLOCK)=", error.message), error.message
    assert re.search(r"rank 0\b.*rank 1\b.* Leave out a config that ", error.message), error.message
    assert "gloo" not in error.message


# -- calls made again ------------------------------------------------------------------------------


@on_each_rank()
def test_a_call_made_again_frees_the_rank_that_waits_in_its_collective(rank: int):
    """That call is not tuned, nor the next one, which has no collective; later calls are, where
    collectives show the call.
    """
    talks = True

    def rest(y: torch.Tensor) -> torch.Tensor:
        if rank == 1 and len(step.ran) == 1:
            raise ValueError("before the collective")
        return all_reduced(y) if talks else y

    step, n_tuned = Step("contextual", rest=rest, name="made again"), list[int]()
    for n, is_talking in ((64, True), (128, False), (256, True), (64, True)):
        talks = is_talking
        with suppress(ValueError):
            step(torch.ones(n))
        if n_tuned == [] and rank == 1:
            step(torch.ones(n))
        n_tuned.append(len(step.records))
    assert n_tuned == [0, 0, 1, 2]
    return step.best


@on_each_rank()
def test_a_rank_that_is_slow_after_a_collective_of_a_recalled_function_is_waited_for(rank: int):
    """It has not gone on: it has issued what the others have, and kernels inside the function are
    tuned.
    """
    kernel = autotuned()

    def function(x: torch.Tensor, n: int) -> torch.Tensor:
        if "WITH_KERNEL" in os.environ:
            dist.all_reduce(launch(kernel, x))
            if rank == 1 and os.environ.pop("SLOW", ""):
                time.sleep(0.5)
        return x * n

    dist.barrier()  # a collective before the call, so that collectives are compared
    again: Any = None
    for variables in ({}, {"WITH_KERNEL": "1", "SLOW": "1"}):
        os.environ |= variables
        again = autotune([{"n": 1}, {"n": 2}], key_fn=lambda x: x.numel(), n_warmup=0, n_repeat=1)(
            function
        )
        again(torch.ones(64))
    assert [each.is_recalled for each in again.records] == [False, True]
    assert len(best(kernel)) == 1
    return best(kernel)


@on_each_rank(
    cases=[(how, face) for face in FACES for how in ("in parts", "passes")]
    + [further(("thrice", face)) for face in FACES]
)
def test_a_call_that_raised_on_one_rank_ends_in_no_error(rank: int, case: tuple[str, Face]):
    """Without collectives nothing says which calls belong together: ranks go on alone, each with a
    config that it has.

    Where a collective follows, what the ranks call after it is one call, and tuned.
    """
    (how, face), n_failures = case, 0

    def rest(y: torch.Tensor) -> torch.Tensor:
        nonlocal n_failures
        if n_failures:
            n_failures -= 1
            raise ValueError("once")
        return y

    # Calls of a name are counted.
    steps = [Step(face, rest=rest, name=f"{face} {how} 1"), Step(face, name=f"{face} {how} 2")]

    def run(*sizes: int) -> list[list[int]]:
        return [
            [step(torch.ones(n)) is not None and len(step.records) for step in steps] for n in sizes
        ]

    run(64)
    n_failures = rank * (3 if how == "thrice" else 1)
    for _ in range(2 if how == "passes" else 1 + n_failures):
        with suppress(ValueError):
            steps[0](torch.ones(64))
        if how == "passes":
            dist.all_reduce(torch.ones(1))
    found = run(128) if how == "passes" else run(128, 256)
    assert how != "passes" or found == [[2, 2]]
    assert how != "in parts" or " is alone in " in log()


@on_each_rank(cases=[((1,), 2), ((0, 1), 0)])
def test_a_fallback_of_the_step_is_its_own_affair(rank: int, case: tuple[tuple[int, ...], int]):
    """Rank 1 falls back in every run and call, and rank 0 tunes the kernel for itself; where no
    config runs anywhere, nothing is tuned.
    """
    where, n_records = case

    def hook(args: Any) -> None:
        if rank in where:
            raise triton.OutOfResources(300_000, 232_448, "shared memory")

    kernel = autotuned(
        configs=[triton.Config({"BLOCK": block}, pre_hook=hook) for block in (16, 32)]
    )
    fallbacks: list[int] = []

    def step(x: torch.Tensor) -> float:
        try:
            y = launch(kernel, x)
        except triton.OutOfResources:
            y = x + 1
            fallbacks.append(len(got))
        return float(all_reduced(y)[0])

    call, got = tuned(kernel, step), list[float]()
    for n in (64, 64, 128):
        got.append(call(torch.zeros(n)))
    assert (got, {*fallbacks}) == ([2.0] * 3, {0, 1, 2} if rank in where else set())
    return len(call.records) == n_records


# -- what the machine failed in --------------------------------------------------------------------

FULL, NO_FILES = (
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EMFILE, "Too many open files"),
)


@on_each_rank(
    cases=[
        (MemoryError(), 1),
        (FULL, 1),
        (NO_FILES, 1),
        (3600.0, 2),
        further((-3600.0, 2)),
        (MemoryError(), 2),
    ]
)
def test_one_failure_of_the_machine_drops_no_config(rank: int, case: tuple[Exception | float, int]):
    """The best config runs once more, wins, and is kept; also where a clock is set by an hour.

    After two it is out for this process.
    """
    error, n_times = case
    is_out, met = isinstance(error, Exception) and n_times == 2, list[int]()

    def act(block: int) -> None:
        if rank == 1 and block == 32 and len(met) < n_times:
            met.append(1)
            if isinstance(error, Exception):
                raise error
            ExactTime.seconds += error * (len(met) == n_times)

    step = Step(
        "function", dict.fromkeys(BLOCKS, 10.0) | {32: 2.0}, act=act, n_warmup=1, n_repeat=2
    )
    step(X)
    dist.barrier()  # the record is written by one rank
    assert (step.best == [32], [i for i, failure in enumerate(step.failures) if failure]) == (
        not is_out,
        [1] * is_out,
    )
    assert bool(list(Path(os.environ["DIST_TUNE_CACHE_DIR"]).rglob("*.json"))) is not is_out
    told = (
        "is not kept: candidates were dropped for what was no doing of theirs: candidate 1: rank 1:"
        " MemoryError"
    )
    assert (told in log_of(0)) is is_out
    return step.best


def _step(*blocks: int) -> tuple[Any, Any]:
    """Bodies take other blocks each: what a process has compiled it keeps.

    The first one is the fastest.
    """
    FakeH200.launch_ms = staticmethod(
        lambda src, metadata: 1.0 if src.constants[(3,)] == blocks[0] else 20.0
    )
    kernel = autotuned(blocks=blocks)
    return kernel, tuned(kernel, n_repeat=2)


def _raise(error: Exception) -> Any:
    def act(*args: Any, **options: Any) -> Any:
        raise error

    return act


@on_each_rank(modes=("fake",))
def test_a_full_triton_cache_costs_a_warning(rank: int):
    """The tuning goes on in a temporary folder, ends right, and says which folder is full."""
    kernel, step = _step(32, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", _raise(FULL))
        step(X)
    assert re.search(
        r"WARNING dist_tune: Triton's cache folder .* cannot be written \(No space left on"
        r" device\)",
        log(),
    )
    assert (best(kernel), [each.failure for each in step.records[0].candidates]) == (
        [32],
        [None] * 2,
    )
    assert not [*Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")]


@on_each_rank(modes=("fake",), cases=["Too many open files", "can't start new thread"])
def test_what_has_run_out_is_told_with_its_rank(rank: int, what: str):
    """On both ranks; no config is named."""
    start, is_of_files = threading.Thread.start, "files" in what
    _, step = _step(*((128, 256) if is_of_files else (512, 1024)))

    def refuse(self: threading.Thread) -> None:
        if self.name.startswith("dist_tune"):
            raise RuntimeError(what)
        start(self)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and is_of_files:
            patch.setattr(FileCacheManager, "put", _raise(NO_FILES))
            # What rank 0 has compiled lies elsewhere.
            patch.setenv("TRITON_CACHE_DIR", f"{os.environ['TRITON_CACHE_DIR']}-1")
        elif rank == 1:
            patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError) as told:
            step(X)
    assert told.type.__name__ == (
        "MachineError" if is_of_files else ["PeerFailedError", "RuntimeError"][rank]
    )
    assert re.search(
        f"(?s)^(?!.*BLOCK).*rank 1.*{what}" if is_of_files or rank == 0 else what, str(told.value)
    ), told.value


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
    def act(block: int) -> None:
        if rank == 1 and block == 64 and len(step.ran) > 2:
            _take_descriptors()
            time.sleep(1000)

    over_tcp(rank)
    step = Step("contextual", BLOCKS, act=act, n_repeat=2, search="exhaustive")
    step(X)


def test_a_config_that_hangs_where_no_descriptor_is_left_is_named():
    """The end is told over the connection that is there: a new one would not come about before the
    rank has left.
    """
    first, second = on_ranks(2, _hangs_without_descriptors)
    left_with(second, 86)
    assert first.error == "StuckConfigError", f"{first.error}: {first.message}"
    assert "BLOCK=64" in first.message


def _no_second_connection(rank: int) -> Any:
    over_tcp(rank)
    step = Step("contextual")
    group_of(None, 3.0)  # has the first connection
    # A file that cannot be read makes the kernel another one than that of its peers.
    read_code(add_kernel)
    files = _take_descriptors() if rank == 1 else []
    step(X)
    for file in files:
        os.close(file)
    step(X)
    return len(step.records)


def test_a_rank_that_gets_no_second_connection_to_the_store_goes_on_alone():
    """It goes on with a config that it has, which is no error; the same call is tuned once there
    are descriptors again.
    """
    assert values(on_ranks(2, _no_second_connection)) == [1, 1]


def _no_temporary_folder(rank: int, n_compiled: int) -> Any:
    over_tcp(rank)
    x = torch.zeros(64)
    for block in BLOCKS[:n_compiled]:  # in this process, which needs no folder for them any more
        add_kernel[(1,)](x, x, 64, BLOCK=block)
        accumulate_kernel[(1,)](x, x, 64, BLOCK=block)
    kernels = [autotuned(blocks=BLOCKS[:3]), autotuned(accumulate_kernel, blocks=BLOCKS[:3])]
    step = tuned(
        None, lambda x: (launch(kernels[1], x, torch.zeros(64)), launch(kernels[0], x)), n_repeat=2
    )
    if rank == 1:
        tempfile.tempdir = None
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        with pytest.raises(MachineError) as told:
            step(x)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(told.value), list(Path(os.environ["DIST_TUNE_CACHE_DIR"]).rglob("*.json"))


@pytest.mark.parametrize("n_compiled", [further(0), 1])
def test_a_rank_without_a_temporary_folder_ends_the_tuning_with_its_name(n_compiled: int):
    """On all ranks, with what to do; no config is blamed, none wins as the only one that runs, and
    no record is written.
    """
    for told, kept in values(on_ranks(2, _no_temporary_folder, n_compiled, mode="fake")):
        assert "rank 1: OSError: [Errno 27] File too large" in told
        assert "disk space" in told
        assert "BLOCK" not in told
        assert not kept
