"""Permissions of the cache directory: its owner's alone, or with the group where that is asked for."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dist_tune import autotune
from dist_tune.cache import QuarantinedConfig, quarantine
from dist_tune.cache.store import Cache
from dist_tune.cli.main import main
from dist_tune.files import PRIVATE, SHARED
from tests.cache_folders import warned
from tests.cached_records import record
from tests.function_options import BLOCKS, QUICK, quiet

pytestmark = pytest.mark.once


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(folder: Path) -> dict[str, set[str]]:
    """Modes of all files, and of all folders with this one."""
    paths = [folder, *folder.rglob("*")]
    return {kind: {f"{stat.S_IMODE(each.stat().st_mode):04o}" for each in paths if each.is_dir() == (kind == "folders")} for kind in
            ("folders", "files")}  # fmt: skip


MASKS = (0, 0o022, 0o077, 0o377)


@pytest.mark.parametrize("mask", MASKS)
def test_what_the_cache_makes_is_its_owners_alone(tmp_path: Path, mask: int):
    """Records, and folders above it that were missing."""
    with umask(mask):
        Cache(tmp_path / "made" / "cache").store(record())
    assert modes(tmp_path / "made") == {"folders": {"0700"}, "files": {"0600"}}


@pytest.mark.parametrize("mask", MASKS)
def test_a_shared_cache_is_the_groups_as_well(tmp_path: Path, mask: int):
    """And no other user's."""
    with umask(mask):
        Cache(tmp_path / "made" / "cache", is_shared=True).store(record())
    assert modes(tmp_path / "made") == {"folders": {"0770"}, "files": {"0660"}}


def test_the_group_of_a_shared_folder_is_handed_on(tmp_path: Path):
    """A set-group-ID bit of the folder is in those made in it."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o2770)
    path = Cache(tmp_path / "cache", is_shared=True).store(record())
    assert path is not None
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o2770


def test_an_export_follows_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As any file that is to be handed on."""
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    Cache(tmp_path / "cache").store(record())
    with umask(0o022):
        assert main(["cache", "export", str(tmp_path / "export.json")]) == 0
    assert stat.S_IMODE((tmp_path / "export.json").stat().st_mode) == 0o644


@pytest.mark.parametrize(
    ("mode", "is_shared", "is_told"),
    [(0o777, False, True), (0o770, False, True), (0o755, False, False), (0o770, True, False), (0o777, True, True)],
)
def test_a_folder_that_others_can_write_is_told_once(tmp_path: Path, mode: int, is_shared: bool, is_told: bool):
    """By the first store or find of this process, with its mode and the remedy. Its records count."""
    path = tmp_path / "cache"
    there = Cache(path)
    there.store(record())
    path.chmod(mode)
    with warned(*[f"{path} can be written by other users (mode {mode:04o})"] * is_told):
        for _ in range(2):
            cache = Cache(path, is_shared=is_shared)
            assert cache.find(record().cache_key) == record()
            cache.store(record(2))


def test_a_folder_of_another_user_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With both users; not where the cache is said to be shared."""
    cache = Cache(tmp_path / "cache")
    cache.store(record())
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with warned():
        assert Cache(cache.folder, is_shared=True).find(record().cache_key) == record()
    with warned(f"belongs to another user (uid {owner}, this process is uid {owner + 1})"):
        for _ in range(2):
            assert Cache(cache.folder).find(record().cache_key) == record()


@pytest.mark.parametrize(("shared", "folders", "files"), [("", "0700", "0600"), ("1", "0770", "0660")])
def test_a_tuning_makes_private_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: str, folders: str, files: str):
    """Also its journal, which is written before the first record; the log is its owner's in any case."""
    quiet(monkeypatch, tmp_path / "made")
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "made" / "cache"))
    monkeypatch.setenv("DIST_TUNE_CACHE_SHARED", shared)
    seen: list[dict[str, set[str]]] = []

    def step(x: int, block: int) -> int:
        seen.append(modes(tmp_path / "made" / "cache"))
        return x

    options = {**QUICK, "cache": True}
    with umask(0o022):
        autotune(BLOCKS, lambda x: x, **options)(step)(1)
    path = tmp_path / "made" / "cache" / "quarantine" / "x.jsonl"
    quarantine(path, QuarantinedConfig(kernel="f", key="k", config="c", rank=0, since=1.0), SHARED if shared else PRIVATE)
    assert all(each["folders"] == {folders} and each["files"] <= {files} for each in seen if each["files"])
    assert modes(tmp_path / "made" / "cache") == {"folders": {folders}, "files": {files}}
    assert modes(tmp_path / "made" / "logs") == {"folders": {"0700"}, "files": {"0600"}}
