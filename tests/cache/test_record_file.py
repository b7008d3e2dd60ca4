"""The bytes of a cache file: what goes in comes out, and nothing else is taken for a record."""

import json
import os
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.cache import record_file
from dist_tune.cache.record_file import MAX_BYTES, BrokenRecordError, OtherSchemaError, UnreadableRecordError, read_record, seal, unseal
from dist_tune.cache.records import SCHEMA_VERSION, CandidateRecord, Environment, Seconds, TuningRecord
from tests.cached_records import candidate, forged, measured, record

pytestmark = pytest.mark.once

TEXTS = st.text(max_size=40) | st.sampled_from(["\\", '"', '":', '\\":', "}\n}\n", "\x00\x1b[31m\x7f", "日本\U0001f600", "x" * 10_000])
FLOATS = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([5e-324, -0.0, 1.7976931348623157e308, 0.1 + 0.2])
TIMES_MS = st.none() | FLOATS.map(abs)
COUNTS = st.integers() | st.integers(-(10**400), 10**400)
SCALARS = st.none() | st.booleans() | COUNTS | FLOATS | TEXTS
ZONES = st.just(UTC) | st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))


def candidates(index: int) -> st.SearchStrategy[CandidateRecord]:
    return st.builds(
        CandidateRecord, index=st.just(index), config=TEXTS, fields=st.dictionaries(TEXTS, SCALARS, max_size=4), latency_ms=TIMES_MS,
        spread_ms=TIMES_MS, closure_ms=st.none() | FLOATS, n_replays=COUNTS,
        rank_latencies_ms=st.dictionaries(COUNTS, FLOATS.map(abs), max_size=3),
        failure=st.none() | TEXTS if index else st.none(), left=st.none() | TEXTS, shared_bytes=st.none() | COUNTS,
    )  # fmt: skip


RECORDS = st.builds(
    TuningRecord, closure=TEXTS, kernel=TEXTS, key=TEXTS, source=TEXTS, winner=st.just(0), n_replays=COUNTS, closure_weight=FLOATS,
    candidates=st.integers(1, 3).flatmap(lambda n: st.tuples(*map(candidates, range(n))).map(list)), seconds=FLOATS,
    spent=st.builds(Seconds, total=FLOATS), meeting_seconds=st.lists(FLOATS, max_size=3),
    environment=st.builds(Environment, device=TEXTS, device_count=COUNTS, world_size=COUNTS, torch=TEXTS, cuda=st.none() | TEXTS),
    tuned_at=st.datetimes(datetime(1, 1, 3), datetime(9999, 12, 29), timezones=ZONES),
)  # fmt: skip


def raw_of(content: bytes) -> bytes:
    return content[content.index(b'"record": ') + len(b'"record": ') : -len(b"\n}\n")]


@given(RECORDS)
def test_what_is_sealed_comes_out_equal(whole: TuningRecord):
    """Any text, any size of number and any time zone; and the file is JSON as others know it."""
    content = seal(whole)
    assert unseal(content) == whole
    assert json.loads(content)["record"]["schema_version"] == SCHEMA_VERSION


@given(RECORDS, st.data())
def test_any_changed_byte_is_found(whole: TuningRecord, data: st.DataObject):
    """One byte flipped, added or left out, anywhere: in the record, in its checksum, or between."""
    content = seal(whole)
    at = data.draw(st.integers(0, len(content) - 1))
    byte = data.draw(st.binary(min_size=1, max_size=1).filter(lambda byte: byte != content[at : at + 1]))
    for damaged in (content[:at] + byte + content[at + 1 :], content[:at] + byte + content[at:], content[:at] + content[at + 1 :]):
        with pytest.raises(BrokenRecordError):
            unseal(damaged)


