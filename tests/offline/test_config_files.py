"""Files of tuned configs: what is written stays whole, which config is loaded for a size, and which
one a class of sizes gets.
"""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_tune.offline import (
    config_files,
    load_config,
    m_leq,
    save_configs_to_json,
    small_medium_large,
)
from dist_tune.offline.config_files import finalists, slowdowns
from dist_tune.offline.problem import Outcome

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


def test_classes_that_are_not_written_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A class takes the place of its namesake; the folder is made, and no other file is in it, also
    when a disk is full.
    """
    folder = tmp_path / "new" / "folder"
    save_configs_to_json(NAME, folder, {"small": {"BM": 16}, "any": {"BM": 32}})
    save_configs_to_json(NAME, str(folder), {"small": {"BM": 64}, "large": {"BM": 128}})
    for value in (float("nan"), float("-inf"), torch.bfloat16, {1}):
        with pytest.raises(ValueError, match="cannot be written as JSON"):
            save_configs_to_json(NAME, folder, {"small": {"BM": 32}, "any": {"BM": value}})

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        save_configs_to_json(NAME, folder, {"any": {"BM": 99}})
    assert there(folder) == {"small": {"BM": 64}, "any": {"BM": 32}, "large": {"BM": 128}}
    assert os.listdir(folder) == [NAME]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/etc/x", "../x", "x/", "\n", "x" * 5000], ids=ascii
)
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str):
    """It is refused, or a file in the folder."""
    inside = tmp_path / "deep" / "configs"
    with suppress(ValueError, OSError):
        save_configs_to_json(name, inside, {"any": {}})
    assert all(each.parent == inside for each in tmp_path.rglob("*") if each.is_file())
    assert not os.path.lexists("/etc/x")


@pytest.mark.parametrize(
    ("size", "names", "name"),
    [
        *[
            (size, ["small", "medium", "large", "any"], name)
            for size, name in ((1, "small"), (256, "small"), (257, "medium"))
        ],
        *[
            (size, ["small_M", "medium_M", "large_M", "any"], name)
            for size, name in ((2048, "medium_M"), (2049, "large_M"))
        ],
        (64, ["M_LEQ_64", "M_LEQ_256", "M_LEQ_1024", "any"], "M_LEQ_64"),
        (
            65,
            ["M_LEQ_64", "M_LEQ_256", "M_LEQ_1024", "any"],
            "M_LEQ_256",
        ),  # by number: 256 is before 1024
        (1025, ["M_LEQ_64", "M_LEQ_1024", "any"], "any"),
        (1025, ["M_LEQ_64", "M_LEQ_1024"], "M_LEQ_1024"),
        (4096, ["M_GEQ_512", "M_GEQ_4096", "M_GEQ_8192", "any"], "M_GEQ_4096"),
        (100, ["M_GEQ_512", "any"], "any"),
        (100, ["M_GEQ_64", "M_LEQ_128", "small"], "M_LEQ_128"),
        (100, ["M_GEQ_64", "small", "any"], "M_GEQ_64"),
        (100, ["M_LEQ_64", "small", "any"], "small"),
        (100, ["M_LEQ_64", "medium", "any"], "any"),
        (100, ["M_LEQ_64", "medium", "large"], "medium"),
        (300, ["small", "large"], "large"),
        (5000, ["small", "medium_M", "M_LEQ_64"], "medium_M"),
        (5000, ["small", "smaller", "M_LEQ_64"], "small"),
    ],
)
def test_the_first_class_that_fits_is_loaded(
    tmp_path: Path, size: int, names: list[str], name: str
):
    """LEQ, GEQ, the named class, any, the next larger named class, the next smaller one, the
    largest LEQ.
    """
    assert chosen(tmp_path, size, *names) == name


def test_sizes_have_the_classes_that_are_loaded(tmp_path: Path):
    """Limits must be positive and ascend; a file without a class that fits is an error, which says
    which ones there are.
    """
    assert [m_leq(64, 1024)(size) for size in (1, 64, 65, 1024, 1025)] == [
        "M_LEQ_64",
        "M_LEQ_64",
        "M_LEQ_1024",
        "M_LEQ_1024",
        "any",
    ]
    named = [small_medium_large("_M")(size) for size in (1, 256, 257, 2048, 2049)]
    assert named == ["small_M", "small_M", "medium_M", "medium_M", "large_M"]
    for limits in ((), (0, 1), (5, 5), (64, 32)):
        with pytest.raises(ValueError, match="ascending"):
            m_leq(*limits)
    for names in ([], ["M_GEQ_512"], ["M_LEQ_", "tiny", "M_LEQ_64x"]):
        with pytest.raises(ValueError, match="has no config for M=100") as caught:
            chosen(tmp_path, 100, *names)
        assert all(repr(name) in str(caught.value) for name in names)


@pytest.mark.parametrize("hip", [None, "7.0"], ids=["NVIDIA", "AMD"])
def test_options_of_amd_are_loaded_on_amd_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hip: str | None
):
    """They stay in the file, whichever device it is read on."""
    config = {"BM": 16, "waves_per_eu": 2, "num_warps": 4, "matrix_instr_nonkdim": 16, "kpack": 1}
    monkeypatch.setattr(torch.version, "hip", hip)
    save_configs_to_json(NAME, tmp_path, {"any": config})
    assert load_config(tmp_path / NAME, 1) == (config if hip else {"BM": 16, "num_warps": 4})
    assert there(tmp_path) == {"any": config}


def test_a_file_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A new file of the same length is read anew; what the caller changes in a config, nobody else
    finds. Without a file, an error.
    """
    with pytest.raises(FileNotFoundError):
        load_config(tmp_path / NAME, 1)
    save_configs_to_json(NAME, tmp_path, {"any": {"BM": 16}})
    load_config(tmp_path / NAME, 1)["BM"] = 99
    with monkeypatch.context() as patch:
        patch.delattr(config_files, "read_regular")
        assert load_config(tmp_path / NAME, 5000) == {"BM": 16}
    save_configs_to_json(NAME, tmp_path, {"any": {"BM": 32}})
    assert load_config(tmp_path / NAME, 1) == {"BM": 32}


