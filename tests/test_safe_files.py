"""Files that are whole or not there, whatever a disk, a signal or another file in the place does."""

import os
from pathlib import Path

import pytest

from dist_tune.safe_files import PRIVATE, RefusedFileError, read_regular, write_whole

pytestmark = pytest.mark.once


def test_a_file_takes_the_place_of_another(tmp_path: Path):
    """The new content, no temporary file, and the permissions of any new file, or those that were asked for."""
    path = tmp_path / ("x" * 100 + ".json")
    write_whole(path, b"old", PRIVATE)
    assert path.stat().st_mode & 0o777 == 0o600
    write_whole(path, b"new" * 100_000)
    assert path.read_bytes() == b"new" * 100_000
    assert os.listdir(tmp_path) == [path.name]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "interrupted"])
def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException):
    """Whichever step fails or is interrupted, the old file is there and no other."""
    write_whole(tmp_path / "file", b"old")

    def fail(*args: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(type(error)):
            write_whole(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_what_is_no_regular_file_is_not_read(tmp_path: Path):
    """A FIFO would wait, a device might never end, a huge file fill the memory."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "endless").symlink_to("/proc/self/maps")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(2**40)
    for name in ("fifo", "device", "huge"):
        with pytest.raises(RefusedFileError):
            read_regular(tmp_path / name)
    with pytest.raises(RefusedFileError):
        read_regular(tmp_path / "endless", max_bytes=100)
    with pytest.raises(OSError, match="symbolic link"):
        read_regular(tmp_path / "endless", follows_links=False)
