"""The cache directory: what is kept is found by its key in any folder, and whatever else lies there
costs a warning and no more.
"""

import os
import re
import shutil
import socket
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.records import HARDWARE, SOFTWARE, TuningRecord, record_bytes
from dist_tune.records.store import Cache, Entry
from tests.cached_records import NOON, environment, measured, record
from tests.records.hit_program import calls_in


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@contextmanager
def warned(*words: str) -> Iterator[list[warnings.WarningMessage]]:
    """Exactly one warning for each of the words, in this order, with the word in it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
    assert [word in str(each.message) for each, word in zip(caught, words, strict=True)] == [
        True
    ] * len(words)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def kept(cache: Cache, each: TuningRecord) -> Path:
    path = cache.store(each)
    assert path is not None
    return path


# -- what is found ---------------------------------------------------------------------------------


def test_what_is_stored_is_found(cache: Cache):
    """By another process too, as the same record; of one key the latest, with any number of samples
    and any date. Asking makes nothing.
    """
    assert cache.find(record().cache_key, any_software=True) is None
    assert (cache.siblings(record().cache_key), cache.of_name("model.gemm"), cache.entries()) == (
        [],
        [],
        [],
    )
    assert not cache.folder.exists()
    for each in (
        record(),
        measured(9),
        measured(1),
        measured(5, tuned_at=NOON - timedelta(days=9)),
    ):
        path = kept(cache, each)
        assert path == cache.path_of(record().cache_key)
        assert Cache(cache.folder).find(record().cache_key) == each
    assert files(cache.folder) == [f"model.gemm/{path.name}"]


@pytest.mark.parametrize("field", ["kernel", "source", "key", "candidates", *HARDWARE, *SOFTWARE])
def test_every_field_of_a_key_counts(cache: Cache, field: str):
    """A record that differs in one of them is another record, in another file."""
    if field in HARDWARE + SOFTWARE:
        other = record(
            environment=environment(
                **{field: 8 if isinstance(getattr(environment(), field), int) else "other"}
            )
        )
    else:
        other = record(2) if field == "candidates" else record(3, **{field: "other"})
    cache.store(record())
    assert cache.find(other.cache_key) is None
    cache.store(other)
    assert (cache.find(record().cache_key), cache.find(other.cache_key)) == (record(), other)


def test_what_differs_in_some_fields_is_found_where_that_was_asked_for(cache: Cache):
    """Failing the very record, the newest of any versions; never that of other hardware or
    candidates.

    Siblings are equal but for the candidates, newest first; neither the record itself, nor one of
    another version.
    """
    here, where = (
        record(environment=environment(triton="3.9.0")),
        environment(triton="3.9.0", world_size=8),
    )
    others = [
        record(
            environment=environment(cuda=None, triton=f"3.{i}"),
            tuned_at=NOON + timedelta(days=i % 3),
        )
        for i in range(4)
    ]
    siblings = [
        record(n, tuned_at=NOON + timedelta(days=(n, -n)[n % 2]), environment=here.environment)
        for n in range(4, 8)
    ]
    for each in [
        *others,
        record(environment=where),
        *siblings,
        record(9),
        record(9, key="[1]", environment=here.environment),
    ]:
        cache.store(each)
    assert cache.find(here.cache_key) is None
    assert cache.find(here.cache_key, any_software=True) == others[2]
    cache.store(here)
    assert cache.find(here.cache_key, any_software=True) == here
    assert [len(each.candidates) for each in cache.siblings(here.cache_key)] == [6, 4, 5, 7]


def test_lists_of_records(cache: Cache):
    """One name's, newest first; and all, in the order of their names and keys.

    Two names may share a folder.
    """
    for name in ("a_b", "a", "a/b"):
        for key, day in {"2": 0, "0": 1, "1": 2}.items():
            cache.store(record(kernel=name, key=key, tuned_at=NOON + timedelta(days=day)))
    assert [each.key for each in cache.of_name("a")] == ["1", "0", "2"]
    assert [{each.kernel for each in cache.of_name(name)} for name in ("a/b", "a_b")] == [
        {"a/b"},
        {"a_b"},
    ]
    assert {path.parent.name for path, _ in cache.entries()} == {"a", "a_b"}
    assert [each.record.kernel + each.record.key for each in cache.entries()] == [
        name + key for name in ("a", "a/b", "a_b") for key in "012"
    ]
    assert cache.entries()[0] == Entry(
        cache.path_of(record(kernel="a", key="0").cache_key), cache.of_name("a")[1]
    )


def test_winners_are_read_once(cache: Cache):
    """Of records, as often as their files change; a damaged file and another name's say nothing."""
    paths = [kept(cache, record(key=key)) for key in ("[8]", "[64]")]
    found: list[list[str]] = []

    def n_read() -> int:
        counted = calls_in(
            lambda: found.append(
                sorted(each.cache_key.key for each in cache.winners("model.gemm"))
            ),
            "record_in",
        )
        return counted["record_in"]

    assert ([n_read(), n_read()], cache.winners("model.other")) == ([2, 0], [])
    paths[0].write_bytes(b"no record")
    with warned("cache file"):
        assert [n_read(), n_read()] == [1, 0]
    paths[1].unlink()
    assert (n_read(), found) == (0, [["[64]", "[8]"]] * 2 + [["[64]"]] * 2 + [[]])


