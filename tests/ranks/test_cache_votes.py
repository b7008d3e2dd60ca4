"""Ranks whose folders, code or settings differ: a hit is a hit on all of them or on none, and all end with one config."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import files
from dist_tune.cache.records import record_bytes
from dist_tune.cache.store import Cache
from tests.ranks.jobs import FACES, Face, edited, folder, is_hit, is_tuned, job, own_records, records, rewrite
from tests.steps import accumulate_kernel, autotuned, best, configs, launch, names, tuned
from tests.worlds import on_each_rank

EMPTY = "/dev/null/cache"
"""A folder that is not there and cannot be made."""


def _change(one: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (file,) = (entry.path for entry in Cache(path).entries())
        file.write_bytes(one(file.read_bytes()))

    return damage


OTHER_SCHEMA = (b'"schema_version":3', b'"schema_version":2')
FOLDERS: dict[str, tuple[int, Any, tuple[int, ...], str]] = {
    "the first has none": (0, shutil.rmtree, (32, 32, 32), ""),
    "the last has none": (2, shutil.rmtree, (32, 32, 32), ""),
    "another winner": (1, None, (32, 64, 32), ""),
    "the first can have none, and others differ": (0, EMPTY, (16, 32, 64), "not kept"),
    "one is cut short": (1, _change(lambda content: content[:-20]), (32, 32, 32), "cache file"),
    "one of another schema": (1, _change(lambda content: content.replace(*OTHER_SCHEMA)), (32, 32, 32), "cache file"),
}
"""What differs -> on which rank, how it comes to that, the ranks' winners, and the warning of that rank."""


@on_each_rank(3, cases=[*product(FACES, FOLDERS)])
def test_one_config_for_all_ranks_where_folders_differ(rank: int, case: tuple[Face, str]):
    """The first record counts, without a replay, and all keep it; a rank that cannot, or whose own is damaged, says so."""
    face, (who, damage, winners, warning) = case[0], FOLDERS[case[1]]
    files._told.clear()  # of the other face: one folder is told once
    path: Any = own_records(face, rank, winner=winners[rank])
    if rank == who and damage == EMPTY:
        path = EMPTY
    elif rank == who and damage:
        damage(path)
    done = job(face, path)
    assert is_hit(done, 32)
    assert [warning in each for each in done.warned][-1:] == [True] * (rank == who and warning != "")
    assert path == EMPTY or [each.best.fields["BLOCK"] for each in records(path)] == [32]


# -- what else may differ ----------------------------------------------------------------------------------------------


@on_each_rank()
def test_ranks_with_other_code_hit_if_each_has_a_record_of_the_same_winner(rank: int):
    """An integer that the function captures is another one on each rank. Two winners, or one record that is gone: all tune, then hit."""

    def rank_work(x: torch.Tensor, *, BLOCK: int) -> torch.Tensor:
        return x + (1.0 if rank < 5 else 0.0)

    def next_job(**settings: str) -> Any:
        dist.barrier()
        return job("function", settings=settings, function=rank_work)

    assert not next_job().is_hit
    edited(rank, winner=32)
    assert len(records()) == 2
    assert next_job().is_hit
    dist.barrier()
    if rank == 0:
        one = Cache(folder()).entries()[0]
        one.path.write_bytes(record_bytes(one.record.model_copy(update={"winner": 2})))
    error = next_job(MODE="require").error
    assert error.kind == "CacheMissError"
    assert "ranks have records that not all of them can use" in error.message
    assert not next_job().is_hit
    dist.barrier()
    if rank == 0:
        Cache(folder()).entries()[1].path.unlink()
    assert [next_job().is_hit for _ in range(2)] == [False, True]


@on_each_rank()
def test_a_record_counts_more_than_what_one_rank_had_tuned_alone(rank: int):
    """Triton has a config for the kernel on one rank, and both have a record of another: a second run, of which the effect stays."""
    for n, kernel in enumerate(autotuned(accumulate_kernel, restore_value=["y_ptr"]) for _ in range(2)):
        if n == 1 and rank == 1:
            kernel.cache[(64, "torch.float32", "torch.float32")] = kernel.configs[2]
        total = torch.full((64,), 5.0)
        step = tuned(None, lambda x, kernel=kernel, total=total: launch(kernel, x, total))
        step(torch.ones(64))
        edited(rank, winner=32)
    assert (best(kernel), step.records[-1].is_recalled, total[0].item()) == ([32], True, 6.0)


