"""Records: what later jobs take from the cache, on all ranks or on none; jobs at the same time,
folders of other machines, misses.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dist_tune import autotune
from dist_tune.records import Cache, record_bytes
from dist_tune.records.remote import RemoteFolder
from dist_tune.testing import values
from dist_tune.tuning import discover
from tests.cached_records import record
from tests.steps import (
    BLOCKS,
    FACES,
    Face,
    Job,
    Step,
    accumulate_kernel,
    all_reduced,
    autotuned,
    best,
    edited,
    launch,
    names,
    own_records,
    records,
    told,
    tuned,
)
from tests.worlds import folder, log, on_each_rank, on_ranks, shown

ONES = torch.ones(64)

# -- one folder for all ranks ----------------------------------------------------------------------


@on_each_rank(cases=FACES)
def test_a_later_job_hits_on_all_ranks_without_a_replay(rank: int, face: Face):
    """One run, and no tuning in the log, also for a new key in the midst of an ordinary call; later
    calls find the winner.
    """
    for n in (64, 128):
        assert Job(face, n=n).how == "tuned 64"
    edited(rank, winner=32)
    before = len(log())
    step = Step(face, rest=all_reduced)
    assert [step(torch.zeros(n))[0].item() for n in (64, 128, 128)] == [2.0] * 3
    assert (step.ran, [each.is_recalled for each in step.records]) == ([32] * 3, [True] * 2)
    assert [
        words in log()[before:]
        for words in (", from the cache, tuned 2", "searches in", " on 2 ranks: ")
    ] == [True, False, False]


@on_each_rank()
def test_where_one_kernel_hits_the_others_are_tuned(rank: int):
    """The one with a record runs its config in all replays; both are there for the next job."""
    tuned(autotuned())(ONES)
    edited(rank, winner=32)
    winners, n_runs = [], []
    for is_second in (False, True):
        first, second = autotuned(), autotuned(accumulate_kernel)
        n_runs.append(0)

        def closure(first: Any = first, second: Any = second) -> torch.Tensor:
            n_runs[-1] += 1
            return launch(second, launch(first, torch.zeros(64)), torch.ones(64))

        step = tuned(None, closure)
        assert (step()[0].item(), names(step)) == (
            2.0,
            [("accumulate_kernel", is_second), ("add_kernel", True)],
        )
        winners.append(best(first) + best(second))
        dist.barrier()
    assert winners[0] == winners[1]
    assert (winners[0][0], n_runs[0] > 3, n_runs[1]) == (32, True, 1)


@on_each_rank()
def test_a_kernel_made_anew_in_every_call_hits_in_every_call(rank: int):
    """Its record is listed once, however many calls there are.

    From the third on no rank asks another.
    """
    tuned(autotuned())(ONES)
    edited(rank, winner=64)
    made: list[Any] = []
    before = log().count("meeting='manifest'")

    def closure(x: torch.Tensor) -> torch.Tensor:
        made.append(autotuned())
        return launch(made[-1], launch(made[-1], x))

    step = tuned(None, closure)
    assert [step(torch.zeros(64))[0].item() for _ in range(5)] == [2.0] * 5
    assert ([best(kernel) for kernel in made], len(step.records)) == ([[64]] * 5, 1)
    assert log().count("meeting='manifest'") - before == 2


@on_each_rank()
def test_a_kernel_whose_cache_is_cleared_is_tuned_each_time(rank: int):
    """It is no kernel that is made anew."""
    kernel = autotuned(blocks=(16, 32))
    step = tuned(kernel, cache=False)
    for n in range(1, 5):
        step(ONES)
        assert len(step.records) == n
        kernel.cache.clear()


@on_each_rank(cases=FACES)
def test_random_state_after_a_hit_is_as_without_a_tuner(rank: int, face: Face):
    def draw(_: Any = None) -> tuple[float, ...]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())

    drawn = []
    for call in (Step(face, rest=draw), Step(face, rest=draw), draw):  # tunes, hits, draws
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(1)
        drawn.append([call(ONES), draw()])
        dist.barrier()
    assert drawn[1] == drawn[2]


@on_each_rank(cases=[("restore_value", 7.0), ("reset_to_zero", 2.0)])
def test_a_hit_neither_restores_nor_zeroes(rank: int, case: tuple[str, float]):
    """``restore_value`` and ``reset_to_zero`` are for trials; a hit has none, and a kernel that is
    launched twice adds up.
    """
    name, value = case
    for is_recalled in (False, True):
        options: dict[str, Any] = {name: ["y_ptr"]}
        kernel, total = autotuned(accumulate_kernel, **options), torch.full((64,), 5.0)

        def closure(kernel: Any = kernel, total: torch.Tensor = total) -> float:
            if name == "reset_to_zero":
                total.zero_()
            launch(kernel, ONES, total)
            launch(kernel, ONES, total)
            return total[0].item()

        step = tuned(None, closure)
        assert (step(), total[0].item(), step.records[0].is_recalled) == (value, value, is_recalled)
        dist.barrier()


@on_each_rank()
def test_nothing_is_kept_of_a_tuning_without_a_result(rank: int):
    """No config is valid; a rank leaves in the first run, in a replay, in the last run."""

    def fail(block: int) -> None:
        raise ValueError("never")

    def leave(y: Any) -> Any:
        n_left[0] -= 1
        if n_left[0] == 0 and rank == 1:
            raise ValueError("left")
        return y

    assert [Job(face, act=fail).how for face in FACES] == ["NoValidConfigError"] * 2
    for last in (1, 3, 5):
        n_left = [last]
        assert (
            told(lambda: Step("contextual", rest=leave)(ONES))[0]
            == ["PeerFailedError", "ValueError"][rank]
        )
    dist.barrier()
    assert records() == []


@on_each_rank(cases=FACES)
def test_a_space_that_has_changed_is_tuned_as_far_as_it_is_new(rank: int, face: Face):
    """A slow new config changes nothing and a fast one wins; those that had lost are not run again.

    In another order, or smaller, the winner stands without a race while it is a candidate; without
    it the others are measured.
    """
    for blocks, winner, ran in (
        ((8, 32, 16), 32, {8, 16, 32}),
        ((16, 32, 8), 32, {32}),
        ((8, 32), 32, {32}),
        ((8, 16), 16, {8, 16}),
        ((8, 32, 16, 4), 32, {32, 4}),
        ((8, 32, 16, 4, 64), 64, {32, 64}),
    ):
        job = Job(face, blocks)
        again = Counter(job.first) - Counter({job.first[0]: 2})  # less the first run and the probe
        assert (job.how, {*again}, job.record.spent.race > 0) == (
            f"tuned {winner}",
            ran,
            len(ran) > 1,
        )


# -- on all ranks or on none -----------------------------------------------------------------------


def _barred(path: Path) -> None:
    shutil.rmtree(path)
    path.touch()


def _cut(path: Path) -> None:
    (entry,) = Cache(path).entries()
    entry.path.write_bytes(entry.path.read_bytes()[:-20])


FOLDERS: dict[str, tuple[int, Callable[[Path], object], str]] = {
    "the first has none": (0, shutil.rmtree, ""),
    "the last has none": (1, shutil.rmtree, ""),
    "another winner": (1, lambda path: edited(1, path, winner=64), ""),
    "the first can have none": (0, _barred, "not kept"),
    "one is cut short": (1, _cut, "cache file"),
}
"""What differs -> on which rank, how it comes to that, and the warning of that rank."""


@on_each_rank(cases=[*product(FACES, FOLDERS)])
def test_one_config_for_all_ranks_where_folders_differ(rank: int, case: tuple[Face, str]):
    """The first record counts, without a replay, and all keep it; a rank that cannot, or whose own
    is damaged, says so.
    """
    face, (who, change, warning) = case[0], FOLDERS[case[1]]
    path = own_records(face, rank)
    if rank == who:
        change(path)
    job = Job(face, path=path)
    assert (job.how, [warning in each for each in job.warned]) == (
        "hit 32",
        [True] * (rank == who and warning != ""),
    )
    assert path.is_file() or [each.best.fields["BLOCK"] for each in records(path)] == [32]


@on_each_rank()
def test_ranks_with_other_code_hit_if_each_has_a_record_of_the_same_winner(rank: int):
    """An integer that the function captures is another one on each rank.

    Two winners, or one record that is gone: all tune, then hit.
    """

    def is_hit() -> bool:
        dist.barrier()
        step = autotune(BLOCKS, None, n_warmup=0, n_repeat=1)(lambda x, block: x + 0 * rank)
        step(ONES)
        return step.records[-1].is_recalled

    def keep(*winners: int) -> None:
        dist.barrier()
        for entry, winner in zip(
            Cache(folder()).entries() if rank == 0 else [], winners, strict=False
        ):
            entry.path.unlink()
            if winner:
                entry.path.write_bytes(
                    record_bytes(entry.record.model_copy(update={"winner": winner}))
                )

    assert not is_hit()
    keep(1, 1)
    assert (is_hit(), len(records())) == (True, 2)
    keep(1, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIST_TUNE_MODE", "require")
        kind, message, _ = told(is_hit)
    assert (kind, "ranks have records that not all of them can use" in message, is_hit()) == (
        "CacheMissError",
        True,
        False,
    )
    keep(1, 0)
    assert [is_hit(), is_hit()] == [False, True]


@on_each_rank()
def test_a_record_counts_more_than_what_one_rank_had_tuned_alone(rank: int):
    """Triton has a config for the kernel on one rank, and both have a record of another: a second
    run, of which the effect stays.
    """
    for k, kernel in enumerate(
        autotuned(accumulate_kernel, restore_value=["y_ptr"]) for _ in range(2)
    ):
        if k == 1 and rank == 1:
            kernel.cache[(64, "torch.float32", "torch.float32")] = kernel.configs[2]
        total = torch.full((64,), 5.0)
        step = tuned(None, lambda x, kernel=kernel, total=total: launch(kernel, x, total))
        step(ONES)
        edited(rank, winner=32)
    assert (best(kernel), step.records[-1].is_recalled, total[0].item()) == ([32], True, 6.0)


@on_each_rank()
def test_a_site_met_late_hits_on_all_ranks_or_on_none(rank: int):
    """It comes up in the middle of a race; where one rank shall always tune, both do.

    Where there is no race it does not come up.
    """
    for always, hits in (("0", [False, False]), (str(rank), [False, False]), ("0", [True])):
        first, late, runs = (
            autotuned(blocks=(16, 32, 64, 128)),
            autotuned(accumulate_kernel),
            list[int](),
        )

        def closure(first: Any = first, late: Any = late, runs: list[int] = runs) -> torch.Tensor:
            runs.append(1)
            y = launch(first, ONES)
            return launch(late, y, y.clone()) if len(runs) > 3 else y

        dist.barrier()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DIST_TUNE_ALWAYS_TUNE", always)
            step = tuned(None, closure)
            step()
        assert [each.is_recalled for each in step.records] == hits


@on_each_rank(cases=[(1,), (0, 1)])
def test_a_record_whose_config_does_not_run_any_more_is_tuned_again(
    rank: int, who: tuple[int, ...]
):
    """It fails in the first run on one rank, or on all: all tune, without it."""

    def act(block: int) -> None:
        if block == 32 and rank in who:
            raise ValueError("no longer")

    job = Job("contextual", path=own_records("contextual", rank), act=act)
    assert (job.how, "ValueError: no longer" in str(job.failures[1])) == ("tuned 64", True)


@on_each_rank()
def test_a_site_of_one_rank_is_recorded_on_all(rank: int) -> Any:
    """The other has the record, though nothing to use it for, also from the cache."""
    chosen = []
    for is_recalled in (False, True):
        lonely = autotuned()
        step = tuned(None, lambda x, lonely=lonely: launch(lonely, x) if rank == 1 else x)
        step(ONES)
        assert (names(step), len(best(lonely))) == ([("add_kernel", is_recalled)], rank)
        chosen.append(step.records[0].best.config)
        dist.barrier()
    assert len(records()) == 1
    return chosen


# -- settings --------------------------------------------------------------------------------------


@on_each_rank(cases=FACES)
def test_always_tune(rank: int, face: Face):
    """On all ranks or on one: all tune, the new record takes the old one's place, and the next job
    hits.
    """
    path = own_records(face, rank)
    (before,) = records(path)
    for always in ("1", str(rank)):
        assert Job(face, path=path, settings={"ALWAYS_TUNE": always}).how == "tuned 64"
    (after,) = records(path)
    assert after.tuned_at > before.tuned_at
    assert Job(face, path=path).how == "hit 64"


@on_each_rank(cases=FACES)
def test_a_cache_that_is_switched_off(rank: int, face: Face):
    """On all ranks nothing is read or written; on one rank all tune, and the others keep what came
    of it.
    """
    path = own_records(face, rank)
    before = records(path)
    for is_used in (False, rank != 1):
        assert Job(face, path=path, cache=is_used).how == "tuned 64"
        assert (records(path) == before) != is_used


DIFFERING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "source: the code of": ({"source": "0" * 16}, {}),
    "in key: [128": ({}, {"n": 128}),
    "in world_size: 2 here, 9 in the record": ({"environment": {"world_size": 9}}, {}),
    ", 1.0 in the record": ({"environment": {"triton": "1.0"}}, {}),
}
"""Words of the error -> changes of the record, and options of the job."""


@on_each_rank(cases=FACES)
def test_a_miss_where_a_record_is_required_names_the_field(rank: int, face: Face) -> Any:
    """On all ranks the same error, also where one rank requires it; one record is enough for
    all.
    """
    path, must, errors = folder() / str(rank), {"MODE": "require"}, dict[str, Any]()
    job = partial(Job, face, path=path, settings=must)
    for words, (changes, options) in DIFFERING.items():
        own_records(face, rank)
        edited(rank, path, **changes)
        errors[words] = job(**options).error
        shutil.rmtree(path)
    errors |= {
        "There is no record of": job().error,
        "rank 1: There is no record of": job(settings=must if rank == 1 else {}).error,
        "ALWAYS_TUNE is set. ": job(settings={**must, "ALWAYS_TUNE": "1"}).error,
        "It uses no cache. ": job(cache=False).error,
    }
    for words, error in errors.items():
        assert (
            error.kind,
            words in error.message,
            "is require: tune once without it" in error.message,
        ) == ("CacheMissError", True, True)
    own_records(face, rank)
    if rank == 0:
        shutil.rmtree(path)
    assert job().how == "hit 32"
    return [error.message for error in errors.values()]


@on_each_rank()
def test_a_miss_names_its_nearest_reason(rank: int):
    """Not of the first tuning of all, which has nothing to be near to, and not of a new shape,
    which is as it should be.
    """
    jobs = (((16, 32), 64), ((16, 64), 64), ((16, 64), 64), ((16, 64), 48))
    (line,) = shown(lambda: [tuned(autotuned(blocks=blocks))(torch.zeros(n)) for blocks, n in jobs])
    assert "is tuned: The nearest record of tests.steps.add_kernel" in line
    assert "candidates: the list of configs" in line


# -- other jobs ------------------------------------------------------------------------------------


WAITS = "is tuning the same; this one waits for its records"


def _awaited(is_so: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 60.0
    while not is_so():
        assert time.monotonic() < ends_at
        time.sleep(0.01)


def _tunes_first(rank: int, root: Path, face: Face, n_waits: int, is_killed: bool) -> str:
    """A job that stops in the midst of its tuning until the other one has waited so often, and goes
    on or is killed.
    """

    def act(block: int) -> None:
        if rank == 0 and len(step.ran) == 4:
            (root / "begun").touch()
            _awaited((root / "second/rank-0.log").exists)
            _awaited(lambda: (root / "second/rank-0.log").read_text().count(WAITS) == n_waits)
            if is_killed:
                os.kill(os.getpid(), signal.SIGKILL)

    step = Step(face, act=act)
    step(ONES)
    return f"tuned {step.best[0]}"


def _beside(
    root: Path,
    n: int,
    face: Face,
    second: Callable[..., Any],
    *,
    n_waits: int,
    is_killed: bool = False,
) -> Any:
    """Outcomes of two jobs of ``n`` ranks that share a folder; the second one begins while the
    first tunes.
    """
    env = {"DIST_TUNE_CACHE_DIR": str(root / "cache"), "DIST_TUNE_DEADLINE_S": "60"}
    with ThreadPoolExecutor(1) as pool:
        options: dict[str, Any] = {
            "is_dist": n > 1,
            "env": env | {"DIST_TUNE_LOG_DIR": str(root / "first")},
        }
        first = pool.submit(
            lambda: on_ranks(n, _tunes_first, root, face, n_waits, is_killed, **options)
        )
        _awaited((root / "begun").exists)
        options["env"] = env | {"DIST_TUNE_LOG_DIR": str(root / "second")}
        return on_ranks(n, second, face, **options), first.result()


def _come_second(rank: int, face: Face) -> list[tuple[bool, int, int]]:
    """Three jobs, of which none finds a record that one of the others has left: found one, has
    waited, warned of its lack of a journal.
    """
    found = []
    for always, max_wait in (("1", 10), ("0", 0), ("0", 10)):
        os.environ["DIST_TUNE_ALWAYS_TUNE"], discover.MAX_WAIT = always, max_wait
        step = Step(face)
        step(ONES)
        found.append(
            (
                step.records[0].is_recalled,
                log().count(WAITS),
                log().count("goes on without its journal"),
            )
        )
        dist.barrier()
        shutil.rmtree(folder() / "tests.steps.step", ignore_errors=True)
    return found


def test_a_second_job_waits_and_hits(tmp_path: Path):
    """Not with DIST_TUNE_ALWAYS_TUNE=1, and not for ever; then it warns of its lack of a
    journal.
    """
    second, first = _beside(tmp_path, 2, "function", _come_second, n_waits=2)
    assert values(first) == ["tuned 64"] * 2
    assert values(second) == [[(False, 0, 1), (False, 1, 1), (True, 2, 1)]] * 2
    assert list((tmp_path / "cache/journals").iterdir()) == []


def _counts_calls(rank: int, face: Face) -> tuple[str, int, str]:
    """A job of a step that may not be replayed, and then one of the same step that may."""
    n_calls = torch.zeros(1)
    online = Step(face, rest=lambda y: (n_calls.add_(1), y)[1])
    online(ONES)
    return Job(face).how, int(n_calls), log()


def test_a_second_job_tunes_if_the_first_one_is_killed(tmp_path: Path):
    """As soon as the process is gone. A step that is tuned in its own calls does not wait."""
    (second,), (first,) = _beside(
        tmp_path, 1, "contextual", _counts_calls, n_waits=1, is_killed=True
    )
    assert first.error == "Died"
    how, n_calls, text = values([second])[0]
    assert (how, n_calls) == ("tuned 64", 1)
    assert "tuned in the calls to come" in text.partition(WAITS)[0]
    assert "is tuned: There is no record of" in text


# -- folders of all machines -----------------------------------------------------------------------


@on_each_rank(cases=FACES)
def test_a_url_is_a_folder_for_all_machines(rank: int, face: Face):
    """One file for a record, which other machines hit and copy.

    One that is broken costs a warning, and is tuned and written anew.
    """
    team = folder() / "team"

    def of(machine: str) -> Job:
        return Job(face, path=folder() / machine, settings={"CACHE_PATH": f"file://{team}"})

    assert [of("a").how, of("b").how] == ["tuned 64", "hit 64"]
    (file,) = team.rglob("*.json")
    dist.barrier()
    if rank == 0:
        file.write_bytes(b"{")
    jobs = [of(machine) for machine in "bcd"]
    assert [(job.how, len(job.warned)) for job in jobs] == [
        ("hit 64", 0),
        ("tuned 64", rank == 0),
        ("hit 64", 0),
    ]
    assert rank or f"cache file file://{file} is not used" in jobs[1].warned[0]


@on_each_rank(cases=FACES)
def test_a_url_that_is_lost_costs_a_warning(rank: int, face: Face):
    """Between two jobs of a process: they tune, the first rank says so once, and the second job
    asks no more.
    """
    from fsspec.implementations.local import LocalFileSystem

    asked, url = list[str](), f"file://{folder()}/team"

    def refuse(self: Any, path: str, *args: Any, **options: Any) -> None:
        asked.append(path)
        raise ConnectionError("the endpoint is down")

    jobs = []
    with pytest.MonkeyPatch.context() as patch:
        for machine in "abc":
            jobs.append(Job(face, path=folder() / machine, settings={"CACHE_PATH": url}))
            patch.setattr(LocalFileSystem, "cat_file", refuse)
    assert [(job.how, len(job.warned)) for job in jobs] == [
        ("tuned 64", 0),
        ("tuned 64", rank == 0),
        ("tuned 64", 0),
    ]
    assert rank or f"records in {url} are not read any more by this process" in jobs[1].warned[0]
    assert len(asked) == 1


def test_records_lie_in_a_bucket_of_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What another machine has written since is found, though s3fs remembers listings; refused
    credentials cost a warning that says so.
    """
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    variables = {
        "ENDPOINT_URL": endpoint,
        "ACCESS_KEY_ID": "a",
        "SECRET_ACCESS_KEY": "b",
        "DEFAULT_REGION": "us-east-1",
    }
    for name, value in {**variables, "EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    S3FileSystem(skip_instance_cache=True).mkdir("bucket")

    def cache_of(machine: str) -> Cache:
        cache = Cache(tmp_path / machine)
        cache.remotes, cache.is_remote = [RemoteFolder("s3://bucket/records", 60.0)], True
        return cache

    try:
        here, there, key = cache_of("here"), cache_of("there"), record().cache_key
        for one in (record(key="[1]"), record()):
            assert here.find(key) is None
            there.store(one)
        assert here.find(key) == record()
        urllib.request.urlopen(
            urllib.request.Request(
                f"{endpoint}/moto-api/reset-auth", b"0", {"Content-Type": "text/plain"}
            )
        ).close()
        with pytest.warns(UserWarning, match="PermissionError"):
            assert cache_of("elsewhere").find(key) is None
    finally:
        server.stop()
