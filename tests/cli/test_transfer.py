"""Exported files: the same records come out as went in, and no others."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.cache import BrokenRecordError, Cache, TuningRecord, record_bytes
from dist_tune.cli import transfer
from dist_tune.cli.transfer import merge, pack, unpack, write_export
from tests.cached_records import measured, record

pytestmark = pytest.mark.once

THREE = [record(), record(key="[1]"), record(kernel='a "name"\n},\n{\n"sha256": "')]


def outcomes(folder: Path, *paths: Path) -> list[str]:
    return [each.outcome for each in merge(Cache(folder), paths)]


def test_what_is_packed_is_unpacked():
    """Any number of records, also with texts that look like the end of one; any JSON parser reads the file."""
    assert list(unpack(pack(THREE))) == THREE
    assert list(unpack(pack(THREE[:1]))) == THREE[:1]
    assert len(json.loads(pack(THREE))) == 3
    assert list(unpack(record_bytes(record()) + b"\n")) == [record()], "a single record's file is as good"


@given(st.data())
def test_a_damaged_export_loses_at_most_what_is_damaged(data: st.DataObject):
    """Its records are good ones or errors of this package."""
    content = pack(THREE)
    begin, end = sorted(data.draw(st.tuples(st.integers(0, len(content)), st.integers(0, len(content)))))
    damaged = content[:begin] + data.draw(st.binary(max_size=30)) + content[end:]
    for each in unpack(damaged):
        assert isinstance(each, TuningRecord | BrokenRecordError)
        assert isinstance(each, TuningRecord) or str(each).isprintable()


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        (b"", "EOF"),
        (b"null", "should be an object"),
        (b'{"__reduce__": 1}', "Field required"),
        (b'{"a":' * 100_000, "Invalid JSON"),
        (b'{"schema_version": 2, "closure": "f"}', "schema 2"),
        (b'{"schema_version": 3, "spent": {"total": NaN}}', ""),
        (record_bytes(record()).replace(b'"winner":1', b'"winner":9'), "no candidate that runs"),
    ],
)
def test_a_forged_record_is_refused_alone(tmp_path: Path, piece: bytes, reason: str):
    """With its number; the others are taken in."""
    (tmp_path / "e.json").write_bytes(b"[\n" + b",\n".join([record_bytes(THREE[0]), piece, record_bytes(THREE[1])]) + b"\n]\n")
    first, second, third = merge(Cache(tmp_path / "cache"), [tmp_path / "e.json"])
    assert (first.outcome, second.outcome, third.outcome) == ("added", "refused", "added")
    assert second.source == f"{tmp_path / 'e.json'}, record 2"
    assert reason in second.reason
    assert "\n" not in second.reason


@pytest.mark.parametrize("name", ["../../../escaped", "/etc/escaped", "a/b", "..", ".", "", "\0", "x" * 10_000, "<lambda>"])
def test_where_a_record_goes_follows_from_the_record(tmp_path: Path, name: str):
    """No name in a file leads out of the cache folder."""
    (tmp_path / "deep" / "theirs").mkdir(parents=True)
    file = tmp_path / "deep" / "theirs" / "e.json"
    file.write_bytes(pack([record(kernel=name)]))
    assert outcomes(tmp_path / "deep" / "cache", file) == ["added"]
    written = [path for path in tmp_path.rglob("*.json") if path != file]
    assert [path.parents[1] for path in written] == [tmp_path / "deep" / "cache"]


def test_what_is_no_file_is_refused_unread(tmp_path: Path):
    """A fifo would wait for a writer, a device never ends, and a link that leads to itself leads nowhere."""
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    (tmp_path / "loop").symlink_to(tmp_path)
    paths = [Path("/dev/zero"), tmp_path / "none", Path("a\0b"), tmp_path]
    arrivals = list(merge(Cache(tmp_path / "cache"), paths))
    assert {each.outcome for each in arrivals} == {"refused"}
    reasons = {Path(each.source.removesuffix(", record 1")).name: each.reason for each in arrivals}
    assert reasons["zero"] == reasons["fifo.json"] == "not a regular file"
    assert "such file" in reasons["none"]
    assert "links" in reasons["loop.json"]
    assert not (tmp_path / "cache").exists()


def test_a_file_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On the way in and on the way out."""
    write_export(tmp_path / "e.json", THREE)
    monkeypatch.setattr(transfer, "MAX_BYTES", len(pack(THREE)) - 1)
    (refused,) = merge(Cache(tmp_path / "cache"), [tmp_path / "e.json"])
    assert "larger than" in refused.reason
    with pytest.raises(ValueError, match="--name"):
        pack(THREE)
    assert outcomes(tmp_path / "cache", tmp_path / "e.json") == ["refused"]


