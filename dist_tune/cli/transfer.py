"""Records carried from one cache to another: an exported file is a JSON list with one record a line, checked again at the destination.

The place of a record follows from the record alone, never from a name in a file. A copied record file does as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dist_tune.cache import BrokenRecordError, Cache, TuningRecord, record_bytes, record_in
from dist_tune.safe_files import MAX_BYTES, Rights, read_regular, write_whole

Outcome = Literal["added", "replaced", "kept", "refused"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """Outcome of one record, or of a file without records."""

    source: str
    """The file, with the number of the record where there are several."""
    kernel: str
    key: str
    outcome: Outcome
    reason: str


def pack(records: Sequence[TuningRecord]) -> bytes:
    """Many records as the content of one JSON file.

    Raises:
        ValueError: they take more than 64 MiB.
    """
    content = b"[\n" + b",\n".join(map(record_bytes, records)) + b"\n]\n"
    if len(content) > MAX_BYTES:
        raise ValueError(f"{len(records)} records take {len(content)} bytes, and an exported file holds {MAX_BYTES}: export by --name")
    return content


def unpack(content: bytes) -> Iterator[TuningRecord | BrokenRecordError]:
    """The records in an exported file or in a single record's file; for a broken record its error."""
    lines = content[2:].removesuffix(b"\n]\n").split(b"\n") if content.startswith(b"[\n") else [content]
    for line in lines:
        try:
            yield record_in(line.removesuffix(b","))
        except BrokenRecordError as error:
            yield error


def write_export(path: Path, records: Sequence[TuningRecord], rights: Rights | None = None) -> int:
    """Write the records to ``path``, whole or not at all, in place of an earlier export; returns the bytes written.

    Without ``rights`` the file's permissions follow the umask.

    Raises:
        FileExistsError: the file there is no export.
        OSError: it cannot be written.
        ValueError: the records take more than 64 MiB.
    """
    content = pack(records)
    path = Path(os.path.realpath(path))  # of a link the file that it leads to
    if os.path.lexists(path) and not isinstance(next(_found(path)), TuningRecord):
        raise FileExistsError(f"{path} exists and is no export: it is left alone")
    write_whole(path, content, rights)
    return len(content)


def _found(path: Path, *, follows_links: bool = True) -> Iterator[TuningRecord | BrokenRecordError]:
    try:
        content = read_regular(path, MAX_BYTES, follows_links=follows_links)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        yield BrokenRecordError(getattr(error, "strerror", None) or str(error))
    else:
        yield from unpack(content)


def merge(cache: Cache, paths: Sequence[Path]) -> Iterator[Arrival]:
    """Take in all records of these files, and of all ``*.json`` in these folders; of two with one key the better measured stays."""
    for path in paths:
        files = [path]
        if os.path.isdir(path):  # unlike Path.is_dir no error where access is denied
            files = sorted(Path(folder, name) for folder, _, names in os.walk(path) for name in names if name.endswith(".json"))
        if not files:
            yield Arrival(str(path), "", "", "refused", "there is no .json file in this folder")
        for file in files:
            # Of a folder its own files: a link in it may lead anywhere.
            for number, found in enumerate(_found(file, follows_links=file is path), 1):
                if isinstance(found, TuningRecord):
                    yield Arrival(str(file), found.kernel, found.key, *_take_in(cache, found))
                else:
                    yield Arrival(f"{file}, record {number}", "", "", "refused", str(found))


def _take_in(cache: Cache, record: TuningRecord) -> tuple[Outcome, str]:
    before = cache.find(record.cache_key)
    if before == record:
        return "kept", "the same record is there"
    if cache.store(record, is_import=True) is None:
        return "refused", f"{cache.folder} cannot be written"
    after = cache.find(record.cache_key)
    if after == record:
        return ("added", "") if before is None else ("replaced", _comparison(record, before))
    return "kept", _comparison(after, record) if after is not None else "it was removed meanwhile"


def _comparison(better: TuningRecord, other: TuningRecord) -> str:
    if better.n_samples != other.n_samples:
        return f"{better.n_samples} timed replays are better than {other.n_samples}"
    if not other.recency[0]:
        return f"the other is dated {other.tuned_at:%Y-%m-%d}, in the future"
    return f"newer: {better.tuned_at:%Y-%m-%d %H:%M} after {other.tuned_at:%Y-%m-%d %H:%M}"
