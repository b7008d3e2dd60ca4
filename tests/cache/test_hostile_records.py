"""Records that are whole, sealed and hold anything: the record that was stored, or the documented error; no code runs."""

from __future__ import annotations

import hashlib
import json
import tempfile
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.cache import BrokenRecordError, TuningRecord, read_record, seal, unseal
from dist_tune.cache.folder import Cache
from dist_tune.cli.transfer import merge, pack, unpack
from tests.cached_records import record

pytestmark = pytest.mark.once

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["__import__('os').abort()", "../../x"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
FIELDS = [*TuningRecord.model_fields, "__class__", "extra"]


def sealed(values: object) -> bytes:
    """The file of a record of these values, with a right checksum."""
    raw = json.dumps(values).encode()
    return b'{\n"sha256": "%s",\n"record": %s\n}\n' % (hashlib.sha256(raw).hexdigest().encode(), raw)


def refusal(call: Callable[[], object]) -> str:
    """The reason of a ``BrokenRecordError``; empty without one."""
    try:
        call()
    except BrokenRecordError as error:
        return str(error)
    return ""


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(each for key, item in inner for each in paths_of(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The value with another one at a path."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


WHOLE = {"schema_version": 3, **record().model_dump(mode="json", exclude_defaults=True)}
FORGED = st.one_of(
    VALUES,
    st.tuples(st.sampled_from(paths_of(WHOLE)), VALUES).map(lambda pair: replaced(WHOLE, *pair)),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3).map(lambda more: {**WHOLE, **more}),
)


@given(FORGED)
def test_a_forged_record_is_a_record_or_refused(values: object):
    """By name of what is wrong, on one short line; and what is read can be written again."""
    reason = refusal(lambda: unseal(sealed(values)))
    assert reason.isprintable()
    assert len(reason) < 300
    if not reason:
        found = unseal(sealed(values))
        assert unseal(seal(found)) == found


@given(FORGED)
def test_a_forged_file_stays_in_the_folder(values: object):
    """Found, listed, merged from an export, set aside: no file is made outside of the cache, and none is an error."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root = Path(folder)
        cache, other = Cache(root / "cache"), Cache(root / "other")
        path = cache.store(record())
        assert path is not None
        path.write_bytes(sealed(values))
        cache.entries()
        cache.of_name("model.gemm")
        found = cache.find(record().cache_key)
        assert found is None or found.cache_key == record().cache_key
        (root / "export.json").write_bytes(sealed(values))
        for each in merge(other, [root / "export.json"]):
            assert each.outcome in ("added", "refused")
        assert {each.name for each in root.iterdir()} <= {"cache", "other", "export.json"}


@given(st.data())
def test_a_damaged_export_loses_at_most_what_is_damaged(data: st.DataObject):
    """Its records are good ones or errors of this package."""
    content = pack([record(), record(2)])
    begin, end = sorted(data.draw(st.tuples(st.integers(0, len(content)), st.integers(0, len(content)))))
    damaged = content[:begin] + data.draw(st.binary(max_size=30)) + content[end:]
    reason = refusal(lambda: list(unpack(damaged)))
    assert reason.isprintable()
    found = list(unpack(damaged)) if not reason else []
    assert [each for each in found if isinstance(each, TuningRecord)] in ([record(), record(2)], [record()], [record(2)], [])


@pytest.mark.parametrize("n_bytes", [2**24 + 1, 2**34])
def test_a_large_file_is_not_read(tmp_path: Path, n_bytes: int):
    """It costs no memory."""
    with open(tmp_path / "record", "wb") as file:
        file.truncate(n_bytes)
    tracemalloc.start()
    try:
        with pytest.raises(BrokenRecordError, match="larger than"):
            read_record(tmp_path / "record")
        (arrival,) = merge(Cache(tmp_path / "cache"), [tmp_path / "record"])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert arrival.outcome == "refused"
    assert peak < 2**26


def test_links_inside_a_folder_of_exports_are_not_followed(tmp_path: Path):
    """They may lead anywhere; a file that is named itself may be a link."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "outside.json").write_bytes(pack([record()]))
    (tmp_path / "folder" / "link.json").symlink_to(tmp_path / "outside.json")
    (refused,) = merge(Cache(tmp_path / "cache"), [tmp_path / "folder"])
    assert refused.outcome == "refused"
    assert [each.outcome for each in merge(Cache(tmp_path / "cache"), [tmp_path / "folder" / "link.json"])] == ["added"]
