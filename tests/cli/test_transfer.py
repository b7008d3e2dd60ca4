"""``dist-tune cache export`` and ``merge``: the same records come out as went in, and no others;
files written, and files never touched.
"""

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dist_tune.cli.records import packed
from dist_tune.records import Cache, record_bytes
from tests.cached_records import NOON, measured, record
from tests.cli_answers import FILE, Answers, everything, keep, refusal, run

THREE = [record(), record(key="[1]"), record(kernel='a "name"\n},\n{\n"sha256": "')]


def no_space(_descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def test_merge_goes_on_after_what_it_refuses(
    cache: Cache, ask: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Good records among bad ones are merged, the bad ones named with number and reason, last; what
    is no regular file is not read.
    """
    theirs = tmp_path / "theirs"
    assert Cache(theirs / "deep").store(record()) is not None
    forged = record_bytes(record()).replace(b'"winner":1', b'"winner":9')
    (theirs / "junk.json").write_bytes(
        b"[\n" + b",\n".join([record_bytes(THREE[1]), b'{"a":' * 100_000, forged]) + b"\n]\n"
    )
    (theirs / "notes.txt").write_text(FILE)
    os.mkfifo(theirs / "fifo.json")
    (tmp_path / "empty").mkdir()
    paths = [theirs, tmp_path / "none.json", Path("/dev/zero")]
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_space)
        assert f"{cache.folder} cannot be written" in ask("merge", theirs, code=1)
    assert cache.entries() == []
    rows = ask.json("merge", *paths, code=1)["records"]
    assert [row["outcome"] for row in rows] == [*["added"] * 2, *["refused"] * 5]
    reasons = {Path(row["source"]).name: row["reason"] for row in rows[2:]}
    assert reasons.keys() == {
        "zero",
        "fifo.json",
        "junk.json, record 2",
        "junk.json, record 3",
        "none.json",
    }
    assert reasons["zero"] == reasons["fifo.json"] == "not a regular file"
    assert "no candidate that runs" in reasons["junk.json, record 3"]
    assert cache.find(record().cache_key) == record()
    assert (
        ask("merge", *paths, code=1).splitlines()[-1]
        == f"2 kept, 5 refused; the cache is {cache.folder}"
    )
    assert "no .json file is there" in ask("merge", tmp_path / "empty", code=1)


def test_merge_keeps_the_better_measured(
    cache: Cache, ask: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """More timed replays win over a later date, of as many the later date; also where the better
    one lies in another folder.
    """
    late: dict[str, Any] = {"tuned_at": NOON + timedelta(days=30)}
    many = [
        measured(10, key="[a]", **late),
        measured(30, key="[b]"),
        measured(10, key="[c]"),
        measured(20, key="[d]", **late),
    ]
    (tmp_path / "e.json").write_bytes(packed(many))
    keep(cache, measured(20, key="[a]"), measured(20, key="[b]"), measured(20, key="[d]"))
    rows = {row["key"]: row for row in ask.json("merge", tmp_path / "e.json")["records"]}
    assert {key: row["outcome"] for key, row in rows.items()} == {
        "[a]": "kept",
        "[b]": "replaced",
        "[c]": "added",
        "[d]": "replaced",
    }
    assert (
        rows["[b]"]["reason"]
        == "30 timed replays against the 20 of the one before; of equals the newer stays"
    )
    assert [entry.record.n_samples for entry in cache.entries()] == [20, 30, 10, 20]
    assert ask.json("merge", tmp_path / "e.json")["kept"] == 4
    monkeypatch.setenv("DIST_TUNE_CACHE_PATH", f"{tmp_path / 'mine'}:{cache.folder}")
    (tmp_path / "few.json").write_bytes(packed([measured(5, key="[b]")]))
    assert ask.json("merge", tmp_path / "few.json")["kept"] == 1


def test_what_is_exported_can_be_merged(
    cache: Cache, ask: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Into an empty cache on another machine, from an export or a folder: the same files in the
    same places; again, and nothing changes.
    """
    assert "nothing to export" in ask.json("export", tmp_path / "e.json", code=1)["error"], (
        "an empty file would be taken for a success"
    )
    keep(cache, *THREE, record(kernel="other"))
    ask("export", tmp_path / "e.json", "--name", "zzz", code=1)
    assert not (tmp_path / "e.json").exists()
    assert ask("export", tmp_path / "one.json", "--name", "gemm").startswith("2 records in ")
    told = ask.json("export", tmp_path / "e.json")
    assert told == {
        "path": str(tmp_path / "e.json"),
        "n_records": 4,
        "bytes": (tmp_path / "e.json").stat().st_size,
    }
    assert len(json.loads((tmp_path / "e.json").read_text())) == 4
    held = {
        path.relative_to(cache.folder): content
        for path, content in everything(cache.folder).items()
    }
    for number, source in enumerate((tmp_path / "e.json", cache.folder)):
        other = tmp_path / f"other-{number}"
        monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(other))
        for outcome in ("added", "kept"):
            assert ask.json("merge", source)[outcome] == 4
            assert {
                path.relative_to(other): content for path, content in everything(other).items()
            } == held


def test_an_export_into_a_folder_keeps_what_is_no_record_of_this_version(
    cache: Cache, ask: Answers, tmp_path: Path
):
    """One of a later version, in the place of ours, stays beside it; a record of ours is replaced
    without a copy.
    """
    keep(cache, record())
    pack = Cache(tmp_path / "pack")
    path = pack.path_of(record().cache_key)
    path.parent.mkdir(parents=True)
    path.write_bytes(
        later := record_bytes(record()).replace(
            b'"schema_version":4', b'"schema_version":4,"more":[]'
        )
    )
    for _ in range(2):
        ask("export", f"{tmp_path}/pack/")
        (copy,) = everything(tmp_path / "pack").keys() - {path}
        assert (copy.read_bytes(), pack.find(record().cache_key)) == (later, record())


@pytest.mark.parametrize("command", ["cache export", "report"])
def test_a_command_writes_over_nothing_but_its_own_kind_of_file(
    cache: Cache, export: Path, tmp_path: Path, command: str
):
    """A reason and exit code 1, and no trace of a file half written; through a link the file that
    it leads to is replaced.
    """
    keep(cache, record())
    (tmp_path / "link").symlink_to(tmp_path / "e.json")
    (tmp_path / "user's").write_text(FILE)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    words = command.split() if "export" in command else [command, export, "-o"]
    for _ in range(2):
        run(*words, tmp_path / "link")
    before = sorted(tmp_path.rglob("*"))
    told = {
        "folder": "it is no regular file",
        "fifo": "it is no regular file",
        "no/such/e.json": "No such file or directory",
    }
    if "export" in command:
        told |= {"user's": "exists and is no export: it is left alone", "folder": "", "fifo": ""}
    for target, reason in told.items():
        line = refusal(*words, tmp_path / target)
        assert str(tmp_path / target) in line
        assert reason in line
    assert (sorted(tmp_path.rglob("*")), (tmp_path / "link").is_symlink()) == (before, True)
    assert (tmp_path / "e.json").stat().st_size > 0
    assert (tmp_path / "user's").read_text() == FILE
