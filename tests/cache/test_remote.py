"""Records behind a URL, without ranks: what is asked, copied and written, and a store that fails in each way that there is."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dist_tune.cache import Cache, record_bytes
from dist_tune.cache import remote as module
from dist_tune.cache.store import MAX_BYTES
from dist_tune.settings import Settings
from tests.cache.test_store import kept, warned
from tests.cached_records import record

URL = "memory://team/records"
KEY = record().cache_key


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Its files, by name."""
    monkeypatch.setattr("dist_tune.files._told", set())
    module.remote_folder.cache_clear()
    yield MemoryFileSystem.store
    MemoryFileSystem.store.clear()
    module.remote_folder.cache_clear()


def named(monkeypatch: pytest.MonkeyPatch, *folders: Path | str, own: Path | str = "/dev/null/own", deadline_s: float = 20.0) -> Cache:
    """The cache of these variables."""
    monkeypatch.setenv("DIST_TUNE_CACHE_PATH", ":".join(map(str, folders)))
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(own))
    monkeypatch.setenv("DIST_TUNE_DEADLINE_S", str(deadline_s))
    return Cache.of(Settings())


def put(content: bytes = record_bytes(record()), place: str = "") -> None:
    MemoryFileSystem(skip_instance_cache=True).pipe_file(f"{URL}/{place or place_of(KEY)}", content)


def place_of(key: Any) -> str:
    return str(Cache(Path("/")).path_of(key))[1:]


def counted(monkeypatch: pytest.MonkeyPatch, name: str, before: Callable[[], object] = lambda: None) -> list[str]:
    """Paths for which a method of the store is called, after ``before``."""
    calls, method = list[str](), getattr(MemoryFileSystem, name)

    def called(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        calls.append(path)
        before()
        return method(self, path, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, name, called)
    return calls


def test_a_record_behind_a_url_is_found_and_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """If no folder has one; the copy is found next, without a question. Nothing is written behind a URL that does not stand first."""
    put()
    asked, written = counted(monkeypatch, "cat_file"), counted(monkeypatch, "pipe_file")
    cache = named(monkeypatch, tmp_path / "own", URL)
    assert [cache.find(KEY), cache.find(KEY), Cache(tmp_path / "own").find(KEY)] == [record()] * 3
    assert kept(cache, record(key="[1]")).is_relative_to(tmp_path / "own")
    assert (len(asked), written) == (1, [])


def test_a_url_that_stands_first_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: dict[str, Any]):
    """And DIST_TUNE_CACHE_DIR, or the default if that is the URL; also where this machine keeps nothing."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for cache, own in (
        (named(monkeypatch, URL, tmp_path / "shared", own=tmp_path / "own"), tmp_path / "own"),
        (named(monkeypatch, own=URL), tmp_path / "home/.dist_tune/autotune"),
    ):
        memory.clear()
        assert kept(cache, record()) == own / place_of(KEY)
        assert list(memory) == [f"/team/records/{place_of(KEY)}"]
    memory.clear()
    with warned("not kept and will be repeated"):
        assert named(monkeypatch, URL, own="/dev/null/own").store(record()) is None
    assert len(memory) == 1


def test_a_miss_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Because another machine may have written it since. A file that has gone since is a miss."""
    asked = counted(monkeypatch, "cat_file")
    cache = named(monkeypatch, tmp_path, URL)
    assert cache.find(KEY) is None
    put()
    assert (cache.find(KEY), asked) == (record(), [f"/team/records/{place_of(KEY)}"] * 2)
    (tmp_path / place_of(KEY)).unlink()
    MemoryFileSystem.store.clear()
    assert cache.find(KEY) is None


