"""Files of tuned configs: what is written stays whole, which config is loaded for a size, and which one a class of sizes gets."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_tune.offline import ConfigFile, Failed, Outcome, Settled, files, load_config, m_leq, save_configs_to_json, small_medium_large
from dist_tune.offline.files import SizeClass, classes_of, slowdowns
from dist_tune.offline.problem import Ended

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


def test_classes_that_are_not_written_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A class takes the place of its namesake; the folder is made, and no other file is in it, also when a disk is full."""
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


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/x", "../x", "x/", "\n", "x" * 5000], ids=ascii)
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
        *[(size, ["small", "medium", "large", "any"], name) for size, name in ((1, "small"), (256, "small"), (257, "medium"))],
        *[(size, ["small_M", "medium_M", "large_M", "any"], name) for size, name in ((2048, "medium_M"), (2049, "large_M"))],
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
        (300, ["small", "large"], "large"),
        (5000, ["small", "medium_M", "M_LEQ_64"], "medium_M"),
        (5000, ["small", "smaller", "M_LEQ_64"], "small"),
    ],
)
def test_the_first_class_that_fits_is_loaded(tmp_path: Path, size: int, names: list[str], name: str):
    """LEQ, GEQ, the named class, any, the next larger named class, the next smaller one, the largest LEQ."""
    assert chosen(tmp_path, size, *names) == name


def test_sizes_have_the_classes_that_are_loaded(tmp_path: Path):
    """Limits must be positive and ascend; a file without a class that fits is an error, which says which ones there are."""
    assert [m_leq(64, 1024)(size) for size in (1, 64, 65, 1024, 1025)] == ["M_LEQ_64", "M_LEQ_64", "M_LEQ_1024", "M_LEQ_1024", "any"]
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
def test_options_of_amd_are_loaded_on_amd_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hip: str | None):
    """They stay in the file, whichever device it is read on."""
    config = {"BM": 16, "waves_per_eu": 2, "num_warps": 4, "matrix_instr_nonkdim": 16, "kpack": 1}
    monkeypatch.setattr(torch.version, "hip", hip)
    save_configs_to_json(NAME, tmp_path, {"any": config})
    assert load_config(tmp_path / NAME, 1) == (config if hip else {"BM": 16, "num_warps": 4})
    assert there(tmp_path) == {"any": config}


def test_a_file_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A new file of the same length is read anew; what the caller changes in a config, nobody else finds. Without a file, an error."""
    with pytest.raises(FileNotFoundError):
        load_config(tmp_path / NAME, 1)
    save_configs_to_json(NAME, tmp_path, {"any": {"BM": 16}})
    load_config(tmp_path / NAME, 1)["BM"] = 99
    with monkeypatch.context() as patch:
        patch.delattr(files, "read_regular")
        assert load_config(tmp_path / NAME, 5000) == {"BM": 16}
    save_configs_to_json(NAME, tmp_path, {"any": {"BM": 32}})
    assert load_config(tmp_path / NAME, 1) == {"BM": 32}


CONTENTS: list[bytes | str] = [
    b"{", b"", b"[1]", b"\xff", b"\xef\xbb\xbf{}", b"[" * 3000, b'"\\ud800"', b'{"any": 3}', b'{"any": {"BM": NaN}}',
    b'{"any": {"i": ' + b"9" * 5000 + b"}}", "fifo", "device", "huge",
]  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: repr(content)[:20])
def test_a_file_that_is_none_is_an_error_to_read_and_is_replaced_with_a_warning(tmp_path: Path, content: bytes | str):
    """At the caller's line. A FIFO would wait for a writer, a device never ends."""
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
    reason = {"fifo": "not a regular file", "device": "not a regular file", "huge": "larger than"}.get(str(content), "is no JSON object of")
    with pytest.raises(ValueError, match=reason) as told:
        load_config(path, 1)
    assert (str(path) in str(told.value), str(told.value).isprintable(), len(str(told.value)) < 2000) == (True, True, True)
    with pytest.warns(UserWarning, match=f"{reason}.*a new file takes its place") as caught:
        save_configs_to_json(NAME, tmp_path, {"any": {"BM": 16}})
    assert [each.filename for each in caught] == [__file__]
    assert (there(tmp_path), os.listdir(tmp_path)) == ({"any": {"BM": 16}}, [NAME])


