"""Records carried from one cache to another: many in one file, checked again one by one at the destination.

Knows the format of an exported file. The place of a record follows from the record alone, never from a name in a file.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dist_tune.cache import BrokenRecordError, Cache, TuningRecord, seal, unseal, write_whole
from dist_tune.safe_files import MAX_BYTES, Rights, read_regular

_LAYOUT = re.compile(rb'\{\n"sha256": "([0-9a-f]{64})",\n"records": (\[\n.*\n\])\n\}\n', re.DOTALL)
_HEAD = re.compile(rb'\{\n"sha256": "[0-9a-f]{64}",\n"records": \[')
_BETWEEN = re.compile(rb'(?<=\n\}),\n|,\n(?=\{\n"sha256": ")')
"""Between two records: no line within a sealed one ends or begins so."""

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
    """Many records as the content of one JSON file with a checksum.

    Raises:
        ValueError: they take more than 64 MiB.
    """
    body = b"[\n" + b",\n".join(seal(record).rstrip(b"\n") for record in records) + b"\n]"
    content = b'{\n"sha256": "%s",\n"records": %s\n}\n' % (hashlib.sha256(body).hexdigest().encode(), body)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{len(records)} records take {len(content)} bytes, and an exported file holds {MAX_BYTES}: export by --name")
    return content


def unpack(content: bytes) -> Iterator[TuningRecord | BrokenRecordError]:
    """The records in an exported file or in a single record's file; for a broken record its error.

    Raises:
        BrokenRecordError: the file as a whole is neither.
    """
    layout = _LAYOUT.fullmatch(content)
    if layout is None:
        yield unseal(content)
        return
    checksum, body = layout.groups()
    if hashlib.sha256(body).hexdigest().encode() != checksum:
        raise BrokenRecordError("its checksum is wrong: changed or damaged after it was written")
    for piece in _BETWEEN.split(body[2:-2]):
        try:
            yield unseal(piece + b"\n")
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
    if os.path.lexists(path) and not _is_export(path):
        raise FileExistsError(f"{path} exists and is no export: it is left alone")
    write_whole(path, content, rights)
    return len(content)


def _is_export(path: Path) -> bool:
    try:
        return _HEAD.match(_read(path)) is not None
    except BrokenRecordError:
        return False


def _read(path: Path, *, follows_links: bool = True) -> bytes:
    try:
        return read_regular(path, MAX_BYTES, follows_links=follows_links)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        raise BrokenRecordError(getattr(error, "strerror", None) or str(error)) from error


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
            yield from _merge_file(cache, file, follows_links=file is path)


def _merge_file(cache: Cache, path: Path, *, follows_links: bool) -> Iterator[Arrival]:
    try:
        for number, found in enumerate(unpack(_read(path, follows_links=follows_links)), 1):
            if isinstance(found, BrokenRecordError):
                yield Arrival(f"{path}, record {number}", "", "", "refused", str(found))
            else:
                yield Arrival(str(path), found.kernel, found.key, *_take_in(cache, found))
    except BrokenRecordError as error:
        yield Arrival(str(path), "", "", "refused", str(error))


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
