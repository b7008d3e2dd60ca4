"""Files of tuned configs: what is written stays whole, and which config is loaded for a size."""

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_tune import safe_files
from dist_tune.offline import config_files
from dist_tune.offline.config_files import load_config, m_leq, save_configs_to_json, small_medium_large

pytestmark = pytest.mark.once

NAME = "GEMM.json"


def chosen(folder: Path, size: int, *names: str) -> str:
    """Which of these classes a size gets, wherever they stand in the file."""
    path = folder / "classes.json"
    found: set[str] = set()
    for order in (names, names[::-1]):
        path.write_text(json.dumps({name: {"name": name} for name in order}))
        os.utime(path, ns=(0, len(found)))
        found.add(load_config(path, size)["name"])
    (name,) = found
    return name


def there(folder: Path) -> Any:
    return json.loads((folder / NAME).read_bytes())


def test_classes_that_are_not_written_stay(tmp_path: Path):
    """A class takes the place of its namesake; the folder is made, and no other file is in it."""
    folder = tmp_path / "new" / "folder"
    save_configs_to_json(NAME, folder, {"small": {"BM": 16}, "any": {"BM": 32}})
    save_configs_to_json(NAME, str(folder), {"small": {"BM": 64}, "large": {"BM": 128}})
    assert there(folder) == {"small": {"BM": 64}, "any": {"BM": 32}, "large": {"BM": 128}}
    assert os.listdir(folder) == [NAME]


def _save_slowly(folder: Path, name: str, is_reading: Any) -> None:
    def configs_there(path: Path) -> dict[str, Any]:
        configs = present(path)
        is_reading.set()
        time.sleep(0.05)  # between reading and writing, where another writer's classes would be lost
        return configs

    present, config_files.configs_there = config_files.configs_there, configs_there
    save_configs_to_json(NAME, folder, {name: {}})


@pytest.mark.processes
def test_two_processes_that_write_one_file_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also where one of them knows the folder by another name; the lock is in the cache directory."""
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "configs").mkdir()
    (tmp_path / "linked").symlink_to("configs")
    fork = multiprocessing.get_context("fork")
    is_reading = fork.Event()
    first = fork.Process(target=_save_slowly, args=(tmp_path / "configs", "small", is_reading))
    first.start()
    assert is_reading.wait(60)
    save_configs_to_json(NAME, tmp_path / "linked", {"large": {}})
    first.join(60)
    assert there(tmp_path / "configs") == {"small": {}, "large": {}}
    assert os.listdir(tmp_path / "configs") == [NAME]
    assert [path.suffix for path in (tmp_path / "cache" / "locks").iterdir()] in ([], [".lock"])


@pytest.mark.parametrize("cache", ["file/cache", "file", "~nobody/cache"])
def test_no_cache_directory_is_no_reason_not_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str):
    """Nor one that cannot be made: the lock is done without."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", cache)
    save_configs_to_json(NAME, tmp_path / "configs", {"any": {}})
    assert there(tmp_path / "configs") == {"any": {}}
    assert sorted(os.listdir(tmp_path)) == ["configs", "file"]


def test_a_file_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The disk is full when the new one is written: the old one is whole."""
    save_configs_to_json(NAME, tmp_path, {"any": {"BM": 16}})

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space"):
            save_configs_to_json(NAME, tmp_path, {"any": {"BM": 99}})
    assert there(tmp_path) == {"any": {"BM": 16}}


@pytest.mark.parametrize("content", ["{", "", "[1]", "null", "\udcff"], ids=["torn", "empty", "list", "null", "no text"])
def test_a_broken_file_is_set_aside(tmp_path: Path, content: str):
    """With a warning at the caller's line; what it held is kept beside the new one."""
    (tmp_path / NAME).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.warns(UserWarning, match=r"GEMM.json\.broken") as caught:
        save_configs_to_json(NAME, tmp_path, {"any": {"BM": 16}})
    assert caught[0].filename == __file__
    assert there(tmp_path) == {"any": {"BM": 16}}
    assert (tmp_path / f"{NAME}.broken").read_bytes() == content.encode(errors="surrogateescape")


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), torch.bfloat16, {1}])
def test_what_json_cannot_hold_is_refused(tmp_path: Path, value: object):
    """And the file is as it was."""
    save_configs_to_json(NAME, tmp_path, {"any": {"BM": 16}})
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        save_configs_to_json(NAME, tmp_path, {"small": {"BM": 32}, "any": {"BM": value}})
    assert there(tmp_path) == {"any": {"BM": 16}}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b.json", "/b.json", "../b.json", "b/"])
def test_a_file_name_is_no_path(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match="need the name of a file"):
        save_configs_to_json(name, tmp_path / "folder", {"any": {}})
    assert not (tmp_path / "b.json").exists()


@pytest.mark.parametrize("suffix", ["", "_M"])
@pytest.mark.parametrize(("size", "name"), [(1, "small"), (256, "small"), (257, "medium"), (2048, "medium"), (2049, "large")])
def test_a_size_gets_its_own_class(tmp_path: Path, size: int, name: str, suffix: str):
    """Up to 256 small, up to 2048 medium; as they are written, so they are loaded, although there is any."""
    assert small_medium_large(suffix)(size) == name + suffix
    assert chosen(tmp_path, size, "small" + suffix, "medium" + suffix, "large" + suffix, "any") == name + suffix


