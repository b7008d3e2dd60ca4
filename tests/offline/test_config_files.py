"""Files of tuned configs: what is written stays whole, and which config is loaded for a size."""

import json
import os
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize("content", [b"{", b"", b"[1]", b"null", b"\xff", b'{"any": 3}', b'{"any": {"BM": NaN}}'])
def test_a_broken_file_is_a_warning_and_is_replaced(tmp_path: Path, content: bytes):
    """At the caller's line. A reader gets an error, and leaves it."""
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{NAME} is no JSON object of configs"):
        load_config(tmp_path / NAME, 1)
    with pytest.warns(UserWarning, match="a new file takes its place") as caught:
        save_configs_to_json(NAME, tmp_path, {"any": {"BM": 16}})
    assert [each.filename for each in caught] == [__file__]
    assert (there(tmp_path), os.listdir(tmp_path)) == ({"any": {"BM": 16}}, [NAME])


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), torch.bfloat16, {1}])
def test_what_json_cannot_hold_is_refused(tmp_path: Path, value: object):
    """And the file is as it was."""
    save_configs_to_json(NAME, tmp_path, {"any": {"BM": 16}})
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        save_configs_to_json(NAME, tmp_path, {"small": {"BM": 32}, "any": {"BM": value}})
    assert there(tmp_path) == {"any": {"BM": 16}}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/x", "../x", "x/", "\n", "x" * 5000], ids=ascii)
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str):
    """It is refused, or a file in the folder."""
    inside = tmp_path / "deep" / "configs"
    with suppress(ValueError, OSError):
        save_configs_to_json(name, inside, {"any": {}})
    assert all(each.parent == inside for each in tmp_path.rglob("*") if each.is_file())
    assert not os.path.lexists("/etc/x")


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


def test_a_file_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A new file of the same length is read anew; what the caller changes in a config, nobody else finds."""
    save_configs_to_json(NAME, tmp_path, {"any": {"BM": 16}})
    reads: list[str] = []
    read_regular = safe_files.read_regular

    def read(path: str) -> bytes:
        reads.append(path)
        return read_regular(path)

    monkeypatch.setattr(config_files, "read_regular", read)
    load_config(tmp_path / NAME, 1)["BM"] = 99
    assert (load_config(tmp_path / NAME, 5000), len(reads)) == ({"BM": 16}, 1)
    save_configs_to_json(NAME, tmp_path, {"any": {"BM": 32}})
    assert load_config(tmp_path / NAME, 1) == {"BM": 32}


def test_a_missing_file_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        load_config(tmp_path / NAME, 1)


# -- files that hold anything ------------------------------------------------------------------------------------------

CLASSES = st.sampled_from(
    ["small", "large_M", "any", "M_LEQ_64", "M_GEQ_1", "M_LEQ_" + "9" * 5000, "M_LEQ_٣", "small_", "M_LEQ_-1"]
) | st.text(max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
CONFIGS = st.dictionaries(CLASSES, st.dictionaries(st.text(max_size=5), VALUES, max_size=3), max_size=5)
CONTENTS = (
    st.binary(max_size=200)
    | (CONFIGS | VALUES).map(lambda value: json.dumps(value).encode())
    | st.sampled_from([b"[" * 3000, b'{"any": ' * 3000, b'{"any": {"i": ' + b"9" * 5000 + b"}}", b"\xef\xbb\xbf{}", b'"\\ud800"'])
)


@given(CONTENTS, st.integers(-(2**70), 2**70))
def test_any_file_gives_a_config_or_an_error_that_names_it_and_makes_room(content: bytes, size: int):
    """New configs are there in any case."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / NAME
        path.write_bytes(content)
        try:
            assert isinstance(load_config(path, size), dict)
        except ValueError as error:
            message = str(error)
            assert (str(path) in message, message.isprintable(), len(message) < 2000) == (True, True, True)
        save_configs_to_json(NAME, folder, {"any": {"i": 1}})
        assert there(Path(folder))["any"] == {"i": 1}
        assert os.listdir(folder) == [NAME]


@pytest.mark.parametrize(("kind", "reason"), [("fifo", "not a regular file"), ("device", "not a regular file"), ("huge", "larger than")])
def test_what_is_no_file_is_not_read(tmp_path: Path, kind: str, reason: str):
    """A FIFO would wait for a writer, a device never ends. A new file takes its place, with a warning."""
    path = tmp_path / NAME
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 2**34)
    with pytest.raises(ValueError, match=reason):
        load_config(path, 1)
    with pytest.warns(UserWarning, match=reason):
        save_configs_to_json(NAME, tmp_path, {"any": {"i": 1}})
    assert load_config(path, 1) == {"i": 1}


def test_a_folder_in_its_place_is_an_error(tmp_path: Path):
    """It stays where it is."""
    (tmp_path / NAME / "inner").mkdir(parents=True)
    for call in (lambda: load_config(tmp_path / NAME, 1), lambda: save_configs_to_json(NAME, tmp_path, {"any": {}})):
        with pytest.raises(IsADirectoryError):
            call()
    assert (tmp_path / NAME / "inner").exists()
