"""Files that are whole or not there: what a full disk, a read-only folder, a signal or another holder of the lock leaves behind."""

import errno
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dist_tune.cache import files
from dist_tune.cache.files import STALE_S, locked, sweep, write_whole

pytestmark = pytest.mark.once


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process can grow beyond it, as on a disk that fills up in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*args: object, **kwargs: object) -> Any:
        raise error

    return fail


def test_a_file_takes_the_place_of_another(tmp_path: Path):
    """The new content, no temporary file, and the permissions of any new file."""
    path = tmp_path / ("x" * 100 + ".json")
    write_whole(path, b"old")
    write_whole(path, b"new" * 100_000)
    assert path.read_bytes() == b"new" * 100_000
    assert os.listdir(tmp_path) == [path.name]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_disk_that_fills_up_leaves_what_was_there(tmp_path: Path):
    """Half of the content was written when there was no more room."""
    path = tmp_path / "file"
    write_whole(path, b"old")
    with file_size_limit(10_000), pytest.raises(OSError) as caught:
        write_whole(path, b"new" * 100_000)
    assert caught.value.errno == errno.EFBIG
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=["full", "interrupted"])
def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException):
    """Whichever step fails or is interrupted, the old file is there and no other."""
    path = tmp_path / "file"
    write_whole(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, step, raising(error))
        with pytest.raises(type(error)):
            write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_the_content_is_on_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Flushed, synced, renamed, and then the folder synced: a power cut finds the old file or the new one."""
    steps: list[str] = []
    sync, rename = os.fsync, os.replace

    def replace(*paths: Path) -> None:
        steps.append("rename")
        rename(*paths)

    def fsync(descriptor: int) -> None:
        steps.append(f"sync {os.fstat(descriptor).st_size}" if os.path.isfile(f"/proc/self/fd/{descriptor}") else "sync folder")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_whole(tmp_path / "file", b"12345")
    assert steps == ["sync 5", "rename", "sync folder"]


def test_a_folder_that_cannot_be_synced_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Some network file systems cannot; the file is in its place by then."""
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_whole(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


def test_old_temporary_files_are_swept(tmp_path: Path):
    """Those of an hour ago, not those that another process may be writing; and what is no file is left alone."""
    now = time.time()
    for name, age in (("old.tmp", STALE_S + 1), ("new.tmp", STALE_S - 1), ("old.json", 2 * STALE_S)):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (now - age, now - age))
    (tmp_path / "folder.tmp").mkdir()
    os.utime(tmp_path / "folder.tmp", (0, 0))
    sweep(tmp_path, now)
    assert sorted(os.listdir(tmp_path)) == ["folder.tmp", "new.tmp", "old.json"]
    sweep(tmp_path / "gone", now)


def test_a_lock_excludes_threads(tmp_path: Path):
    """Four threads count in a file, each number read and written under the lock; none is lost."""
    count = tmp_path / "count"
    count.write_text("0")

    def add() -> None:
        for _ in range(10):
            with locked(tmp_path):
                number = int(count.read_text())
                time.sleep(0.0005)
                count.write_text(str(number + 1))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count.read_text() == "40"


def test_a_lock_that_is_not_let_go_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A holder that was stopped costs the time-out, not the tuning."""
    monkeypatch.setattr(files, "LOCK_TIMEOUT_S", 0.1)
    holds, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        with locked(tmp_path):
            holds.set()
            may_go.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert holds.wait(10)
        began = time.monotonic()
        with locked(tmp_path):
            assert 0.05 < time.monotonic() - began < 5
    finally:
        may_go.set()
        thread.join()


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "No locks available"), NotImplementedError("no locks here")])
def test_a_refused_lock_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception):
    """A file system that has no locks keeps nobody from writing, and no error within is taken for a refusal."""
    monkeypatch.setattr("dist_tune.cache.files.FileLock.acquire", raising(error))
    with locked(tmp_path):
        pass
    with pytest.raises(OSError, match="of the body"), locked(tmp_path):
        raise OSError("of the body")
    with locked(tmp_path / "gone"):
        pass
