"""Journals that hold what no journal writes: lines of wrong types are left out with a warning, and files that are none cost the journal."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.offline import Problem, tune_problems
from dist_tune.offline.journal import Journal, Progress

pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("ignore:journal .*damaged lines", "ignore:tuning goes on without")]


@pytest.fixture(autouse=True)
def _told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test may be warned anew."""
    monkeypatch.setattr("dist_tune.warn_once._told", set())


INDICES = st.integers(-2, 1001) | st.sampled_from(["1", "x", 1.5, None, True, 10**30])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
LINES = VALUES | st.fixed_dictionaries(
    {"t": st.sampled_from(["open", "begin", "end", "stop", "done", "other"]) | VALUES},
    optional={
        "identity": st.just("id") | VALUES, "candidates": st.lists(INDICES, max_size=4) | VALUES, "champion": INDICES | VALUES,
        "ms": st.dictionaries(st.sampled_from(["0", "2", "999", "-1", "x", "1.5"]), st.floats() | VALUES, max_size=3) | VALUES,
        "failed": st.dictionaries(st.sampled_from(["0", "2", "999", "x"]), VALUES, max_size=3) | VALUES, "budget_s": VALUES,
    },
)  # fmt: skip


def sealed(entry: object) -> bytes:
    """A line with a right checksum."""
    text = json.dumps(entry).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


OPEN = sealed({"t": "open", "identity": "id"})
GOOD = sealed({"t": "end", "ms": {"1": 0.5}, "failed": {}, "champion": 1})


def told(path: Path, n_candidates: int | None = 3) -> tuple[Progress, list[str]]:
    """The progress in a journal, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        journal = Journal(path, "id", n_candidates)
        journal.close()
    return journal.progress, [str(each.message) for each in caught]


WRONG: dict[str, object] = {
    "no dict": ["t", "end"], "no kind": {"t": 7}, "another kind": {"t": "over"}, "no candidates": {"t": "begin"} | {"candidates": 7},
    "candidates of text": {"t": "begin", "candidates": ["1"]}, "NaN": {"t": "end", "ms": {"1": float("nan")}, "failed": {}},
    "infinite": {"t": "end", "ms": {"1": float("inf")}, "failed": {}}, "negative": {"t": "end", "ms": {"1": -1.0}, "failed": {}},
    "time as text": {"t": "end", "ms": {"1": "fast"}, "failed": {}}, "index as text": {"t": "end", "ms": {"one": 1.0}, "failed": {}},
    "times as list": {"t": "end", "ms": [1.0], "failed": {}}, "reason": {"t": "end", "ms": {}, "failed": {"1": 7}},
    "candidate 999": {"t": "end", "ms": {"999": 0.1}, "failed": {}, "champion": 999}, "begun 999": {"t": "begin", "candidates": [999]},
    "champion": {"t": "done", "champion": "best", "budget_s": None}, "negative index": {"t": "begin", "candidates": [-1]},
    "budget": {"t": "done", "champion": 1, "budget_s": "long"}, "escape codes": {"t": "\x1b[2J\n"},
}  # fmt: skip


@pytest.mark.parametrize("entry", WRONG.values(), ids=WRONG)
def test_a_line_of_wrong_types_is_left_out(tmp_path: Path, entry: object):
    """With one warning that names the file and the line; the lines around it count."""
    path = tmp_path / "journal"
    path.write_bytes(OPEN + sealed(entry) + GOOD)
    progress, (warning,) = told(path)
    assert progress == Progress({1: 0.5}, incumbent=1)
    assert str(path) in warning
    assert "line 2" in warning
    assert warning.isprintable()


@given(st.lists(LINES, max_size=6), st.booleans())
def test_no_line_is_an_error(lines: list[Any], is_first_right: bool):
    """Whatever they hold, the progress is of candidates that there are, with finite times; and the next process may go on."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        path.write_bytes((OPEN if is_first_right else b"") + b"".join(map(sealed, lines)))
        progress, _ = told(path)
        known = {
            *progress.latencies_ms,
            *progress.failures,
            *progress.strikes,
            *([] if progress.incumbent is None else [progress.incumbent]),
        }
        assert known <= {0, 1, 2}
        assert all(0 <= ms < float("inf") for ms in progress.latencies_ms.values())
        assert all(isinstance(each, str) for each in progress.failures.values())
        assert Progress.from_json(progress.to_json()) == progress
        journal = Journal(path, "id", 3)
        journal.end({2: 2.0}, {}, 2)
        journal.close()
        assert told(path)[0].latencies_ms[2] == 2.0


