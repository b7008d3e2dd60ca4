"""Ranks whose settings of the cache differ, or which all need a record: one rule for all, and one config."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.jobs import FACES, Face, Got, a_job, both_faces, hit, is_tuned, own_records, play, records, rewrite, summary

pytestmark = pytest.mark.once


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
