"""Ranks whose folders, code or kernels differ: a hit is a hit on all of them or on none, and all end with one config."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune.cache.records import record_bytes
from dist_tune.cache.store import Cache
from dist_tune.testing import values
from tests.ranks.jobs import (
    FACES,
    Face,
    Got,
    a_job,
    both_faces,
    edited,
    hit,
    is_tuned,
    job,
    own_records,
    play,
    records,
    rewrite,
    settings,
    summary,
)
from tests.ranks.kernels import accumulate_kernel, autotuned, best, configs, launch, tuned
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once

EMPTY = "/dev/null/cache"
"""A folder that is not there and cannot be made."""


# -- folders that differ -----------------------------------------------------------------------------------------------


@both_faces
def one_lacks(face: Face, rank: int, path: Path) -> Any:
    got = []
    for who in (0, 2):
        folder = own_records(face, rank, path / f"without {who}")
        if rank == who:
            shutil.rmtree(folder)
        got += [summary(a_job(face, folder)), [each.best.fields["BLOCK"] for each in records(folder)]]
    return got


@both_faces
def one_differs(face: Face, rank: int, path: Path) -> Any:
    return summary(a_job(face, own_records(face, rank, path, winner=64 if rank == 1 else 32)))


@both_faces
def first_lacks(face: Face, rank: int, path: Path) -> Any:
    folder = own_records(face, rank, path, winner=(16, 32, 64)[rank])
    done = a_job(face, EMPTY if rank == 0 else folder)
    return summary(done), done.warned


@both_faces
def one_is_damaged(face: Face, rank: int, path: Path) -> Any:
    got = []
    for name in ("cut", "schema"):
        folder = own_records(face, rank, path / name)
        (file,) = (entry.path for entry in Cache(folder).entries())
        if rank == 1:
            content = file.read_bytes()
            file.write_bytes(content[:-20] if name == "cut" else content.replace(b'"schema_version":3', b'"schema_version":2'))
        done = a_job(face, folder)
        got.append((summary(done), done.warned, len(records(folder))))
    return got


@both_faces
def all_lack(face: Face, rank: int, path: Path) -> Any:
    done = a_job(face, f"{EMPTY} of none")
    return is_tuned(done), done.warned


FOLDERS = [one_lacks, one_differs, first_lacks, one_is_damaged, all_lack]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Got:
    return play(3, tmp_path_factory.mktemp("folders"), FOLDERS)


@pytest.mark.parametrize("face", FACES)
def test_one_rank_without_a_record_gets_it_from_another(folders: Got, face: Face):
    """Also the first rank; and its folder has the record afterwards."""
    assert [got[face] for got in folders["one_lacks"]] == [[hit(32), [32]] * 2] * 3


@pytest.mark.parametrize("face", FACES)
def test_the_first_ranks_record_counts(folders: Got, face: Face):
    """Another rank has a record with another winner: no replay, and no two configs."""
    assert [got[face] for got in folders["one_differs"]] == [hit(32)] * 3


@pytest.mark.parametrize("face", FACES)
def test_the_first_record_counts_where_the_first_rank_has_none(folders: Got, face: Face):
    """The other two differ; the first rank, which cannot keep a record, says so."""
    got = [one[face] for one in folders["first_lacks"]]
    assert [done for done, _ in got] == [hit(32)] * 3
    assert [bool(warned) for _, warned in got] == [True, False, False]
    assert "is not kept" in got[0][1][-1]


@pytest.mark.parametrize("face", FACES)
def test_a_damaged_file_is_replaced_by_another_ranks_record(folders: Got, face: Face):
    """Cut short, or of another schema: a warning on that rank, a good file in its place, and a hit on all."""
    for rank, got in enumerate(folders["one_is_damaged"]):
        for done, warned, n_records in got[face]:
            assert (done, n_records) == (hit(32), 1)
            assert len(warned) == (1 if rank == 1 else 0)


@pytest.mark.parametrize("face", FACES)
def test_a_folder_that_cannot_be_written_costs_a_warning(folders: Got, face: Face):
    """On each rank, because no two share one; the tuning goes on."""
    for got in folders["all_lack"]:
        is_good, warned = got[face]
        assert is_good
        assert "is not kept and will be repeated" in warned[-1]


# -- what else may differ ----------------------------------------------------------------------------------------------


def captured(rank: int, path: Path) -> Any:
    def rank_work(x: torch.Tensor, *, BLOCK: int) -> torch.Tensor:
        return x + (1.0 if rank < 5 else 0.0)

    folder, got = path / "shared", list[Any]()

    def next_job() -> bool | None:
        return bool(a_job("function", folder, function=rank_work).is_hit)

    got.append(next_job())
    edited(rank, folder, winner=32)
    got += [len(records(folder)), next_job()]
    dist.barrier()
    if rank == 0:
        one = Cache(folder).entries()[0]
        one.path.write_bytes(record_bytes(one.record.model_copy(update={"winner": 2})))
    error = a_job("function", folder, {"REQUIRE_CACHE": "1"}, function=rank_work).error
    got.append(next_job())
    dist.barrier()
    if rank == 0:
        Cache(folder).entries()[1].path.unlink()
    got += [next_job(), next_job()]
    return got, error


def known_to_triton(rank: int, path: Path) -> Any:
    def step_of_one(kernel: Any) -> Any:
        total = torch.full((64,), 5.0)
        step = tuned(None, lambda x: launch(kernel, x, total))
        dist.barrier()
        step(torch.ones(64))
        return best(kernel), step.records[-1].is_recalled, total[0].item()

    def kernel() -> Any:
        return autotuned(accumulate_kernel, restore_value=["y_ptr"])

    step_of_one(kernel())
    edited(rank, path / "shared", winner=32)
    known = kernel()
    if rank == 1:
        known.cache[(64, "torch.float32", "torch.float32")] = known.configs[2]
    return step_of_one(known)


def met_late(rank: int, path: Path) -> Any:
    """A kernel that comes up in the fourth replay, and has a record that one rank must not use."""

    def step_of_two() -> Any:
        first, late, runs = autotuned(blocks=(16, 32, 64, 128)), autotuned(accumulate_kernel), []

        def closure(x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            y = launch(first, x)
            return launch(late, y, y.clone()) if len(runs) > 3 else y

        step = tuned(None, closure)
        step(torch.zeros(64))
        return {each.kernel.rpartition(".")[2]: each.is_recalled for each in step.records}, best(first), best(late)

    got = [step_of_two()]
    for variables in ({"ALWAYS_TUNE": str(int(rank == 1))}, {}):
        dist.barrier()
        with settings(path / "shared", **variables):
            got.append(step_of_two())
    return got


broken: list[int] = []


def hook(nargs: dict[str, Any]) -> None:
    if broken:
        raise ValueError("no longer")


def broken_winner(rank: int, path: Path) -> Any:
    def kernel() -> Any:
        return autotuned(configs=[*configs(16), *configs(32, pre_hook=hook), *configs(64)])

    folder = own_records("contextual", rank, path, kernel=kernel())
    (file,) = (entry.path for entry in Cache(folder).entries())
    content = file.read_bytes()
    if rank == 1:
        broken.append(1)
    one = a_job("contextual", folder, kernel=kernel())
    broken.append(1)
    file.write_bytes(content)
    everywhere = a_job("contextual", folder, kernel=kernel())
    broken.clear()
    return [(is_tuned(each), each.winner, each.record.candidates[1].failure) for each in (one, everywhere)]


def met_on_one_rank(rank: int, path: Path) -> Any:
    def step_of_one() -> Any:
        lonely = autotuned()
        step = tuned(None, lambda x: launch(lonely, x) if rank == 1 else x)
        step(torch.zeros(64))
        return [(each.kernel.rpartition(".")[2], each.best.config, each.is_recalled) for each in step.records], best(lonely)

    first = step_of_one()
    dist.barrier()
    return first, step_of_one(), len(records(path / "shared"))


OTHERWISE = [captured, known_to_triton, met_late, broken_winner, met_on_one_rank]


@pytest.fixture(scope="module")
def otherwise(tmp_path_factory: pytest.TempPathFactory) -> Got:
    return play(2, tmp_path_factory.mktemp("otherwise"), OTHERWISE)


def test_ranks_with_other_code_hit_if_each_has_a_record_of_the_same_winner(otherwise: Got):
    """An integer that the function captures is another one on each rank. Two winners, or one record that is gone: all tune, then hit."""
    (got, error), (other_got, other_error) = otherwise["captured"]
    assert got == other_got == [False, 2, True, False, False, True]
    assert error.kind == other_error.kind == "CacheMissError"
    assert "ranks have records that not all of them can use" in error.message


def test_a_record_counts_more_than_what_one_rank_had_tuned_alone(otherwise: Got):
    """Triton has a config for the kernel on one rank, and both have a record of another: a second run, of which the effect stays."""
    (one, is_hit, total), (other, other_is_hit, _) = otherwise["known_to_triton"]
    assert (one, other, is_hit, other_is_hit) == ([32], [32], True, True)
    assert total == 6.0


def test_a_site_met_late_hits_on_all_ranks_or_on_none(otherwise: Got):
    """It comes up in the middle of a race; where one rank shall always tune, both do. Where there is no race it does not come up."""
    one, other = otherwise["met_late"]
    assert one == other
    assert [hits for hits, *_ in one] == [
        {"add_kernel": False, "accumulate_kernel": False},
        {"add_kernel": False, "accumulate_kernel": False},
        {"add_kernel": True},
    ]


def test_a_record_whose_config_does_not_run_any_more_is_tuned_again(otherwise: Got):
    """It fails in the first run on one rank, or on all: all tune, without it."""
    one, other = otherwise["broken_winner"]
    assert one == other
    for is_good, winner, failure in one:
        assert is_good
        assert winner in (16, 64)
        assert "ValueError: no longer" in failure


def test_a_site_of_one_rank_is_recorded_on_all(otherwise: Got):
    """The other has the record, though nothing to use it for, also from the cache."""
    (first, again, n_records), (first_owned, again_owned, _) = otherwise["met_on_one_rank"]
    assert first[0] == first_owned[0]
    assert again[0] == again_owned[0]
    assert [is_recalled for _, _, is_recalled in again[0]] == [True]
    assert (again[1], again_owned[1] == first_owned[1], n_records) == ([], True, 1)


def _of_the_first_two(rank: int) -> Any:
    group = dist.new_group([0, 1])
    return job("contextual", group=group).is_hit if rank < 2 else None


def test_a_job_that_was_resized_hits_where_the_group_of_the_step_is_the_same(tmp_path: Path):
    """Two ranks of three tune; when the job is started again with two, they find it."""
    env = {"DIST_TUNE_CACHE_DIR": str(tmp_path)}
    assert [values(on_ranks(n, _of_the_first_two, env=env))[:2] for n in (3, 2)] == [[False, False], [True, True]]


@both_faces
def always(face: Face, rank: int, path: Path) -> Any:
    folder = own_records(face, rank, path)
    before = [each.tuned_at for each in records(folder)]
    on_all = is_tuned(a_job(face, folder, {"ALWAYS_TUNE": "1"}))
    on_one = is_tuned(a_job(face, folder, {"ALWAYS_TUNE": str(int(rank == 1))}))
    return on_all, on_one, len(records(folder)), [each.tuned_at for each in records(folder)] > before, a_job(face, folder).is_hit


@both_faces
def switched_off(face: Face, rank: int, path: Path) -> Any:
    folder = own_records(face, rank, path)
    before = records(folder)
    on_all = is_tuned(a_job(face, folder, cache=False)), records(folder) == before
    return on_all, (is_tuned(a_job(face, folder, cache=rank != 1)), records(folder) == before)


@both_faces
def required(face: Face, rank: int, path: Path) -> Any:
    """All fields of the key in turn: what a job is told that needs a record and finds one that differs there."""
    folder, must = path / str(rank), {"REQUIRE_CACHE": "1"}
    got = {}
    differing: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "source": ({"source": "0" * 16}, {}),
        "candidates": ({}, {"blocks": (16, 32)}),
        "key": ({}, {"n": 128}),
        "world_size": ({"environment": {"world_size": 9}}, {}),
        "device": ({"environment": {"device": "another GPU"}}, {}),
        "triton": ({"environment": {"triton": "1.0"}}, {}),
    }
    for field, (changes, options) in differing.items():
        own_records(face, rank, path)
        rewrite(folder, **changes)
        got[field] = a_job(face, folder, must, **options).error
        shutil.rmtree(folder)
    got["nothing"] = a_job(face, folder, must).error
    got["on one rank"] = a_job(face, folder, must if rank == 1 else {}).error
    got["always"] = a_job(face, folder, {**must, "ALWAYS_TUNE": "1"}).error
    got["off"] = a_job(face, folder, must, cache=False).error
    own_records(face, rank, path)
    if rank == 0:
        shutil.rmtree(folder)
    return got, summary(a_job(face, folder, must))


@both_faces
def versions(face: Face, rank: int, path: Path) -> Any:
    folder = own_records(face, rank, path)
    got = []
    for environment in ({"torch": "1.0"}, {"device": "another GPU"}):
        for check in "01":
            rewrite(folder, environment=environment)
            got.append(a_job(face, folder, {"VERSION_CHECK": check}).is_hit)
        shutil.rmtree(folder)
        own_records(face, rank, path)
    return got


SETTINGS = [always, switched_off, required, versions]


@pytest.fixture(scope="module")
def differing_settings(tmp_path_factory: pytest.TempPathFactory) -> Got:
    return play(3, tmp_path_factory.mktemp("settings"), SETTINGS)


@pytest.mark.parametrize("face", FACES)
def test_always_tune(differing_settings: Got, face: Face):
    """On all ranks or on one: all tune, the new record takes the old one's place, and the next job hits."""
    assert [got[face] for got in differing_settings["always"]] == [(True, True, 1, True, True)] * 3