def test_a_cache_that_cannot_be_written_refuses(tmp_path: Path):
    """No record counts as added that is not there."""
    (tmp_path / "file").touch()
    write_export(tmp_path / "e.json", THREE[:1])
    with pytest.warns(UserWarning, match="cannot be written"):
        (refused,) = merge(Cache(tmp_path / "file"), [tmp_path / "e.json"])
    assert (refused.outcome, refused.reason) == ("refused", f"{tmp_path / 'file'} cannot be written")


def test_a_broken_file_in_the_cache_gives_way(tmp_path: Path):
    """The merged record takes its place."""
    cache = Cache(tmp_path / "cache")
    path = cache.store(record())
    assert path is not None
    path.write_text("{")
    write_export(tmp_path / "e.json", [record()])
    with pytest.warns(UserWarning, match="is not used"):
        assert outcomes(cache.folder, tmp_path / "e.json") == ["added"]
    assert cache.find(record().cache_key) == record()


def test_of_equally_measured_ones_the_newer_stays(tmp_path: Path):
    cache = Cache(tmp_path / "cache")
    older, newer = measured(5), measured(5, tuned_at=record().tuned_at.replace(month=4))
    cache.store(older)
    (tmp_path / "e.json").write_bytes(pack([newer, older]))
    assert [(each.outcome, each.reason) for each in merge(cache, [tmp_path / "e.json"])] == [
        ("replaced", "newer: 2026-04-01 12:00 after 2026-03-01 12:00"),
        ("kept", "newer: 2026-04-01 12:00 after 2026-03-01 12:00"),
    ]


def test_a_better_record_of_another_folder_stays(tmp_path: Path):
    """What is written to the first folder would be found in its place."""
    Cache(tmp_path / "team").store(measured(30))
    cache = Cache([tmp_path / "mine", tmp_path / "team"])
    write_export(tmp_path / "e.json", [measured(5)])
    (arrival,) = merge(cache, [tmp_path / "e.json"])
    assert (arrival.outcome, arrival.reason) == ("kept", "30 timed replays are better than 5")
    assert cache.find(measured(5).cache_key) == measured(30)


def test_an_export_that_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A full disk costs the new file, not the old one; through a link the file that it leads to is replaced."""
    path, link = tmp_path / "e.json", tmp_path / "link.json"
    link.symlink_to(path)
    write_export(link, THREE[:1])
    assert link.is_symlink()
    before = path.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_export(path, THREE)
    assert path.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == [path, link]


def test_a_record_is_taken_in_whole(tmp_path: Path):
    """Nothing is lost on the way: the cache holds what the other one held."""
    cache, other = Cache(tmp_path / "cache"), Cache(tmp_path / "other")
    for each in THREE:
        cache.store(each)
    write_export(tmp_path / "e.json", [entry.record for entry in cache.entries()])
    assert outcomes(other.folder, tmp_path / "e.json") == ["added"] * 3
    held: list[list[TuningRecord]] = [[entry.record for entry in each.entries()] for each in (cache, other)]
    assert held[0] == held[1]
    assert outcomes(other.folder, cache.folder) == ["kept"] * 3, "a cache folder is a folder of records"
