"""Packs: records that a folder or an installed package brings, found by jobs that never write
there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from dist_tune.cli import main
from dist_tune.records import Cache
from dist_tune.settings import Settings
from dist_tune.testing import on_ranks, values
from tests.cached_records import environment, record
from tests.records.hit_program import first_call
from tests.records.test_store import kept, warned

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "h200-records"
version = "1"

[tool.hatch.build.targets.wheel]
packages = ["h200_records"]
"""


def named(monkeypatch: pytest.MonkeyPatch, path: str, own: Path | str) -> Cache:
    """The cache of these variables."""
    monkeypatch.setenv("DIST_TUNE_CACHE_PATH", path)
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(own))
    return Cache.of(Settings())


def installed(folder: Path) -> Path:
    """A folder of packages with one that has a record, and says when it is imported."""
    (folder / "pack_of_one").mkdir(parents=True)
    (folder / "pack_of_one/__init__.py").write_text(
        "raise ImportError('records are read, and nothing is executed')"
    )
    kept(Cache(folder / "pack_of_one/h200"), record())
    return folder


def files(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


def test_a_package_is_a_folder_that_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In any place of the variable, without importing it; what is kept goes into
    DIST_TUNE_CACHE_DIR, also if the package stands first.
    """
    monkeypatch.syspath_prepend(str(installed(tmp_path / "site")))
    before = files(tmp_path / "site")
    for path in (
        "package://pack_of_one/h200",
        f"{tmp_path / 'own'}:package://pack_of_one/h200:/nowhere",
    ):
        cache = named(monkeypatch, path, tmp_path / "own")
        assert (cache.folder, cache.find(record().cache_key)) == (tmp_path / "own", record())
        assert kept(cache, record(key="[1]")).is_relative_to(tmp_path / "own")
    assert (
        named(monkeypatch, "", "package://pack_of_one/h200").folder
        == Path("~/.dist_tune/autotune").expanduser()
    )
    assert (files(tmp_path / "site"), "pack_of_one" in sys.modules) == (before, False)


@pytest.mark.parametrize("name", ["no_such_pack", "no-pack", "sys", "a.b"])
def test_a_package_that_is_not_there_is_left_out_with_a_warning(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Which says what to do; folders beside it count."""
    kept(Cache(tmp_path / "shared"), record())
    with warned(
        f"package://{name} in DIST_TUNE_CACHE_PATH is left out: no package {name} is installed"
        " here. Install it"
    ):
        cache = named(monkeypatch, f"package://{name}:{tmp_path / 'shared'}", tmp_path / "own")
        assert (
            named(monkeypatch, f"package://{name}:{tmp_path / 'shared'}", tmp_path / "own").folders
            == cache.folders
        )
    assert cache.find(record().cache_key) == record()


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("package://", "it names no package"),
        ("package://pack_of_one/h300", "package pack_of_one has no folder h300"),
    ],
)
def test_an_entry_that_names_nothing_there_is_left_out_with_a_warning(
    entry: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With the entry; folders beside it count."""
    monkeypatch.syspath_prepend(str(installed(tmp_path / "site")))
    with warned(f"{entry} in DIST_TUNE_CACHE_PATH is left out: {told}"):
        assert named(monkeypatch, f"{tmp_path}:{entry}", tmp_path / "own").folders == [tmp_path]


def test_a_pack_holds_the_records_of_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Readable for those that the umask allows; a second export adds to it; a path without the
    slash is a file, and no folder.
    """
    cache = named(monkeypatch, "", tmp_path / "own")
    for each in (
        record(),
        record(key="[1]"),
        record(environment=environment(device="NVIDIA H100")),
    ):
        kept(cache, each)
    before, pack = os.umask(0o027), tmp_path / "pack"
    try:
        assert main(["cache", "export", f"{pack}/", "--device", "h200", "--name", "gemm"]) == 0
    finally:
        os.umask(before)
    assert {
        (each.record.key, each.record.environment.device) for each in Cache(pack).entries()
    } == {(key, "NVIDIA H200") for key in ("[1]", record().key)}
    assert {path.stat().st_mode & 0o777 for path in pack.rglob("*")} == {0o640, 0o750}
    assert main(["cache", "export", f"{pack}/"]) == 0
    assert len(Cache(pack).entries()) == 3
    for words in ([str(pack)], [f"{pack}/", "--device", "MI300"], ["/dev/null/pack/"]):
        assert main(["cache", "export", *words]) == 1


def hit_from(rank: int, site: str) -> dict[str, Any]:
    sys.path.insert(0, site)
    return first_call(rank)


@pytest.mark.processes
def test_a_wheel_of_records_is_found_on_all_ranks_and_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Tuned on two ranks, exported into a package, built, installed elsewhere: another job of two
    ranks hits, and changes nothing there.
    """
    env = {
        "DIST_TUNE_CACHE_DIR": str(tmp_path / "tuned"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    values(on_ranks(2, first_call, env=env))
    named(monkeypatch, "", tmp_path / "tuned")
    project, site = tmp_path / "project", tmp_path / "site"
    assert main(["cache", "export", f"{project}/h200_records/"]) == 0
    (project / "pyproject.toml").write_text(PROJECT)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel"],
        cwd=project,
        check=True,
        capture_output=True,
        timeout=60,
    )
    (path,) = (project / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(site)  # as pip does
    before = files(site)
    assert sum(name.endswith(".json") for name in before) == 2
    env |= {
        "DIST_TUNE_CACHE_DIR": str(tmp_path / "own"),
        "DIST_TUNE_CACHE_PATH": "package://h200_records",
    }
    outcomes = values(on_ranks(2, hit_from, str(site), env=env))
    assert [each["hits"] for each in outcomes] == [[True, True]] * 2
    assert (files(site), files(tmp_path / "own")) == (before, {})
