"""``dist-tune cache export`` and ``merge``: files written, and files never touched."""

import json
import os
from datetime import timedelta
from pathlib import Path

import pytest

from dist_tune.cache import Cache
from tests.cached_records import NOON, measured, record
from tests.cli_answers import FILE, Answers, everything, keep

pytestmark = pytest.mark.once


def test_what_is_exported_can_be_merged(cache: Cache, ask: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Into an empty cache on another machine: the same files in the same places; again, and nothing changes."""
    keep(cache, record(), record(key="[1]"), record(kernel="<lambda>"))
    assert ask.json("export", tmp_path / "e.json") == {
        "path": str(tmp_path / "e.json"),
        "n_records": 3,
        "bytes": (tmp_path / "e.json").stat().st_size,
    }
    json.loads((tmp_path / "e.json").read_text())
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "other"))
    answer = ask.json("merge", tmp_path / "e.json")
    assert (answer["added"], answer["kept"], answer["refused"]) == (3, 0, 0)
    merged = {path.relative_to(tmp_path / "other"): content for path, content in everything(tmp_path / "other").items()}
    assert merged == {path.relative_to(cache.folder): content for path, content in everything(cache.folder).items()}
    assert ask("merge", tmp_path / "e.json").splitlines()[-1] == f"3 kept; the cache is {tmp_path / 'other'}"
    assert merged == {path.relative_to(tmp_path / "other"): content for path, content in everything(tmp_path / "other").items()}


def test_export_of_one_name(cache: Cache, ask: Answers, tmp_path: Path):
    keep(cache, record(), record(key="[1]"), record(kernel="other"))
    assert ask("export", tmp_path / "e.json", "--name", "gemm").startswith("2 records, ")
    ask("export", tmp_path / "e.json", "--name", "zzz", code=1)


@pytest.mark.parametrize("target", ["a user's file", "folder", "no/such/folder/e.json", "fifo", "loop"])
def test_export_overwrites_nothing_but_an_export(cache: Cache, ask: Answers, tmp_path: Path, target: str):
    """A reason and exit code 1, and no trace of a file half written."""
    keep(cache, record())
    ask("export", tmp_path / "e.json")
    ask("export", tmp_path / "e.json")
    (tmp_path / "a user's file").write_text(FILE)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    before = sorted(tmp_path.rglob("*"))
    ask("export", tmp_path / target, code=1)
    assert str(tmp_path / target) in ask.err
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "a user's file").read_text() == FILE


def test_export_of_nothing_is_refused(ask: Answers, tmp_path: Path):
    """An empty file would be taken for a success."""
    assert "nothing to export" in ask.json("export", tmp_path / "e.json", code=1)["error"]
    assert not (tmp_path / "e.json").exists()


def test_merge_keeps_the_better_measured(cache: Cache, ask: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """More timed replays win over a later date; the report has the outcome and the reason."""
    keep(cache, measured(10, key="[a]", tuned_at=NOON + timedelta(days=30)), measured(30, key="[b]"), measured(10, key="[c]"))
    ask("export", tmp_path / "e.json")
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "other"))
    keep(Cache(tmp_path / "other"), measured(20, key="[a]"), measured(20, key="[b]"))
    answer = ask.json("merge", tmp_path / "e.json")
    assert {row["key"]: row["outcome"] for row in answer["records"]} == {"[a]": "kept", "[b]": "replaced", "[c]": "added"}
    reasons = {row["key"]: row["reason"] for row in answer["records"]}
    assert reasons["[a]"] == "20 timed replays are better than 10"
    assert reasons["[b]"] == "30 timed replays are better than 20"
    assert [entry.record.n_samples for entry in Cache(tmp_path / "other").entries()] == [20, 30, 10]


def test_merge_goes_on_after_what_it_refuses(cache: Cache, ask: Answers, tmp_path: Path):
    """Good files among bad ones are merged; the bad ones are named with the reason, last; exit code 1."""
    folder = tmp_path / "theirs" / "deep"
    good = Cache(folder).store(record())
    assert good is not None
    (folder / "junk.json").write_text("{}")
    (folder / "notes.txt").write_text(FILE)
    out = ask("merge", tmp_path / "theirs", tmp_path / "none.json", "/dev/zero", code=1)
    lines = out.splitlines()
    assert lines[-1] == f"1 added, 3 refused; the cache is {cache.folder}"
    assert [line.split()[0] for line in lines[1:5]] == ["added", "refused", "refused", "refused"]
    assert "junk.json, record 1" in out
    assert "Field required" in out
    assert "notes.txt" not in out
    assert cache.find(record().cache_key) == record()