@pytest.mark.parametrize("face", FACES)
def test_a_cache_that_is_switched_off(differing_settings: Got, face: Face):
    """On all ranks nothing is read or written; on one rank all tune, and the others keep what came of it."""
    got = [each[face] for each in differing_settings["switched_off"]]
    assert got == [((True, True), (True, rank == 1)) for rank in range(3)]


@pytest.mark.parametrize("face", FACES)
def test_a_miss_where_a_record_is_required_names_the_field(differing_settings: Got, face: Face):
    """On all ranks the same error, within the deadline; and nothing is tuned."""
    words = {
        "source": "source: the code of", "candidates": "candidates: the list of configs", "key": "in key: [128",
        "world_size": "in world_size: 3 here, 9 in the record", "device": "another GPU in the record", "triton": ", 1.0 in the record",
        "nothing": "There is no record of", "on one rank": "rank 1: There is no record of", "always": "ALWAYS_TUNE is set. ",
        "off": "It uses no cache. ",
    }  # fmt: skip
    by_rank = [got[face][0] for got in differing_settings["required"]]
    for field, word in words.items():
        for got in by_rank:
            assert got[field].kind == "CacheMissError", (field, got[field])
            assert word in got[field].message
            assert "DIST_TUNE_REQUIRE_CACHE is set: tune once without it" in got[field].message
            assert ".." not in got[field].message
        assert len({got[field].message for got in by_rank}) == 1


@pytest.mark.parametrize("face", FACES)
def test_one_record_is_enough_where_one_is_required(differing_settings: Got, face: Face):
    """The first rank has none: it gets that of another."""
    assert [got[face][1] for got in differing_settings["required"]] == [hit(32)] * 3


@pytest.mark.parametrize("face", FACES)
def test_other_software_may_be_overlooked_other_hardware_may_not(differing_settings: Got, face: Face):
    """DIST_TUNE_VERSION_CHECK=0, then 1: of other versions a hit and a miss, of another GPU a miss each time."""
    assert [got[face] for got in differing_settings["versions"]] == [[True, False, False, False]] * 3
