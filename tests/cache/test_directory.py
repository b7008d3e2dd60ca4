"""The cache directory as a folder: where it is, who may write there, what is deleted, and what is said where it cannot be."""

import errno
import os
import shutil
import socket
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from dist_tune.cache.folder import Cache
from tests.cache.test_files import file_size_limit, raising
from tests.cache_folders import files, warned
from tests.cached_records import NOON, record

pytestmark = pytest.mark.once


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@contextmanager
def without_privileges() -> Iterator[Path]:
    """A folder, while this process is no superuser: file permissions hold for it as for others."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        os.seteuid(user)
        for each in folder.rglob("*"):
            each.chmod(0o700)
        shutil.rmtree(folder)


def test_a_read_only_folder(tmp_path: Path):
    """What is there is found; nothing is stored, and what is broken stays and is named once. Each with its warning."""
    with without_privileges() as folder:
        cache = Cache(folder / "cache")
        path, broken = cache.store(record()), cache.store(record(2))
        assert path is not None
        assert broken is not None
        broken.write_bytes(b"")
        path.parent.chmod(0o555)
        with warned():
            assert cache.find(record().cache_key) == record()
        with warned("Permission denied"):
            assert cache.store(record(tuned_at=NOON + timedelta(days=1))) is None
        with warned("cannot be set aside (Permission denied)"):
            assert cache.find(record(2).cache_key) is None
            assert cache.find(record(2).cache_key) is None
        path.parent.chmod(0o755)
        path.chmod(0)
        with warned("cannot be read: Permission denied"):
            assert cache.find(record().cache_key) is None
        assert path.exists(), "a file that somebody else may read is not moved"
        cache.folder.chmod(0)
        with warned("Permission denied", "Permission denied", "Permission denied"):
            assert cache.find(record().cache_key, any_software=True) is None
            assert cache.store(record()) is None
            assert cache.entries() == []


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk(cache: Cache, monkeypatch: pytest.MonkeyPatch, step: str):
    """One warning, with what to do; the record that was there stays, and no part of a file is left."""
    cache.store(record())
    later = record(tuned_at=NOON + timedelta(days=1))
    with monkeypatch.context() as patch, warned("No space left on device. DIST_TUNE_CACHE_DIR names another folder"):
        patch.setattr(os, step, raising(OSError(errno.ENOSPC, "No space left on device")))
        assert cache.store(later) is None
    with file_size_limit(1000), warned("File too large"):
        assert cache.store(later) is None
    assert cache.find(record().cache_key) == record()
    assert len(files(cache.folder)) == 1


@pytest.mark.parametrize("where", ["file", "file/cache", "dangling/cache", "loop/cache", "x" * 300])
def test_a_folder_that_cannot_be(tmp_path: Path, where: str):
    """A file in its place or above it, a name that is too long: a warning for each record that is not kept, and no error."""
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone" / "far")
    (tmp_path / "loop").symlink_to("loop")
    cache = Cache(tmp_path / where)
    with warned("is not kept and will be repeated"):
        assert cache.store(record()) is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert cache.find(record().cache_key, any_software=True) is None
        assert (cache.siblings(record().cache_key), cache.of_name("f"), cache.entries()) == ([], [], [])
    assert cache.identity == f"{socket.gethostname()} process {os.getpid()}" or where == "file"


def test_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A user who has none, as in a container: nothing is found or kept, and no folder is called ~."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", raising(KeyError("nobody")))
    cache = Cache(Path("~/.dist_tune/autotune"))
    with warned("there is no home directory"):
        assert cache.store(record()) is None
    with warned():
        assert cache.find(record().cache_key) is None
    assert "process" in cache.identity
    assert os.listdir(tmp_path) == []


def test_the_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """~ is the user's home, and a relative folder stays where it is when the program changes its own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Cache(Path("~/c")).folder == tmp_path / "home" / "c"
    monkeypatch.chdir(tmp_path)
    cache = Cache(Path("here"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    cache.store(record())
    assert Cache(tmp_path / "here").find(record().cache_key) == record()


def test_identity(cache: Cache, tmp_path: Path):
    """Equal for two names of one folder, which it makes; different for two folders."""
    identity = cache.identity
    (tmp_path / "link").symlink_to(cache.folder)
    assert Cache(tmp_path / "link").identity == identity
    assert Cache(tmp_path / "other").identity != identity
    assert identity.startswith(socket.gethostname())


def test_remove(cache: Cache, tmp_path: Path):
    """A file of the cache, also one that is gone by now; nothing outside, by whatever path or link."""
    path = cache.store(record())
    assert path is not None
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"x")
    (cache.folder / "link").symlink_to(outside)
    (cache.folder / "leaf").symlink_to(outside / "file")
    for wrong in (outside / "file", cache.folder / ".." / "outside" / "file", cache.folder / "link" / "file", cache.folder, Path("file")):
        with pytest.raises(ValueError, match="not in the cache folder"):
            cache.remove(wrong)
    cache.remove(cache.folder / "leaf")
    assert (outside / "file").exists()
    (tmp_path / "way").symlink_to(cache.folder)
    Cache(tmp_path / "way").remove(path)
    cache.remove(path)
    assert cache.find(record().cache_key) is None
    with pytest.raises(OSError):
        cache.remove(path.parent)


def test_leftovers_are_swept_by_the_next_store(cache: Cache):
    """Temporary files of processes that were killed an hour ago and more."""
    path = cache.store(record())
    assert path is not None
    for name, age_s in (("old.tmp", 4000), ("new.tmp", 3000)):
        (path.parent / name).write_bytes(b"part")
        seconds = path.stat().st_mtime - age_s
        os.utime(path.parent / name, (seconds, seconds))
    cache.store(record(2))
    assert [name for name in files(cache.folder) if name.endswith(".tmp")] == ["model.gemm/new.tmp"]