def test_several_folders(cache: Cache, tmp_path: Path):
    """A record in any of them is a hit, the first folder's before others; only the first is
    written, where the others cannot be, too.
    """
    team = tmp_path / "team"
    kept(Cache(team), measured(1))
    kept(Cache(team), record(key="[1]"))
    before = {name: (team / name).read_bytes() for name in files(team)}
    both = Cache([cache.folder, tmp_path / "none", team])
    assert both.find(measured(1).cache_key) == measured(1)
    assert not cache.folder.exists()
    path = kept(both, measured(9))
    assert path.is_relative_to(cache.folder)
    assert both.find(measured(1).cache_key) == measured(9)
    assert [each.record for each in both.entries()] == [record(key="[1]"), measured(9)]
    assert [len(each.candidates) for each in both.siblings(record(2, key="[1]").cache_key)] == [3]
    assert {name: (team / name).read_bytes() for name in files(team)} == before
    with pytest.raises(ValueError, match="not in the cache folder"):
        both.remove(team / files(team)[0])
    shutil.copytree(team, cache.folder, dirs_exist_ok=True)
    assert Cache(cache.folder).find(record(key="[1]").cache_key) == record(key="[1]"), (
        "to copy files is to merge"
    )


@pytest.mark.parametrize(
    "name",
    ["../../x", "..", "", "/etc/passwd", "x" * 10_000, "a\0b", "日本", "-rf", "~"],
    ids=ascii,
)
def test_a_name_is_no_path(cache: Cache, name: str):
    """Whatever a kernel is called, its folder lies in the cache, and its record is found."""
    path = kept(cache, record(kernel=name))
    assert path.parent.parent == cache.folder
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", path.parent.name)
    assert (
        cache.find(record(kernel=name).cache_key) == cache.of_name(name)[0] == record(kernel=name)
    )


# -- what is no record -----------------------------------------------------------------------------


@given(st.integers(0, 5000), st.integers(0, 5000), st.binary(max_size=64))
def test_a_damaged_file_is_a_miss_or_a_record_of_its_key(one: int, other: int, some: bytes):
    """Never an error; it is warned of once, stays where it is, and the next record takes its
    place.
    """
    content = record_bytes(record())
    damaged = content[: min(one, other)] + some + content[max(one, other) :]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = Cache(Path(folder))
        path = kept(cache, record())
        path.write_bytes(damaged)
        for _ in range(2):
            found = cache.find(record().cache_key)
            assert found is None or found.cache_key == record().cache_key
        assert path.read_bytes() == damaged
        assert [str(path) in str(each.message) for each in caught] == [True] * (found is None)
        kept(cache, record())
        assert cache.find(record().cache_key) == record()