def test_a_file_is_for_people_too():
    """A line for each field and each candidate, without what equals its default; ASCII where the record is."""
    lines = seal(record(2)).decode("ascii").splitlines()
    assert len(lines) == 23
    assert lines[3] == f' "schema_version": {SCHEMA_VERSION},'
    assert '"index": 1, "config": "BLOCK_M=32 num_warps=4 SCALE=1"' in lines[12]
    assert not any("failure" in line for line in lines)
    assert "日本" in seal(record(kernel="日本")).decode()


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a field is missing": (lambda values: values.pop("winner"), "winner: Field required"),
    "a field is unknown": (lambda values: values.update(evil=1), "evil: Extra inputs"),
    "no schema": (lambda values: values.pop("schema_version"), "lacks schema_version"),
    "no time": (lambda values: values.pop("tuned_at"), "lacks tuned_at"),
    "a time without its zone": (lambda values: values.update(tuned_at="2026-03-01T12:00:00"), "tuned_at: "),
    "text for a number": (lambda values: values.update(winner="1"), "winner: Input should be a valid integer"),
    "a number for text": (lambda values: values.update(kernel=1), "kernel: Input should be a valid string"),
    "a list for a number": (lambda values: values.update(seconds=[1]), "seconds: "),
    "no list": (lambda values: values.update(candidates={}), "candidates: "),
    "a winner beyond": (lambda values: values.update(winner=3), "winner 3 is no candidate"),
    "a winner before": (lambda values: values.update(winner=-1), "winner -1 is no candidate"),
    "a winner that failed": (lambda values: values["candidates"][1].update(failure="x"), "winner 1 is no candidate"),
    "candidates in disorder": (lambda values: values["candidates"].reverse(), "not in order"),
    "no candidates": (lambda values: values.update(candidates=[]), "winner 1 is no candidate"),
    "a negative time": (lambda values: values["candidates"][0].update(latency_ms=-1.0), "candidates.0.latency_ms: "),
    "not a number": (lambda values: values["candidates"][0].update(latency_ms=float("nan")), "latency_ms: "),
    "infinite": (lambda values: values.update(seconds=float("inf")), "seconds: "),
    "not a number among constants": (lambda values: values["candidates"][0]["fields"].update(SCALE=float("nan")), "fields.SCALE"),
    "an object among constants": (lambda values: values["candidates"][0]["fields"].update(SCALE={"a": 1}), "fields.SCALE"),
    "an older schema": (lambda values: values.update(schema_version=2), "written with schema 2, and this dist_tune reads schema"),
    "a newer schema": (lambda values: values.update(schema_version=99, more=[]), "written with schema 99, and"),
    "a strange schema": (lambda values: values.update(schema_version="3"), "schema_version: "),
    "a schema below all": (lambda values: values.update(schema_version=-1), "schema -1, and this dist_tune reads schema"),
    "terminal codes": (lambda values: values.update({"\x1b[31m\n": 1}), r"\\x1b\[31m\\n: Extra"),
    "a long name": (lambda values: values.update({"x" * 10_000: 1}), "x{200}...$"),
}


@pytest.mark.parametrize(("change", "reason"), CHANGES.values(), ids=CHANGES.keys())
def test_a_right_checksum_makes_no_record(change: Callable[[dict[str, Any]], object], reason: str):
    """Somebody wrote the file with care; it is refused all the same, with the reason on one short line."""
    values = json.loads(raw_of(seal(record())))
    change(values)
    with pytest.raises(BrokenRecordError, match=reason) as caught:
        unseal(forged(json.dumps(values).encode()))
    assert len(str(caught.value)) < 250
    assert str(caught.value).isprintable()
    assert isinstance(caught.value, OtherSchemaError) == ("written with schema" in reason)