@pytest.mark.parametrize(
    ("size", "names", "name"),
    [
        (64, ["M_LEQ_64", "M_LEQ_256", "M_LEQ_1024", "any"], "M_LEQ_64"),
        (65, ["M_LEQ_64", "M_LEQ_256", "M_LEQ_1024", "any"], "M_LEQ_256"),  # by number: 256 is before 1024
        (1025, ["M_LEQ_64", "M_LEQ_1024", "any"], "any"),
        (1025, ["M_LEQ_64", "M_LEQ_1024"], "M_LEQ_1024"),
        (4096, ["M_GEQ_512", "M_GEQ_4096", "M_GEQ_8192", "any"], "M_GEQ_4096"),
        (100, ["M_GEQ_512", "any"], "any"),
        (100, ["M_GEQ_64", "M_LEQ_128", "small"], "M_LEQ_128"),
        (100, ["M_GEQ_64", "small", "any"], "M_GEQ_64"),
        (100, ["M_LEQ_64", "small", "any"], "small"),
        (100, ["M_LEQ_64", "medium", "any"], "any"),
        (100, ["M_LEQ_64", "medium", "large"], "medium"),
        (100, ["M_LEQ_64", "large_M"], "large_M"),
        (300, ["small", "large"], "large"),
        (5000, ["small", "medium_M", "M_LEQ_64"], "medium_M"),
        (5000, ["small", "smaller", "M_LEQ_64"], "small"),
    ],
)
def test_the_first_class_that_fits_is_loaded(tmp_path: Path, size: int, names: list[str], name: str):
    """LEQ, GEQ, the named class, any, the next larger named class, the next smaller one, the largest LEQ."""
    assert chosen(tmp_path, size, *names) == name


@pytest.mark.parametrize("names", [[], ["M_GEQ_512"], ["M_LEQ_", "tiny", "M_LEQ_64x"]])
def test_a_file_without_a_class_that_fits_is_an_error(tmp_path: Path, names: list[str]):
    """It says which classes there are."""
    with pytest.raises(ValueError, match="has no config for M=100") as caught:
        chosen(tmp_path, 100, *names)
    assert all(repr(name) in str(caught.value) for name in names)


def test_limits_name_classes_that_are_loaded():
    """The classes that m_leq names; limits must be positive and ascend."""
    assert [m_leq(64, 1024)(size) for size in (1, 64, 65, 1024, 1025)] == ["M_LEQ_64", "M_LEQ_64", "M_LEQ_1024", "M_LEQ_1024", "any"]
    for limits in ((), (0, 1), (5, 5), (64, 32)):
        with pytest.raises(ValueError, match="ascending"):
            m_leq(*limits)


@pytest.mark.parametrize("hip", [None, "7.0"], ids=["NVIDIA", "AMD"])
def test_options_of_amd_are_loaded_on_amd_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hip: str | None):
    """They stay in the file, whichever device it is read on."""
    config = {"BM": 16, "waves_per_eu": 2, "num_warps": 4, "matrix_instr_nonkdim": 16, "kpack": 1}
    monkeypatch.setattr(torch.version, "hip", hip)
    save_configs_to_json(NAME, tmp_path, {"any": config})
    assert load_config(tmp_path / NAME, 1) == (config if hip else {"BM": 16, "num_warps": 4})
    assert there(tmp_path) == {"any": config}


@pytest.mark.parametrize("hip", [None, "7.0"], ids=["NVIDIA", "AMD"])
def test_a_loaded_config_is_the_callers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hip: str | None):
    """What the caller changes in it, nobody else finds."""
    monkeypatch.setattr(torch.version, "hip", hip)
    save_configs_to_json(NAME, tmp_path, {"any": {"BM": 16}})
    load_config(tmp_path / NAME, 1)["BM"] = 99
    assert load_config(tmp_path / NAME, 1) == {"BM": 16}


def test_a_file_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A new file of the same length is read anew."""
    save_configs_to_json(NAME, tmp_path, {"any": {"BM": 16}})
    reads: list[str] = []
    read_regular = safe_files.read_regular

    def read(path: str) -> bytes:
        reads.append(path)
        return read_regular(path)

    monkeypatch.setattr(config_files, "read_regular", read)
    assert [load_config(tmp_path / NAME, size)["BM"] for size in (1, 5000)] == [16, 16]
    assert len(reads) == 1
    save_configs_to_json(NAME, tmp_path, {"any": {"BM": 32}})
    assert load_config(tmp_path / NAME, 1) == {"BM": 32}


def test_a_missing_or_broken_file_is_an_error(tmp_path: Path):
    """A reader sets nothing aside."""
    with pytest.raises(FileNotFoundError):
        load_config(tmp_path / NAME, 1)
    for content in ("{", "[]", '{"any": 3}'):
        (tmp_path / NAME).write_text(content)
        with pytest.raises(ValueError, match="is no JSON"):
            load_config(tmp_path / NAME, 1)
    assert os.listdir(tmp_path) == [NAME]
