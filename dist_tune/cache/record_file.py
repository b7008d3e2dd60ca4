"""The bytes of a cache file: one record, and the checksum of its bytes.

Knows the file format and refuses all else, forged files included; nothing of folders, keys or merging. Reading evaluates
nothing: JSON goes into a model that forbids unknown fields.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dist_tune.cache.records import SCHEMA_VERSION, TuningRecord
from dist_tune.output import first_mistake
from dist_tune.safe_files import RefusedFileError, read_regular

MAX_BYTES = 16 * 2**20
"""Of a file; larger files are refused unread. 216 candidates with all fields set take 0.2 MB."""
MAX_VALUES = 400_000
"""In a file, about 15,000 candidates. Each wrong value costs 2 kB and 10 us, so a forged file could exhaust the memory."""
# One layout, with the checksum over the record's raw bytes, so that any changed byte of the file is found.
_LAYOUT = re.compile(rb'\{\n"sha256": "([0-9a-f]{64})",\n"record": (\{.*\})\n\}\n', re.DOTALL)
_SCHEMA = re.compile(rb'\{\s*"schema_version":\s*(\d{1,9})\s*[,}]')
_SPACED_KEY = re.compile(rb'"[ \t\r\n]+:')
_REQUIRED = {"schema_version", "tuned_at"}
"""Fields with a default in the model, which a file must have all the same."""


class BrokenRecordError(ValueError):
    """The file holds no record of this version of dist_tune. The message is the reason, on one short line."""


class OtherSchemaError(BrokenRecordError):
    """The file is whole, but of an older or newer dist_tune."""


class UnreadableRecordError(BrokenRecordError):
    """The system refused to read the file, which may hold a record."""


def seal(record: TuningRecord) -> bytes:
    """The content of a record's file: JSON, one line for each field and each candidate; defaults are left out.

    Raises:
        BrokenRecordError: the record is too large, or holds a value that JSON has not (a NaN put into one of its dicts).
    """
    values = {"schema_version": record.schema_version} | record.model_dump(mode="json", exclude_defaults=True)
    try:
        lines = [f" {_json(name)}: {_rows(value) if name == 'candidates' else _json(value)}" for name, value in values.items()]
        raw = ("{\n" + ",\n".join(lines) + "\n}").encode()
    except ValueError as error:  # NaN, a string that is no text, an integer of thousands of digits
        raise BrokenRecordError(first_mistake(error)) from error
    content = b'{\n"sha256": "%s",\n"record": %s\n}\n' % (hashlib.sha256(raw).hexdigest().encode(), raw)
    unseal(content)
    return content


def unseal(content: bytes) -> TuningRecord:
    """The record in a file's content.

    Raises:
        OtherSchemaError: it was written by a dist_tune with another schema.
        BrokenRecordError: it is not the output of ``seal``.
    """
    if len(content) > MAX_BYTES:
        raise BrokenRecordError(f"larger than {MAX_BYTES} bytes")
    layout = _LAYOUT.fullmatch(content)
    if layout is None:
        raise BrokenRecordError("not laid out as a record" if content else "empty")
    checksum, raw = layout.groups()
    if hashlib.sha256(raw).hexdigest().encode() != checksum:
        raise BrokenRecordError("its checksum is wrong: changed or damaged after it was written")
    if raw.count(b",") > MAX_VALUES:
        raise BrokenRecordError(f"more than {MAX_VALUES} values")
    schema = _SCHEMA.match(raw)
    if schema is not None and int(schema[1]) != SCHEMA_VERSION:
        # Before the fields, which do not fit with another schema.
        raise OtherSchemaError(f"written with schema {int(schema[1])}, and this dist_tune reads schema {SCHEMA_VERSION}")
    return _parsed(raw)


def read_record(path: Path) -> TuningRecord:
    """The record in a file. A fifo, device, folder or more than 16 MiB is refused without being read.

    Raises:
        FileNotFoundError: there is none.
        UnreadableRecordError: the system refuses to read it.
        BrokenRecordError: it holds no record.
    """
    try:
        content = read_regular(path, MAX_BYTES)
    except FileNotFoundError:
        raise
    except RefusedFileError as error:
        raise BrokenRecordError(str(error.strerror)) from error
    except OSError as error:
        # A folder, a socket or a loop of links will not become a record later.
        kind = BrokenRecordError if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR) else UnreadableRecordError
        raise kind(f"cannot be read: {error.strerror}") from error
    return unseal(content)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _rows(values: list[Any]) -> str:
    return "[\n  " + ",\n  ".join(map(_json, values)) + "\n ]"


def _parsed(raw: bytes) -> TuningRecord:
    try:
        record = TuningRecord.model_validate_json(raw, strict=True)
    except ValidationError as error:
        raise BrokenRecordError(first_mistake(error)) from None  # the error holds the whole file
    if missing := _REQUIRED - record.model_fields_set:
        raise BrokenRecordError(f"lacks {' and '.join(sorted(missing))}")
    if _may_repeat_keys(raw, record):
        try:
            json.loads(raw, object_pairs_hook=_unique)
        except ValueError as error:
            raise BrokenRecordError(first_mistake(error)) from error
    return record


def _may_repeat_keys(raw: bytes, record: TuningRecord) -> bool:
    """The bytes have more ends of keys than the record has keys; true of some strings, too. Twice as fast as a second parsing."""
    models = (record, record.spent, record.environment, *record.candidates)
    n_keys = sum(len(model.model_fields_set) for model in models)
    n_keys += sum(len(each.fields) + len(each.rank_latencies_ms) for each in record.candidates)
    return raw.count(b'":') != n_keys or _SPACED_KEY.search(raw) is not None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return unique
