"""The cache directory: whatever else lies where a record should be costs a warning and no more."""

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.cache.folder import Cache
from dist_tune.cache.record_file import seal
from tests.cache_folders import warned
from tests.cached_records import NOON, environment, forged, record

pytestmark = pytest.mark.once


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@given(st.sampled_from(["flip", "delete", "insert", "truncate", "append", "swap", "whatever"]), st.data())
def test_no_damage_is_survived(kind: str, data: st.DataObject):
    """The file is set aside with one warning, and there is no record; never an error, never a wrong record."""
    content = seal(record())
    begin, end = sorted(data.draw(st.tuples(st.integers(0, len(content)), st.integers(0, len(content)))))
    middle = (begin + end) // 2
    some = data.draw(st.binary(min_size=1, max_size=64))
    damaged = {
        "flip": content[:begin] + bytes(byte ^ some[0] for byte in content[begin:end]) + content[end:],
        "delete": content[:begin] + content[end:],
        "insert": content[:begin] + some + content[begin:],
        "truncate": content[:begin],
        "append": content + some,
        "swap": content[:begin] + content[middle:end] + content[begin:middle] + content[end:],
        "whatever": some,
    }[kind]
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(Path(folder))
        path = cache.store(record())
        assert path is not None
        path.write_bytes(damaged)
        if damaged == content:
            assert cache.find(record().cache_key) == record()
            return
        with warned(path.name):
            assert cache.find(record().cache_key) is None
        assert not path.exists()
        assert Path(f"{path}.broken").read_bytes() == damaged
        with warned():
            assert cache.find(record().cache_key) is None
            assert cache.store(record()) == path
            assert cache.find(record().cache_key) == record()


def put(kind: str, path: Path) -> None:
    """Put something strange where the record was."""
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        (path / "full").mkdir(parents=True)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "huge":
        with open(path, "wb") as file:
            file.truncate(2**34)
    elif kind == "other schema":
        path.write_bytes(forged(b'{"schema_version": 2}'))
    elif kind == "deep":
        path.write_bytes(forged(b'{"schema_version": 3, "seconds": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"))
    elif kind == "other record":
        path.write_bytes(seal(record(key="[1]")))
    elif kind == "other kernel":
        path.write_bytes(seal(record(kernel="other.gemm")))
    elif kind == "better versions":
        path.write_bytes(seal(record(environment=environment(triton="3.9.0"))))


STRANGE = {
    "fifo": "not a regular file", "folder": "Is a directory", "loop": "cannot be read", "huge": "larger than", "deep": "recursion",
    "other schema": "written with schema 2", "other record": "of another key", "other kernel": "of another key",
    "better versions": "of another key",
}  # fmt: skip


@pytest.mark.parametrize(("kind", "reason"), STRANGE.items())
@pytest.mark.parametrize("call", ["find", "any_software", "siblings", "store"])
def test_what_is_no_record_is_set_aside(cache: Cache, kind: str, reason: str, call: str):
    """Whoever comes upon it first says so, once, and its place is free; what was set aside before makes room."""
    path = cache.store(record())
    assert path is not None
    (path.parent / f"{path.name}.broken").write_text("from before")
    put(kind, path)
    with warned(reason):
        if call == "store":
            assert cache.store(record()) == path
        elif call == "siblings":
            assert cache.siblings(record(2).cache_key) == []
        elif call == "any_software":
            assert cache.find(record(environment=environment(cuda=None)).cache_key, any_software=True) is None
        else:
            assert cache.find(record().cache_key) is None
    assert os.path.lexists(path) == (call == "store")
    asides = sorted(each.name for each in path.parent.iterdir() if each.name.endswith(".broken"))
    assert len(asides) == (2 if kind == "folder" else 1), "a folder cannot take the place of a file"
    assert all(name.startswith(path.name) for name in asides)
    with warned():
        cache.store(record())
        assert cache.find(record().cache_key) == record()


def test_a_second_folder_in_its_place_is_set_aside_too(cache: Cache):
    """A folder cannot take the place of another one, so it gets a name of its own."""
    path = cache.path_of(record().cache_key)
    for _ in range(2):
        (path / "full").mkdir(parents=True)
        with warned("Is a directory"):
            assert cache.find(record().cache_key) is None
    assert len([each for each in path.parent.iterdir() if each.name.endswith(".broken")]) == 2


def test_a_good_record_is_not_set_aside_for_a_bad_one(cache: Cache, monkeypatch: pytest.MonkeyPatch):
    """Between the reading of a broken file and its setting aside, another process stored a good one."""
    path = cache.store(record())
    assert path is not None
    path.write_bytes(b"broken")
    lock = os.path.realpath(cache.folder)

    @contextmanager
    def after_another(folder: Path) -> Iterator[None]:
        assert os.path.realpath(folder).startswith(lock)
        path.write_bytes(seal(record()))
        yield

    monkeypatch.setattr("dist_tune.cache.folder.locked", after_another)
    with warned():
        assert cache.find(record().cache_key) == record()


def test_lists_leave_broken_files_where_they_are(cache: Cache):
    """They say so once, and list the others; files that are none of the cache's they do not mention."""
    cache.store(record(2))
    path = cache.store(record())
    assert path is not None
    path.write_bytes(forged(b'{"schema_version": 99}'))
    for name in ("notes.json", f"{path.name}.broken", f"copy of {path.name}", f"{path.stem}.tmp"):
        (path.parent / name).write_bytes(b"x")
    (cache.folder / "README").write_bytes(b"x")
    (cache.folder / "empty").mkdir()
    with warned("written with schema 99"):
        assert cache.of_name("model.gemm") == [record(2)]
        assert [entry.record for entry in cache.entries()] == [record(2)]
    assert path.exists()
    with warned("written with schema 99"):
        assert cache.find(record().cache_key) is None
    assert not path.exists()


def test_a_record_that_could_not_be_read_again_is_not_stored(cache: Cache):
    """There is a warning instead, and the better record stays."""
    cache.store(record())
    spoiled = record(tuned_at=NOON + timedelta(days=1))
    spoiled.candidates[0].fields["SCALE"] = float("nan")
    with warned("not JSON compliant"):
        assert cache.store(spoiled) is None
    assert cache.find(record().cache_key) == record()


def test_a_warning_holds_no_terminal_codes(cache: Cache):
    """Names come from a file that anybody may have written."""
    path = cache.store(record())
    assert path is not None
    path.write_bytes(seal(record(kernel="\x1b[31m", key="\x1b[0m")))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cache.find(record().cache_key) is None
    assert str(caught[0].message).isprintable()
