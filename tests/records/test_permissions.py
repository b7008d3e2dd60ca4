"""Permissions of the cache directory: its owner's alone, or with the group where that is asked
for.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dist_tune import autotune
from dist_tune.cli.main import main
from dist_tune.files import PRIVATE, SHARED
from dist_tune.records import QuarantinedConfig, quarantine
from dist_tune.records.store import Cache
from tests.cached_records import record
from tests.steps import BLOCKS, QUICK, quiet


@pytest.fixture(autouse=True, params=[0, 0o022, 0o377], ids=oct)
def mask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> tuple[set[str], set[str]]:
    """Modes of all folders with this one, and of all files."""
    found = [
        (each.is_dir(), f"{stat.S_IMODE(each.stat().st_mode):04o}")
        for each in (folder, *folder.rglob("*"))
    ]
    return {mode for is_folder, mode in found if is_folder}, {
        mode for is_folder, mode in found if not is_folder
    }


def test_the_group_of_a_shared_folder_is_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: int
):
    """A set-group-ID bit of the folder is in those made in it.

    An export, which is to be handed on, follows the umask as any file.
    """
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o2770)
    Cache(tmp_path / "cache", is_shared=True).store(record())
    assert modes(tmp_path / "cache") == ({"2770"}, {"0660"})
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    assert main(["cache", "export", str(tmp_path / "export.json")]) == 0
    assert modes(tmp_path / "export.json") == (set(), {f"{0o666 & ~mask:04o}"})


@pytest.mark.parametrize(
    ("shared", "folders", "files"), [("", "0700", "0600"), ("1", "0770", "0660")]
)
def test_a_tuning_makes_private_files_or_the_groups_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: str, folders: str, files: str
):
    """Under any umask; also its journal, which is written before the first record; the log is its
    owner's in any case.
    """
    quiet(monkeypatch, tmp_path / "made")
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "made" / "cache"))
    monkeypatch.setenv("DIST_TUNE_CACHE_SHARED", shared)
    seen: list[tuple[set[str], set[str]]] = []

    def step(x: int, block: int) -> int:
        seen.append(modes(tmp_path / "made" / "cache"))
        return x

    autotune(BLOCKS, lambda x: x, **{**QUICK, "cache": True})(step)(1)
    path = tmp_path / "made" / "cache" / "quarantine" / "x.jsonl"
    quarantine(
        path,
        QuarantinedConfig(kernel="f", key="k", config="c", rank=0, since=1.0),
        SHARED if shared else PRIVATE,
    )
    assert {(*made[0], *made[1]) for made in seen if made[1]} == {(folders, files)}
    assert modes(tmp_path / "made" / "cache") == ({folders}, {files})
    assert modes(tmp_path / "made" / "logs") == ({"0700"}, {"0600"})
