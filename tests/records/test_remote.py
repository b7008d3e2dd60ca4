"""Records behind a URL, without ranks: what is asked, copied and written, and a store that fails in
each way that there is.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dist_tune.records import Cache, record_bytes
from dist_tune.records.remote import RemoteFolder
from dist_tune.records.store import MAX_BYTES
from dist_tune.settings import Settings
from tests.cached_records import record
from tests.records.test_store import kept, warned

KEY = record().cache_key


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A folder of this test's in fsspec's store in memory."""
    yield f"memory://{tmp_path.name}/records"
    MemoryFileSystem.store.clear()


def named(
    monkeypatch: pytest.MonkeyPatch,
    *folders: Path | str,
    own: Path | str = "/dev/null/own",
    deadline_s: float = 3600.0,
) -> Cache:
    """The cache of these variables."""
    monkeypatch.setenv("DIST_TUNE_CACHE_PATH", ":".join(map(str, folders)))
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(own))
    monkeypatch.setenv("DIST_TUNE_DEADLINE_S", str(deadline_s))
    return Cache.of(Settings())


def put(url: str, content: bytes = record_bytes(record()), key: Any = KEY) -> None:
    MemoryFileSystem(skip_instance_cache=True).pipe_file(f"{url}/{place_of(key)}", content)


def place_of(key: Any) -> str:
    return str(Cache(Path("/")).path_of(key))[1:]


def in_memory(url: str) -> str:
    return f"{url.removeprefix('memory:/')}/{place_of(KEY)}"