def test_a_folder_in_its_place_is_an_error(tmp_path: Path):
    """It stays where it is."""
    (tmp_path / NAME / "inner").mkdir(parents=True)
    for call in (lambda: load_config(tmp_path / NAME, 1), lambda: save_configs_to_json(NAME, tmp_path, {"any": {}})):
        with pytest.raises(IsADirectoryError):
            call()
    assert (tmp_path / NAME / "inner").exists()


# -- one config for the sizes of a class -------------------------------------------------------------------------------

SPACE = [{"BM": 16 << i} for i in range(4)]
Times = dict[int, dict[int, float]]
"""Size -> candidate -> time."""


def config_file(space: Any = SPACE, callback: Any = None, sizes: tuple[int, ...] = (16, 64)) -> ConfigFile:
    return ConfigFile(NAME, sizes, lambda size: lambda config: (lambda: config, None), space, m_leq(1024), callback)


def outcome(us: dict[int, float], *failed: int) -> Outcome:
    return Outcome("problem", min(us, key=us.__getitem__), us, dict.fromkeys(failed, "wrong result"))


def size_class(times: Times, old: dict[str, Any] | None = None, space: Any = SPACE, failed: tuple[int, ...] = ()) -> SizeClass:
    """``failed``: candidates that are wrong at some size."""
    return SizeClass(config_file(space), "M_LEQ_1024", {size: outcome(us, *failed) for size, us in times.items()}, old)


def settled(one: SizeClass, times: Times, min_gain: float | None = None) -> Settled:
    """The choice by the times of finals, told by candidate; a final itself counts those on the list."""
    measured: dict[int, Ended] = {size: outcome({one.shortlisted.index(i): t for i, t in us.items()}) for size, us in times.items()}
    choice = one.settle(measured, min_gain)
    assert isinstance(choice, Settled)
    return choice


@pytest.mark.parametrize(
    ("times", "winner", "regret"),
    [
        # Config 0 is the best at the last size, 1 has the least sum, 2 is worst by the sum and loses least: 1.1 at both.
        ({16: {0: 3.0, 1: 2.0, 2: 1.1, 3: 1.0}, 64: {0: 100.0, 1: 100.5, 2: 110.0, 3: 150.0}}, 2, 0.1),
        # Equals by their geometric mean, of which the first is taken: an arithmetic mean would prefer the config in between.
        ({16: {2: 1.0, 1: 4.0, 3: 2.0}, 64: {2: 4.0, 1: 1.0, 3: 2.0}}, 1, 1.0),
    ],
)
def test_relative_losses_decide_and_not_seconds(times: Times, winner: int, regret: float):
    choice = settled(size_class(times), times)
    assert choice.config == SPACE[winner]
    assert choice.regret == pytest.approx(regret)


def test_what_does_not_run_at_every_size_is_not_chosen():
    """However fast it is at the others. Nothing is settled where nothing runs at all sizes, or a final failed."""
    assert slowdowns([{0: 1.0, 1: 2.0}, {1: 2.0, 2: 1.0}]) == {1: pytest.approx(2.0)}
    both, failed = size_class({16: {0: 1.0, 1: 2.0}, 64: {0: 2.0, 1: 1.0}}), Failed("problem", "no config")
    for first, second in ((failed, failed), (outcome({0: 1.0, 1: 2.0}), failed), (outcome({0: 1.0}), outcome({1: 1.0}))):
        assert isinstance(both.settle({16: first, 64: second}, None), Failed)