@pytest.mark.parametrize("damage", ["cut", "other", "large"])
def test_a_broken_record_behind_a_url_costs_one_warning(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Which names it; it is not copied, and the next folder counts. The store is asked for others."""
    content, reason = {
        "cut": (record_bytes(record())[:-20], "EOF"),
        "other": (record_bytes(record(key="[1]")), "it is the record of another key"),
        "large": (b" " * MAX_BYTES + record_bytes(record()), "EOF"),
    }[damage]
    put(content)
    put(record_bytes(record(key="[2]")), place_of(record(key="[2]").cache_key))
    cache = named(monkeypatch, tmp_path, URL)
    with warned(f"cache file {URL}/{place_of(KEY)} is not used: "):
        assert [cache.find(KEY), cache.find(KEY)] == [None, None]
    with warned(reason):
        monkeypatch.setattr("dist_tune.files._told", set())
        cache.find(KEY)
    assert cache.find(record(key="[2]").cache_key) == record(key="[2]")
    assert len(list(tmp_path.rglob("*.json"))) == 1


def raises(error: Exception) -> Callable[[], object]:
    def fail() -> None:
        raise error

    return fail


def test_a_store_that_refuses_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By a process, whose folders go on to count; one that may not be written is read."""
    put()
    written = counted(monkeypatch, "pipe_file", raises(PermissionError("Access Denied")))
    cache = named(monkeypatch, URL, own=tmp_path)
    with warned(f"records in {URL} are not written any more by this process, which goes on with this machine's folders: PermissionError"):
        for key in ("[1]", "[2]"):
            assert kept(cache, record(key=key)).is_relative_to(tmp_path)
    assert (len(written), cache.find(KEY)) == (1, record())
    asked = counted(monkeypatch, "cat_file", raises(RuntimeError("the endpoint\nis down")))
    with warned("not read any more by this process, which goes on with this machine's folders: RuntimeError: the endpoint"):
        assert [named(monkeypatch, URL, own=tmp_path).find(record(kernel=name).cache_key) for name in "abc"] == [None] * 3
    assert len(asked) == 1


def test_a_store_that_hangs_costs_its_limit_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A quarter of the deadline, and never more than five seconds; nothing is asked or written after that."""
    goes_on, limits = threading.Event(), list[float]()

    def folder(url: str, limit_s: float) -> module.RemoteFolder:
        limits.append(limit_s)
        return module.RemoteFolder(url, limit_s)

    monkeypatch.setattr("dist_tune.cache.store.remote_folder", folder)
    named(monkeypatch, URL, own=tmp_path, deadline_s=3600.0)
    cache = named(monkeypatch, URL, own=tmp_path, deadline_s=1.2)
    assert limits == [5.0, 0.3]
    asked, written = counted(monkeypatch, "cat_file", lambda: goes_on.wait(20.0)), counted(monkeypatch, "pipe_file")
    began = time.monotonic()
    with warned("it has not answered within 0.3 s"):
        assert [cache.find(record(kernel=name).cache_key) for name in "abc"] == [None] * 3
        kept(cache, record())
    assert time.monotonic() - began < 10.0
    goes_on.set()
    assert (len(asked), written) == (1, [])


def test_a_store_that_is_slow_is_left_alone_when_its_seconds_are_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Those of all questions together, because each of them holds up the first run; quick answers are free."""
    monkeypatch.setattr(module, "_FREE_S", 0.0)
    asked = counted(monkeypatch, "cat_file", lambda: time.sleep(0.05))
    cache = named(monkeypatch, URL, own=tmp_path, deadline_s=1.2)
    with warned("it has not answered within 0.3 s"):
        for n in range(20):
            cache.find(record(kernel=f"k{n}").cache_key)
    assert 1 < len(asked) < 8
    monkeypatch.setattr(module, "_FREE_S", 60.0)
    module.remote_folder.cache_clear()
    cache = named(monkeypatch, URL, own=tmp_path, deadline_s=1.2)
    for n in range(20):
        cache.find(record(kernel=f"k{n}").cache_key)
    assert len(asked) > 20


def test_a_store_that_has_folders_gets_the_one_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As file:// does, where s3:// has none."""
    cache = named(monkeypatch, f"file://{tmp_path}/team", own=tmp_path / "own")
    kept(cache, record())
    assert Cache(tmp_path / "team").find(KEY) == record()


@pytest.mark.parametrize(("url", "missing"), [("s3://bucket/x", "s3fs"), ("memory://x", "fsspec.core"), ("nothing://x", "")])
def test_a_missing_package_is_one_warning_that_names_it(url: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept(Cache(tmp_path), record())
    cache = named(monkeypatch, url, own=tmp_path)
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    with warned(f"{url} are not read any more"):
        assert [cache.find(record(kernel=name).cache_key) for name in ("a", "b", KEY.name)] == [None, None, record()]
    monkeypatch.setattr("dist_tune.files._told", set())
    module.remote_folder.cache_clear()
    with warned(": pip install fsspec and what it needs for this store, s3fs for s3://" if missing else "not known: nothing"):
        named(monkeypatch, url, own=tmp_path).find(record(kernel="a").cache_key)