def counted(
    monkeypatch: pytest.MonkeyPatch, name: str, before: Callable[[], object] = lambda: None
) -> list[str]:
    """Paths for which a method of the store is called, after ``before``."""
    calls, method = list[str](), getattr(MemoryFileSystem, name)

    def called(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        calls.append(path)
        before()
        return method(self, path, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, name, called)
    return calls


def test_a_record_behind_a_url_is_found_and_copied(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """If no folder has one; the copy is found next, without a question.

    Nothing is written behind a URL that does not stand first.
    """
    put(url)
    asked, written = counted(monkeypatch, "cat_file"), counted(monkeypatch, "pipe_file")
    cache = named(monkeypatch, tmp_path / "own", url)
    assert [cache.find(KEY), cache.find(KEY), Cache(tmp_path / "own").find(KEY)] == [record()] * 3
    assert kept(cache, record(key="[1]")).is_relative_to(tmp_path / "own")
    assert (len(asked), written) == (1, [])


def test_a_url_that_stands_first_is_written(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """And DIST_TUNE_CACHE_DIR, or the default if that is the URL; also where this machine keeps
    nothing.
    """
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for cache, own in (
        (named(monkeypatch, url, tmp_path / "shared", own=tmp_path / "own"), tmp_path / "own"),
        (named(monkeypatch, own=url), tmp_path / "home/.dist_tune/autotune"),
    ):
        MemoryFileSystem.store.clear()
        assert kept(cache, record()) == own / place_of(KEY)
        assert list(MemoryFileSystem.store) == [in_memory(url)]
    MemoryFileSystem.store.clear()
    with warned("not kept and will be repeated"):
        assert named(monkeypatch, url, own=f"/dev/null/{tmp_path.name}").store(record()) is None
    assert len(MemoryFileSystem.store) == 1


def test_a_miss_is_asked_for_again(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Because another machine may have written it since. A file that has gone since is a miss."""
    asked = counted(monkeypatch, "cat_file")
    cache = named(monkeypatch, tmp_path, url)
    assert cache.find(KEY) is None
    put(url)
    assert (cache.find(KEY), asked) == (record(), [in_memory(url)] * 2)
    (tmp_path / place_of(KEY)).unlink()
    MemoryFileSystem.store.clear()
    assert cache.find(KEY) is None


BROKEN: dict[bytes, str] = {
    record_bytes(record())[:-20]: "EOF",
    record_bytes(record(key="[1]")): "it is the record of another key",
    b" " * MAX_BYTES + record_bytes(record()): "EOF",
}


@pytest.mark.parametrize(("content", "reason"), BROKEN.items(), ids=["cut", "other", "large"])
def test_a_broken_record_behind_a_url_costs_one_warning(
    content: bytes, reason: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Which names it; it is not copied, and the next folder counts.

    The store is asked for others.
    """
    other = record(key="[2]")
    put(url, content)
    put(url, record_bytes(other), other.cache_key)
    cache = named(monkeypatch, tmp_path, url)
    with warned(f"cache file {url}/{place_of(KEY)} is not used: ") as told:
        assert [cache.find(KEY), cache.find(KEY), cache.find(other.cache_key)] == [
            None,
            None,
            other,
        ]
    assert reason in str(told[0].message)
    assert len(list(tmp_path.rglob("*.json"))) == 1


def raises(error: Exception) -> Callable[[], object]:
    def fail() -> None:
        raise error

    return fail


def test_a_store_that_refuses_is_asked_once(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By a process, whose folders go on to count; one that may not be written is read."""
    put(url)
    written = counted(monkeypatch, "pipe_file", raises(PermissionError("Access Denied")))
    cache = named(monkeypatch, url, own=tmp_path)
    with warned(
        f"records in {url} are not written any more by this process, which goes on with this"
        " machine's folders: PermissionError"
    ):
        for key in ("[1]", "[2]"):
            assert kept(cache, record(key=key)).is_relative_to(tmp_path)
    assert (len(written), cache.find(KEY)) == (1, record())
    asked = counted(monkeypatch, "cat_file", raises(RuntimeError("the endpoint\nis down")))
    with warned(
        "not read any more by this process, which goes on with this machine's folders:"
        " RuntimeError: the endpoint"
    ):
        assert [
            named(monkeypatch, url, own=tmp_path).find(record(kernel=name).cache_key)
            for name in "abc"
        ] == [None] * 3
    assert len(asked) == 1


def test_a_store_that_hangs_is_left_behind_once(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """When its time, a quarter of the deadline, is over; nothing is asked or written after that."""
    is_asked, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        is_asked.set()
        goes_on.wait(20.0)

    asked, written = counted(monkeypatch, "cat_file", hang), counted(monkeypatch, "pipe_file")
    cache = named(monkeypatch, url, own=tmp_path, deadline_s=1.2)
    with warned("it has not answered within 0.3 s"):
        assert [cache.find(record(kernel=name).cache_key) for name in "abc"] == [None] * 3
        kept(cache, record())
    assert is_asked.wait(60.0)
    goes_on.set()
    assert (len(asked), written) == (1, [])


@pytest.fixture
def passed_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still but for the seconds that are put there."""
    passed = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: sum(passed))
    return passed


@pytest.mark.parametrize(("deadline_s", "limit"), [(16.0, "4 s"), (3600.0, "5 s")])
def test_a_store_that_is_slow_is_left_alone_when_its_seconds_are_spent(
    deadline_s: float,
    limit: str,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    passed_s: list[float],
):
    """A quarter of the deadline and never more than five, of all questions together, because each
    of them holds up the first run.
    """

    def slowly() -> None:
        passed_s.append(2.5)
        threading.Event().wait(0.02)  # longer than no time at all, which is then left for an answer

    asked, cache = (
        counted(monkeypatch, "cat_file", slowly),
        named(monkeypatch, url, own=tmp_path, deadline_s=deadline_s),
    )
    with warned(f"it has not answered within {limit}"):
        for n in range(40):
            cache.find(record(kernel=f"k{n}").cache_key)
    assert len(asked) < 40


def test_quick_answers_are_free(url: str, monkeypatch: pytest.MonkeyPatch, passed_s: list[float]):
    """However many there are: no store that answers so soon is slow."""
    remote = RemoteFolder(url, limit_s=60.0)
    asked = counted(monkeypatch, "cat_file", lambda: passed_s.append(0.19))
    assert ([remote.read(str(n), 9) for n in range(400)], len(asked)) == ([None] * 400, 400)


def test_a_store_that_has_folders_gets_the_one_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As file:// does, where s3:// has none."""
    cache = named(monkeypatch, f"file://{tmp_path}/team", own=tmp_path / "own")
    kept(cache, record())
    assert Cache(tmp_path / "team").find(KEY) == record()


@pytest.mark.parametrize(
    ("url", "missing", "told"),
    [
        (
            "s3://bucket/x",
            "s3fs",
            ": pip install fsspec and what it needs for this store, s3fs for s3://",
        ),
        ("memory://x", "fsspec.core", ": pip install fsspec"),
        ("nothing://x", "no_module", "not known: nothing"),
    ],
)
def test_a_missing_package_is_one_warning_that_names_it(
    url: str, missing: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kept(Cache(tmp_path), record())
    cache = named(monkeypatch, url, own=tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    with warned(f"{url} are not read any more") as warning:
        assert [cache.find(record(kernel=name).cache_key) for name in ("a", "b", KEY.name)] == [
            None,
            None,
            record(),
        ]
    assert told in str(warning[0].message)