@on_each_rank()
def test_a_site_met_late_hits_on_all_ranks_or_on_none(rank: int):
    """It comes up in the middle of a race; where one rank shall always tune, both do. Where there is no race it does not come up."""
    for always, hits in (("0", [False, False]), (str(int(rank == 1)), [False, False]), ("0", [True])):
        first, late, runs = autotuned(blocks=(16, 32, 64, 128)), autotuned(accumulate_kernel), list[int]()

        def closure(x: torch.Tensor, first: Any = first, late: Any = late, runs: list[int] = runs) -> torch.Tensor:
            runs.append(1)
            y = launch(first, x)
            return launch(late, y, y.clone()) if len(runs) > 3 else y

        dist.barrier()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DIST_TUNE_ALWAYS_TUNE", always)
            step = tuned(None, closure)
            step(torch.zeros(64))
        assert [each.is_recalled for each in step.records] == hits


broken: list[int] = []


def hook(nargs: dict[str, Any]) -> None:
    if broken:
        raise ValueError("no longer")


@on_each_rank(cases=["one rank", "all"])
def test_a_record_whose_config_does_not_run_any_more_is_tuned_again(rank: int, where: str):
    """It fails in the first run on one rank, or on all: all tune, without it."""

    def kernel() -> Any:
        return autotuned(configs=[*configs(16), *configs(32, pre_hook=hook), *configs(64)])

    path = own_records("contextual", rank, kernel=kernel())
    broken[:] = [1] * (where == "all" or rank == 1)
    done = job("contextual", path, kernel=kernel())
    broken.clear()
    assert is_tuned(done)
    assert done.winner != 32
    assert "ValueError: no longer" in str(done.record.candidates[1].failure)


@on_each_rank()
def test_a_site_of_one_rank_is_recorded_on_all(rank: int) -> Any:
    """The other has the record, though nothing to use it for, also from the cache."""
    told = []
    for is_recalled in (False, True):
        lonely = autotuned()
        step = tuned(None, lambda x, lonely=lonely: launch(lonely, x) if rank == 1 else x)
        step(torch.zeros(64))
        assert names(step) == [("add_kernel", is_recalled)]
        assert len(best(lonely)) == rank
        told.append(step.records[0].best.config)
        dist.barrier()
    assert len(records()) == 1
    return told


# -- settings ----------------------------------------------------------------------------------------------------------


@on_each_rank(cases=FACES)
def test_always_tune(rank: int, face: Face):
    """On all ranks or on one: all tune, the new record takes the old one's place, and the next job hits."""
    path = own_records(face, rank)
    (before,) = records(path)
    assert is_tuned(job(face, path, {"ALWAYS_TUNE": "1"}))
    assert is_tuned(job(face, path, {"ALWAYS_TUNE": str(int(rank == 1))}))
    (after,) = records(path)
    assert after.tuned_at > before.tuned_at
    assert job(face, path).is_hit


@on_each_rank(cases=FACES)
def test_a_cache_that_is_switched_off(rank: int, face: Face):
    """On all ranks nothing is read or written; on one rank all tune, and the others keep what came of it."""
    path = own_records(face, rank)
    before = records(path)
    assert is_tuned(job(face, path, cache=False))
    assert records(path) == before
    assert is_tuned(job(face, path, cache=rank != 1))
    assert (records(path) == before) == (rank == 1)


DIFFERING: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "source": ({"source": "0" * 16}, {}, "source: the code of"),
    "key": ({}, {"n": 128}, "in key: [128"),
    "world size": ({"environment": {"world_size": 9}}, {}, "in world_size: 2 here, 9 in the record"),
    "triton": ({"environment": {"triton": "1.0"}}, {}, ", 1.0 in the record"),
}
"""A field of the key -> changes of the record, options of the job, and words of the error."""


@on_each_rank(cases=FACES)
def test_a_miss_where_a_record_is_required_names_the_field(rank: int, face: Face) -> Any:
    """On all ranks the same error, also where one rank requires it; one record is enough for all."""
    must, path = {"MODE": "require"}, folder() / str(rank)
    errors = []
    for changes, options, words in DIFFERING.values():
        own_records(face, rank)
        rewrite(path, **changes)
        errors.append((words, job(face, path, must, **options).error))
        shutil.rmtree(path)
    errors += [
        ("There is no record of", job(face, path, must).error),
        ("rank 1: There is no record of", job(face, path, must if rank == 1 else {}).error),
        ("ALWAYS_TUNE is set. ", job(face, path, {**must, "ALWAYS_TUNE": "1"}).error),
        ("It uses no cache. ", job(face, path, must, cache=False).error),
    ]
    for words, error in errors:
        assert error.kind == "CacheMissError", (words, error)
        assert words in error.message
        assert "DIST_TUNE_MODE is require: tune once without it" in error.message
        assert ".." not in error.message
    own_records(face, rank)
    if rank == 0:
        shutil.rmtree(path)
    assert is_hit(job(face, path, must), 32)
    return [error.message for _, error in errors]
