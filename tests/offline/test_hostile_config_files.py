"""Files of tuned configs that hold anything: a config, or the documented errors; never a wait, and never more than 64 MiB read."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.offline import load_config, save_configs_to_json

pytestmark = pytest.mark.once

NAME = "k.json"
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


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache"))


@given(CONTENTS, st.integers(-(2**70), 2**70))
def test_any_file_gives_a_config_or_a_value_error(content: bytes, size: int):
    """Whose message names the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / NAME
        path.write_bytes(content)
        try:
            config = load_config(path, size)
        except ValueError as error:
            message = str(error)
        else:
            assert isinstance(config, dict)
            return
    assert str(path) in message
    assert message.isprintable()
    assert len(message) < 2000


@given(CONTENTS)
def test_any_file_makes_room_for_new_configs(content: bytes):
    """One that is no JSON object is set aside; the new configs are there in any case."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / NAME
        path.write_bytes(content)
        save_configs_to_json(NAME, folder, {"any": {"i": 1}})
        assert json.loads(path.read_bytes())["any"] == {"i": 1}
        assert {each.name for each in Path(folder).iterdir()} <= {NAME, f"{NAME}.broken"}


def _put(kind: str, path: Path) -> None:
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "huge":
        path.touch()
        os.truncate(path, 2**34)


@pytest.mark.parametrize(("kind", "reason"), [("fifo", "not a regular file"), ("device", "not a regular file"), ("huge", "larger than")])
def test_what_is_no_file_is_not_read(tmp_path: Path, kind: str, reason: str):
    """A FIFO would wait for a writer, a device never ends. A new file takes its place, with a warning."""
    path = tmp_path / NAME
    _put(kind, path)
    with pytest.raises(ValueError, match=reason):
        load_config(path, 1)
    with pytest.warns(UserWarning, match=reason):
        save_configs_to_json(NAME, tmp_path, {"any": {"i": 1}})
    assert load_config(path, 1) == {"i": 1}
    assert os.path.lexists(tmp_path / f"{NAME}.broken")


def test_a_folder_in_its_place_is_an_error(tmp_path: Path):
    """It stays where it is."""
    (tmp_path / NAME / "inner").mkdir(parents=True)
    for call in (lambda: load_config(tmp_path / NAME, 1), lambda: save_configs_to_json(NAME, tmp_path, {"any": {}})):
        with pytest.raises(IsADirectoryError):
            call()
    assert (tmp_path / NAME / "inner").exists()


NAMES = ["", ".", "..", "a/b", "/etc/x", "../x", "a\0b", "x/", "\n", "x" * 5000]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str):
    """It is refused, or a file in the folder."""
    inside = tmp_path / "deep" / "configs"
    try:
        save_configs_to_json(name, inside, {"any": {}})
    except (ValueError, OSError):
        pass
    else:
        assert Path(inside / name).parent == inside
    found: list[Any] = [each for each in tmp_path.rglob("*") if each.is_file() and "cache" not in each.parts]
    assert all(each.parent == inside for each in found)