RAW: dict[str, Callable[[bytes], bytes]] = {
    "a key twice": lambda raw: raw.replace(b'"winner": 1', b'"winner": 1,\n "winner": 1'),
    "a key twice, spaced": lambda raw: raw.replace(b'"winner": 1', b'"winner" : 0,\n "winner": 1'),
    "a key twice, and as many fewer colons": lambda raw: raw.replace(b'"NONE": null}', b'"NONE" : null, "NONE": null}', 1),
    "a constant twice": lambda raw: raw.replace(b'"FAST": true', b'"FAST": true, "FAST": true', 1),
    "a rank twice": lambda raw: raw.replace(b'"0": 0.1', b'"0": 0.1, "0": 0.1', 1),
    "a key of another spelling": lambda raw: raw.replace(b'"winner": 1', b'"winner": 0, "winne\\u0072": 1'),
    "NaN": lambda raw: raw.replace(b'"seconds": 10.0', b'"seconds": NaN'),
    "infinite by its exponent": lambda raw: raw.replace(b'"seconds": 10.0', b'"seconds": 1e999'),
    "10,000 lists deep": lambda raw: raw.replace(b'"seconds": 10.0', b'"seconds": ' + b"[" * 10_000 + b"]" * 10_000),
    "10,000 objects deep": lambda raw: raw.replace(b'"seconds": 10.0', b'"seconds": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
    "10,000 lists left open": lambda raw: raw.replace(b'"seconds": 10.0', b'"seconds": ' + b"[" * 10_000),
    "no UTF-8": lambda raw: raw.replace(b"model.gemm", b"\xff\xfe"),
    "half a character": lambda raw: raw.replace(b"model.gemm", b"\\ud800"),
    "more after the record": lambda raw: raw + b"{}",
    "no object": lambda raw: b"{1}",
    "empty": lambda raw: b"{}",
    "pickled": lambda raw: b"{\x80\x04cos\nsystem\n(S'false'\ntR.}",
    "a number of 10,000 digits": lambda raw: raw.replace(b'"n_replays": 90', b'"n_replays": 9' + b"0" * 10_000),
}


@pytest.mark.parametrize("change", RAW.values(), ids=RAW.keys())
def test_strange_json_is_refused(change: Callable[[bytes], bytes]):
    """What a JSON library may let pass, or stumble over, in a file with a right checksum; and within a second."""
    raw = raw_of(seal(record()))
    assert change(raw) != raw
    began = time.thread_time()
    with pytest.raises(BrokenRecordError):
        unseal(forged(change(raw)))
    assert time.thread_time() - began < 1


@pytest.mark.parametrize(("n", "reason"), [(500_000, "more than 400000 values"), (50_000, "50000 values do not fit")])
def test_many_wrong_values_are_not_listed(n: int, reason: str):
    """Each would cost time and memory that a file of a few megabytes should not."""
    raw = raw_of(seal(record())).replace(b'"candidates": [', b'"candidates": [' + b"0," * n)
    with pytest.raises(BrokenRecordError, match=reason):
        unseal(forged(raw))


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"{}", b"null", b"\x00" * 4096, bytes(range(256)), b"\xef\xbb\xbf", b'{"sha256": "", "record": {}}']
)
def test_other_files_are_refused(content: bytes):
    """Empty, binary, a block of zeros as after a power cut, JSON of others."""
    with pytest.raises(BrokenRecordError):
        unseal(content)


def test_nothing_is_sealed_that_would_not_come_out():
    """A NaN put into a record past its checks, or more than a file may hold, is an error where it is written."""
    spoiled = record()
    spoiled.candidates[0].fields["SCALE"] = float("nan")
    with pytest.raises(BrokenRecordError, match="not JSON compliant"):
        seal(spoiled)
    with pytest.raises(BrokenRecordError, match="larger than"):
        seal(record(candidates=[candidate(0), candidate(1, config="x" * MAX_BYTES)]))
    with pytest.raises(BrokenRecordError, match="no candidate"):
        seal(record().model_copy(update={"winner": 7}))


def test_reading_a_file(tmp_path: Path):
    """A record where there is one, `FileNotFoundError` where there is no file."""
    (tmp_path / "record").write_bytes(seal(record()))
    assert read_record(tmp_path / "record") == record()
    (tmp_path / "link").symlink_to("record")
    assert read_record(tmp_path / "link") == record()
    (tmp_path / "nowhere").symlink_to("gone")
    for absent in ("gone", "nowhere", "no/folder"):
        with pytest.raises(FileNotFoundError):
            read_record(tmp_path / absent)


def test_what_is_no_regular_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A fifo would block, a device might never end, a huge file fill the memory."""
    monkeypatch.setattr(record_file, "unseal", lambda content: pytest.fail("it was read"))
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "device").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(tmp_path / "socket"))
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(2**40)
    for name in ("fifo", "folder", "loop", "device", "socket", "huge"):
        with pytest.raises(BrokenRecordError) as caught:
            read_record(tmp_path / name)
        assert not isinstance(caught.value, UnreadableRecordError)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UnreadableRecordError, match="Not a directory"):
        read_record(tmp_path / "file" / "inside")


def test_reading_is_cheap(monkeypatch: pytest.MonkeyPatch):
    """216 candidates with all facts of 16 ranks are parsed once; a second time only for what may repeat a key."""
    content = seal(record(216))
    assert len(content) < 200_000
    monkeypatch.setattr(json, "loads", lambda *args, **kwargs: pytest.fail("parsed twice"))
    assert unseal(content).n_samples == measured(216 * 5).n_samples
    times_s = []
    for _ in range(20):
        began = time.thread_time()
        unseal(content)
        times_s.append(time.thread_time() - began)
    assert min(times_s) < 0.01  # 1.4 ms on an idle machine