CONTENTS: list[bytes | str] = [
    b"{",
    b"",
    b"[1]",
    b"\xff",
    b"\xef\xbb\xbf{}",
    b"[" * 3000,
    b'"\\ud800"',
    b'{"any": {"BM": NaN}}',
    b'{"any": {"i": ' + b"9" * 5000 + b"}}",
    "fifo",
    "device",
    "huge",
]


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: repr(content)[:20])
def test_a_file_that_is_none_is_an_error_to_read_and_is_kept_beside_the_new_one(
    tmp_path: Path, content: bytes | str
):
    """A warning at the caller's line names the copy.

    A FIFO would wait for a writer, a device never ends.
    """
    path = tmp_path / NAME
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "fifo":
        os.mkfifo(path)
    elif content == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 2**34)
    reason = {
        "fifo": "not a regular file",
        "device": "not a regular file",
        "huge": "larger than",
    }.get(str(content), "is no JSON object of")
    with pytest.raises(ValueError, match=reason) as told:
        load_config(path, 1)
    assert (
        str(path) in str(told.value),
        str(told.value).isprintable(),
        len(str(told.value)) < 2000,
    ) == (True, True, True)
    before = path.lstat()
    with pytest.warns(UserWarning, match=f"{reason}.*a new file takes its place") as caught:
        save_configs_to_json(NAME, tmp_path, {"any": {"BM": 16}})
    assert [each.filename for each in caught] == [__file__]
    (copy,) = (each for each in tmp_path.iterdir() if each != path)
    assert (there(tmp_path), str(caught[0].message).endswith(str(copy))) == (
        {"any": {"BM": 16}},
        True,
    )
    assert os.path.samestat(copy.lstat(), before)
    assert not isinstance(content, bytes) or copy.read_bytes() == content


