"""A disk that is full, at any point of a tuning script: it ends with its results, and a warning says what was not written."""

from __future__ import annotations

import builtins
import json
import resource
import warnings
from pathlib import Path
from typing import Any

import pytest

from dist_tune.offline import ConfigFile, tune_and_save_configs, tune_files
from dist_tune.testing import on_ranks, values

pytestmark = pytest.mark.once

SPACE = [{"i": i} for i in range(3)]


def _count(size: int, folder: str) -> Any:
    def make(config: dict[str, Any]) -> Any:
        (Path(folder) / f"made-{size}-{config['i']}").touch()
        return (lambda: None), None

    return make


def _tuned(folder: str, mode: Any = None) -> tuple[list[str], list[str], list[str]]:
    """Classes, names of the small one's config, and warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        configs = tune_and_save_configs([8, 5000], lambda size: _count(size, folder), SPACE, "k.json", folder, mode=mode, num_iters=1)
    return sorted(configs), sorted(configs["small"]), [str(each.message) for each in caught]


def _on_a_full_disk(rank: int, folder: str, mode: Any) -> Any:
    """All that is written goes to a device that is full."""
    builtins_open = builtins.open

    def full(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "r" in mode or isinstance(file, int):
            return builtins_open(file, mode, *args, **kwargs)
        return builtins_open("/dev/full", mode.replace("x", "w"), *args, **{**kwargs, "opener": None})

    builtins.open = full
    try:
        return _tuned(folder, mode)
    finally:
        builtins.open = builtins_open


@pytest.mark.parametrize("mode", ["split", "merge"])
def test_a_full_disk_ends_no_job(tmp_path: Path, mode: str):
    """Each rank has the configs; one has said that the file is not written, with the configs, and each that it keeps no log."""
    got = values(on_ranks(2, _on_a_full_disk, str(tmp_path), mode))
    assert [each[:2] for each in got] == [(["large", "small"], ["i"])] * 2
    assert not (tmp_path / "k.json").exists()
    (told,) = [text for *_, texts in got for text in texts if "k.json is not written: No space left on device" in text]
    assert '"small": {"i": ' in told
    assert ["keeps no log" in " ".join(texts) for *_, texts in got] == [True, True]


@pytest.mark.parametrize("limit", [0, 20, 300])
def test_a_size_limit_ends_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int):
    """Of one process, wherever in a line of the log, the journal or the result it comes."""
    monkeypatch.setenv("DIST_TUNE_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("DIST_TUNE_VERBOSITY", "quiet")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        classes, names, told = _tuned(str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (classes, names) == (["large", "small"], ["i"])
    assert any("k.json is not written" in text for text in told) == (not (tmp_path / "k.json").exists())


def _full_when_saving(rank: int, folder: str, mode: Any, is_full: bool) -> Any:
    def refused(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if is_full:
            patch.setattr("dist_tune.offline.config_files.write_whole", refused)
        file = ConfigFile("k.json", [8], lambda size: _count(size, folder), SPACE)
        (settled,) = tune_files([file], folder, mode=mode, num_iters=1)
    return settled.is_saved, settled.error


@pytest.mark.parametrize("mode", ["split", "merge"])
def test_what_was_not_saved_is_not_measured_again(tmp_path: Path, mode: str):
    """The records stay, and the next attempt writes the file."""
    env = {"DIST_TUNE_CACHE_DIR": str(tmp_path / "cache")}
    assert values(on_ranks(2, _full_when_saving, str(tmp_path), mode, True, env=env)) == [(False, "No space left on device")] * 2
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 1
    for each in tmp_path.glob("made-*"):
        each.unlink()
    assert values(on_ranks(2, _full_when_saving, str(tmp_path), mode, False, env=env)) == [(True, "")] * 2
    assert json.loads((tmp_path / "k.json").read_text())["small"]["i"] in (0, 1, 2)
    assert len(list(tmp_path.glob("made-*"))) == 1, "the winner alone is made again, to be checked"
    assert not list((tmp_path / "cache").rglob("*.json"))