def test_the_best_of_each_size_and_over_all_are_measured_once_more():
    """Of twelve the best eight over both sizes, and the winner of one; none that is wrong. The times of the final decide."""
    times = {16: {i: 1.0 + i for i in range(11)} | {11: 1e6}, 64: {i: 1.0 + i for i in range(11)} | {11: 0.5}}
    space = [{"BM": i} for i in range(12)]
    assert size_class(times, space=space).shortlisted == [*range(8), 11]
    assert size_class(times, space=space, failed=(0, 3)).shortlisted == [1, 2, 4, 5, 6, 7, 8, 9, 11]
    one = size_class({16: {0: 1.0, 1: 1.5, 2: 9.0}, 64: {0: 9.0, 1: 1.5, 2: 1.0}})
    assert {size: problem.search_space for size, problem in one.finals().items()} == {16: SPACE[:3], 64: SPACE[:3]}
    choice = settled(one, {16: {0: 1.0, 1: 1.1, 2: 5.0}, 64: {0: 5.0, 1: 1.1, 2: 1.0}})
    assert (choice.config, choice.latencies_us, choice.gain, choice.is_saved) == (SPACE[1], {16: 1.1, 64: 1.1}, None, True)


def test_one_size_needs_no_final():
    """And what is written is as the callback leaves it."""
    file = config_file(callback=lambda config: config.update(SPLITK=config["BM"] // 8))
    one = SizeClass(file, "any", {16: outcome({0: 3.0, 2: 2.0})}, None)
    assert one.finals() == {}
    choice = settled(one, {})
    assert (choice.config, choice.latencies_us, choice.regret) == ({**SPACE[2], "SPLITK": 8}, {16: 2.0}, 0.0)


@pytest.mark.parametrize("old", [{"BM": 32, "BN": 8, "waves_per_eu": 8}, {"BN": 8, "BM": 32}])
def test_an_old_config_of_the_space_is_no_other(monkeypatch: pytest.MonkeyPatch, old: dict[str, Any]):
    """Measured once, with AMD's keys or without, in whatever order its keys stand; where it wins, the file stays."""
    monkeypatch.setattr(torch.version, "hip", None)
    space = [{"BM": bm, "BN": 8, "waves_per_eu": waves} for bm, waves in ((16, 1), (16, 2), (32, 1))]
    one = size_class({16: {0: 1.0, 1: 2.0}}, old, space)
    assert one.shortlisted == [0, 1]
    choice = settled(one, {16: {0: 2.0, 1: 1.0}}, 0.0)
    assert (choice.config, choice.gain, choice.is_saved) == (space[2], 0.0, False)


@pytest.mark.parametrize(
    ("old_us", "min_gain", "is_saved"),
    [(102.9, 0.03, False), (103.1, 0.03, True), (99.0, None, False), (99.0, -0.5, False), (None, 0.03, True)],
)
def test_a_file_is_changed_for_what_is_worth_it(old_us: float | None, min_gain: float | None, is_saved: bool):
    """An old config that is none of the space is measured beside the new one: 2.9 % are not worth it, 3.1 % are. Or it does not run now."""
    times = {0: 100.0} if old_us is None else {0: 100.0, len(SPACE): old_us}
    choice = settled(size_class({16: {0: 1.0, 1: 2.0}}, {"BM": 999}), {16: times}, min_gain)
    assert (choice.is_saved, choice.config) == (is_saved, {"BM": 999} if old_us == 99.0 else SPACE[0])
    assert choice.old_latencies_us == ({} if old_us is None else {16: old_us})
    assert choice.gain == (None if old_us is None else pytest.approx(max(0.0, old_us / 100 - 1)))


def test_sizes_come_to_their_classes():
    """In the order of sizes; what failed is in none; each with the config it is compared with."""
    one, other = {0: 1.0}, {1: 1.0}
    ended: dict[int, Ended] = {4096: outcome(one), 16: outcome(other), 64: Failed("problem", "no config"), 2048: outcome(other)}
    classes = classes_of(config_file(sizes=(4096, 16, 64, 2048)), ended, {"any": {"BM": 999}})
    found = [(each.name, [*each.finals()], each.shortlisted) for each in classes]
    assert found == [("any", [4096, 2048], [0, 1, 4]), ("M_LEQ_1024", [], [1])]