@given(st.binary(max_size=300))
def test_no_bytes_are_an_error(content: bytes):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "journal").write_bytes(OPEN + content)
        assert told(Path(folder) / "journal")[0] == Progress()


@pytest.mark.parametrize("kind", ["fifo", "device", "link", "dangling", "folder"])
def test_what_is_no_journal_is_left_alone(tmp_path: Path, kind: str):
    """Not waited for, not read, not written through: one warning, and the tuning keeps its results in memory."""
    path = tmp_path / "journal"
    (tmp_path / "victim").write_bytes(b"mine")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"device": Path("/dev/zero"), "link": tmp_path / "victim", "dangling": tmp_path / "gone"}[kind])
    progress, found = told(path)
    assert progress == Progress()
    assert len(found) == 1
    assert (tmp_path / "victim").read_bytes() == b"mine"
    assert not (tmp_path / "gone").exists()
    assert os.path.lexists(path)


def test_a_journal_too_large_is_begun_anew(tmp_path: Path):
    """It is not read."""
    path = tmp_path / "journal"
    path.write_bytes(OPEN)
    os.truncate(path, 2**34)
    progress, (warning,) = told(path)
    assert (progress, "larger than" in warning) == (Progress(), True)
    assert path.stat().st_size < 1000


def test_a_journal_is_its_owners_alone(tmp_path: Path):
    """The folder and the file, under any umask."""
    before = os.umask(0)
    try:
        told(tmp_path / "journal" / "problem.jsonl")
    finally:
        os.umask(before)
    paths = [tmp_path / "journal", *(tmp_path / "journal").iterdir()]
    assert {stat.S_IMODE(each.stat().st_mode) for each in paths if each.is_file()} == {0o600}
    assert stat.S_IMODE(paths[0].stat().st_mode) == 0o700


RANK = 0
"""A value that the factory below sees."""


def _make(config: dict[str, Any]) -> Any:
    return (lambda: RANK), None


def _interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch, make: Any = _make) -> list[str]:
    """A job whose second problem ends it, so that the journal of the first stays; returns the warnings."""
    monkeypatch.setenv("DIST_TUNE_LOG_DIR", str(folder / "logs"))
    monkeypatch.setenv("DIST_TUNE_VERBOSITY", "quiet")

    def ends(config: dict[str, Any]) -> Any:
        raise KeyboardInterrupt

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(KeyboardInterrupt):
            tune_problems([Problem("first", [{"i": 0}, {"i": 1}], make), Problem("second", [{"i": 0}], ends)], num_iters=1)
    return [str(each.message) for each in caught]


def test_a_journal_of_other_values_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A global that differs between attempts is named; an attempt with the same values goes on, and says nothing."""
    assert _interrupted(tmp_path, monkeypatch) == []
    assert _interrupted(tmp_path, monkeypatch) == []
    monkeypatch.setitem(globals(), "RANK", 1)
    (warning,) = _interrupted(tmp_path, monkeypatch)
    assert "first is tuned anew: its journal in" in warning
    assert "differs in make_run_and_gt_fn" not in warning
    assert "RANK" in warning


def test_the_index_of_a_device_is_no_other_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A rank that takes over a problem has another GPU of the same kind."""

    def on(device: torch.device) -> Any:
        return lambda config: (lambda: device, None)

    for index in (0, 1):
        assert _interrupted(tmp_path, monkeypatch, on(torch.device("cuda", index))) == []
    assert "configs tried before" in (tmp_path / "logs" / "rank-0.log").read_text()