FIELDS: dict[str, Any] = {
    "triton_version": "3.6.0",
    "large": {"B": 7},
    "metadata": {"by": ["a", None]},
    "large_M": 3,
    "any": {"B": 9},
    "notes": ["é", 0.5],
}


def test_what_is_no_config_stays_in_its_place(tmp_path: Path):
    """Fields of any kind, in their order, through several saves; no size gets one.

    A config that is written over one costs a copy.
    """
    (tmp_path / NAME).write_text(json.dumps(FIELDS))
    for config in ({"B": 1}, {"B": 2}):
        save_configs_to_json(NAME, tmp_path, {"small": config, "any": {"B": 8}})
    expected = FIELDS | {"any": {"B": 8}, "small": {"B": 2}}
    assert ([*there(tmp_path).items()], os.listdir(tmp_path)) == ([*expected.items()], [NAME])
    assert [load_config(tmp_path / NAME, size) for size in (16, 5000)] == [{"B": 2}, {"B": 7}]
    with pytest.warns(UserWarning, match="has no config in 'large_M': .*the old one is"):
        save_configs_to_json(NAME, tmp_path, {"large_M": {"B": 4}})
    assert [*there(tmp_path).items()] == [*(expected | {"large_M": {"B": 4}}).items()]
    (copy,) = (each for each in os.listdir(tmp_path) if each != NAME)
    assert json.loads((tmp_path / copy).read_text()) == expected
    (tmp_path / NAME).write_text(json.dumps({"any": 3, "metadata": {}}))
    with pytest.raises(ValueError, match="has no config for M=1"):
        load_config(tmp_path / NAME, 1)


def test_a_folder_in_its_place_is_an_error(tmp_path: Path):
    """It stays where it is."""
    (tmp_path / NAME / "inner").mkdir(parents=True)
    for call in (
        lambda: load_config(tmp_path / NAME, 1),
        lambda: save_configs_to_json(NAME, tmp_path, {"any": {}}),
    ):
        with pytest.raises(IsADirectoryError):
            call()
    assert (tmp_path / NAME / "inner").exists()


# -- one config for the sizes of a class -----------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "best", "slowdown"),
    [
        # Config 0 is the best at the last size, 1 has the least sum, 2 is worst by the sum and
        # loses least: 1.1 at both.
        ([[3.0, 2.0, 1.1, 1.0], [100.0, 100.5, 110.0, 150.0]], 2, 1.1),
        # By an arithmetic mean of slowdowns config 1 would be the best.
        ([[1.0, 2.1, 9.0, 9.0], [3.9, 2.1, 1.0, 9.0]], 0, 3.9**0.5),
        # Config 2 was not measured at the first size.
        ([[3.0, 1.0], [1.0, 2.0, 0.5]], 1, 2.0),
        ([[1.0, 1.0]], 0, 1.0),
    ],
)
def test_the_slowdown_over_sizes_is_a_geometric_mean(
    times: list[list[float]], best: int, slowdown: float
):
    """Against the best of each size, of configs that were measured at all; of equals the first."""
    known = slowdowns([dict(enumerate(row)) for row in times])
    assert min(known, key=known.__getitem__) == best
    assert known[best] == pytest.approx(slowdown)


@pytest.mark.parametrize(
    ("failed", "expected"), [([], [*range(8), 11]), ([0, 3], [1, 2, *range(4, 8), 11])]
)
def test_the_best_of_each_size_and_over_all_are_measured_once_more(
    failed: list[int], expected: list[int]
):
    """Of twelve the best eight over both sizes, and the winner of one; none that was dropped at
    some size.
    """
    first = {i: 1.0 + i for i in range(11)}
    found = [Outcome(0, {**first, 11: 1e6}, []), Outcome(11, {**first, 11: 0.5}, failed)]
    assert finalists(found) == expected