WHOLE = record_bytes(record())
STRANGE: dict[str, tuple[bytes, str]] = {
    "folder": (b"", "Is a directory"),
    "newer": (
        WHOLE.replace(b'"schema_version":4', b'"schema_version":99,"more":[]'),
        "schema_version",
    ),
    "deep": (
        WHOLE.replace(b'"seconds":10.0', b'"seconds":' + b"[" * 10_000 + b"]" * 10_000),
        "recursion",
    ),
    "other kernel": (record_bytes(record(kernel="\x1b[31mother")), "of another key"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_no_record_is_a_miss_and_one_warning(cache: Cache, kind: str):
    """It names the file and what to do, without terminal codes.

    A new record takes the place of all but a folder, with a copy beside it.
    """
    path, (content, reason) = kept(cache, record()), STRANGE[kind]
    path.unlink()
    if kind == "folder":
        (path / "full").mkdir(parents=True)
    else:
        path.write_bytes(content)
    with warned(reason):
        assert cache.find(record().cache_key) is None
        assert (
            cache.find(record(environment=environment(cuda=None)).cache_key, any_software=True)
            is None
        )
        assert cache.siblings(record(2).cache_key) == cache.of_name("model.gemm") == []
    assert cache.unused[path].isprintable()
    if kind != "folder":
        assert cache.store(record()) == path
        assert cache.find(record().cache_key) == record()
        (copy,) = (each for each in cache.own_files() if each != path)
        assert copy.read_bytes() == content


OLD, NEW = (f"x.{digit * 32}.tmp" for digit in "01")


def test_lists_pass_over_other_files(cache: Cache):
    """Without a word.

    What killed processes have left an hour ago and more is swept by the next store; a file of the
    user's is not.
    """
    path = kept(cache, record())
    for name in (
        "notes.json",
        f"{path.name}.broken",
        f"copy of {path.name}",
        "users.tmp",
        OLD,
        NEW,
    ):
        (path.parent / name).write_bytes(b"x")
    for name, age_s in ((OLD, 4000), ("users.tmp", 4000), (NEW, 3000)):
        os.utime(path.parent / name, (path.stat().st_mtime - age_s,) * 2)
    (cache.folder / "README").write_bytes(b"x")
    (cache.folder / "empty").mkdir()
    with warned():
        assert (
            cache.of_name("model.gemm") == [entry.record for entry in cache.entries()] == [record()]
        )
    kept(cache, record(2))
    assert [name for name in files(cache.folder) if name.endswith(".tmp")] == [
        "model.gemm/users.tmp",
        f"model.gemm/{NEW}",
    ]


def test_what_could_not_be_read_again_is_not_stored(cache: Cache):
    """There is a warning instead, and the record that was there stays."""
    cache.store(record())
    spoiled = [
        record().model_copy(update=changes)
        for changes in ({"winner": 7}, {"seconds": float("inf")}, {})
    ]
    spoiled[2].candidates[0].fields["SCALE"] = float("nan")
    with warned("is not kept"):  # once for a kernel
        assert [cache.store(each) for each in spoiled] == [None] * 3
    assert cache.find(record().cache_key) == record()


# -- the disk --------------------------------------------------------------------------------------


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


def test_a_read_only_folder():
    """What is there is found; nothing is stored, with one warning for a kernel; a folder that
    cannot be read is named.
    """
    with without_privileges() as folder:
        cache = Cache(folder / "cache")
        path = kept(cache, record())
        path.parent.chmod(0o555)
        with warned("Permission denied. DIST_TUNE_CACHE_DIR names another folder"):
            for day in (1, 2):
                assert cache.store(record(tuned_at=NOON + timedelta(days=day))) is None
        with warned():
            assert Cache([folder / "own", cache.folder]).find(record().cache_key) == record()
        cache.folder.chmod(0)
        with warned("Permission denied"):
            assert cache.find(record().cache_key) is None
            assert cache.entries() == []


@pytest.mark.parametrize("where", ["file", "file/cache", "dangling/cache", "loop/cache", "x" * 300])
def test_a_folder_that_cannot_be(tmp_path: Path, where: str):
    """A file in its place or above it, a name that is too long: one warning of records that are not
    kept, and no error.
    """
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone" / "far")
    (tmp_path / "loop").symlink_to("loop")
    cache = Cache(tmp_path / where)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cache.store(record()) is cache.store(record()) is None
        assert cache.find(record().cache_key, any_software=True) is None
        assert (cache.siblings(record().cache_key), cache.of_name("f"), cache.entries()) == (
            [],
            [],
            [],
        )
    assert ["not kept and will be repeated" in str(each.message) for each in caught].count(
        True
    ) == 1
    assert cache.identity == f"{socket.gethostname()} process {os.getpid()}" or where == "file"


def test_where_the_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """~ is the user's home, a relative folder stays where it is when the program changes its own;
    without a home nothing is kept.
    """
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Cache(Path("~/c")).folder == tmp_path / "home" / "c"
    monkeypatch.chdir(tmp_path)
    assert Cache(Path("here")).folder == tmp_path / "here"
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with warned("there is no home directory"):
        assert Cache(Path("~/.dist_tune/autotune")).store(record()) is None
    assert os.listdir(tmp_path) == []


def test_remove(cache: Cache, tmp_path: Path):
    """A file of the cache, also one that is gone by now; nothing outside, by whatever path or
    link.
    """
    path, outside = kept(cache, record()), tmp_path / "outside"
    outside.mkdir()
    (cache.folder / "link").symlink_to(outside)
    for wrong in (
        outside / "file",
        cache.folder / ".." / "outside" / "file",
        cache.folder / "link" / "file",
        cache.folder,
        Path("file"),
    ):
        with pytest.raises(ValueError, match="not in the cache folder"):
            cache.remove(wrong)
    cache.remove(path)
    cache.remove(path)
    assert cache.find(record().cache_key) is None
