"""Files that are whole or not there, whatever a disk, a signal or another file in the place does;
lines of JSON; warnings.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune import autotune, files
from dist_tune.files import PRIVATE, RefusedFileError, json_bytes, read_regular, write_whole
from tests.steps import BLOCKS
from tests.worlds import on_each_rank

_plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_values = st.recursive(
    _plain,
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(), each, max_size=4),
    max_leaves=20,
)


def test_a_file_takes_the_place_of_another(tmp_path: Path):
    """The new content, no temporary file, and the permissions of any new file, or those that were
    asked for.
    """
    path = tmp_path / ("x" * 100 + ".json")
    write_whole(path, b"old", PRIVATE)
    assert path.stat().st_mode & 0o777 == 0o600
    write_whole(path, b"new" * 100_000)
    assert path.read_bytes() == b"new" * 100_000
    assert os.listdir(tmp_path) == [path.name]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_what_was_there_is_kept_where_that_is_asked_for(tmp_path: Path):
    """Under a name of its own each time; nothing where nothing was there, and a folder is no file
    to replace.
    """
    copies = [write_whole(tmp_path / "file", text.encode(), keeps_old=True) for text in "abc"]
    assert [copy and copy.read_text() for copy in copies] == [None, "a", "b"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "folder", b"", keeps_old=True)
    assert sorted(tmp_path.iterdir()) == sorted(
        [tmp_path / "file", tmp_path / "folder", *filter(None, copies)]
    )


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), KeyboardInterrupt()],
    ids=["full", "interrupted"],
)
def test_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
):
    """Whichever step fails or is interrupted, the old file is there and no other."""
    write_whole(tmp_path / "file", b"old")

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(type(error)):
        write_whole(tmp_path / "file", b"new")
    assert ((tmp_path / "file").read_bytes(), os.listdir(tmp_path)) == (b"old", ["file"])


@pytest.mark.parametrize(
    ("path", "limit_bytes"),
    [("fifo", 2**20), ("/dev/zero", 2**20), ("huge", 2**20), ("/proc/self/maps", 100)],
)
def test_what_is_no_regular_file_is_not_read(tmp_path: Path, path: str, limit_bytes: int):
    """A FIFO would wait, a device might never end, a huge file fill the memory.

    A link is followed if that is asked for.
    """
    os.mkfifo(tmp_path / "fifo")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(2**40)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(RefusedFileError):
        read_regular(tmp_path / "link", limit_bytes)
    with pytest.raises(OSError, match="symbolic link"):
        read_regular(tmp_path / "link", follows_links=False)


@given(_values)
def test_a_line_is_read_as_what_json_writes(values: Any):
    """Any plain values, on one line; numbers of any size."""
    line = json_bytes(values)
    assert json.loads(line) == json.loads(json.dumps(values))
    assert b"\n" not in line
    # What JSON does not know is text: a path by its name, a lone surrogate as a question mark,
    # integers as names of fields by their digits.
    assert json.loads(json_bytes({"folder": Path("/a"), 3: ("x",)})) == {"folder": "/a", "3": ["x"]}
    assert json_bytes({"file": "a\udcff", "folder": Path("/a")}) == b'{"file":"a?","folder":"/a"}'


# -- warnings, in a process of their own -----------------------------------------------------------


@on_each_rank(1, is_dist=False)
def test_a_warning_names_the_programs_line_and_is_given_once(rank: int):
    """And none of this package, which says nothing to its reader; where warnings are errors it is
    written to the terminal.
    """
    os.environ["DIST_TUNE_DEADLINE_S"] = "soon"
    tuned: Any = autotune(BLOCKS, None, n_warmup=0, n_repeat=1)(lambda x, block=0: x)
    with pytest.warns(UserWarning, match="DIST_TUNE_DEADLINE_S='soon' cannot be read") as told:
        tuned(3)
    assert [each.filename for each in told] == [__file__]
    with warnings.catch_warnings(), redirect_stderr(StringIO()) as shown:
        warnings.simplefilter("error")
        for _ in range(2):
            files.warn_once("an error elsewhere")
    assert shown.getvalue().count("an error elsewhere") == 1


@on_each_rank(1, is_dist=False)
def test_threads_that_log_warnings_at_once_take_each_of_them_once(rank: int):
    """A tuning and the thread of one beside the step."""
    files.texts_to_log()
    sys.setswitchinterval(1e-6)
    texts = [str(i) for i in range(20_000)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for text in texts:
            files.warn_once(text)
    with ThreadPoolExecutor(4) as pool:
        taken = [*pool.map(lambda _: files.texts_to_log(), range(4))]
    assert sorted(text for some in taken for text in some) == sorted(texts)
