"""The cache directory: what is kept is found by its key, and of two records of one key the better one stays."""

import re
import shutil
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_tune.cache.folder import Cache, Entry, _place_of
from dist_tune.cache.record_file import read_record
from dist_tune.cache.records import HARDWARE, SOFTWARE, CacheKey, TuningRecord
from tests.cache_folders import files, warned
from tests.cached_records import NOON, environment, measured, record

pytestmark = pytest.mark.once

Text = st.text(max_size=150)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def test_what_is_stored_is_found(cache: Cache):
    """By another process too, as the same record; with the same one stored again, nothing changes."""
    path = cache.store(record())
    assert path == cache.path_of(record().cache_key)
    assert Cache(cache.folder).find(record().cache_key) == record()
    assert cache.store(record()) == path
    assert files(cache.folder) == [f"model.gemm/{path.name}"]


def test_making_and_asking_touch_nothing(cache: Cache):
    """A folder that is not there is an empty cache."""
    assert cache.find(record().cache_key, any_software=True) is None
    assert (cache.siblings(record().cache_key), cache.of_name("model.gemm"), cache.entries()) == ([], [], [])
    assert not cache.folder.exists()


@pytest.mark.parametrize("field", ["kernel", "source", "key", "candidates", *HARDWARE, *SOFTWARE])
def test_every_field_of_a_key_counts(cache: Cache, field: str):
    """A record that differs in one of them is another record, in another file."""
    if field in HARDWARE + SOFTWARE:
        other = record(environment=environment(**{field: 8 if isinstance(getattr(environment(), field), int) else "other"}))
    else:
        other = record(2) if field == "candidates" else record(3, **{field: "other"})
    cache.store(record())
    assert cache.find(other.cache_key) is None
    cache.store(other)
    assert (cache.find(record().cache_key), cache.find(other.cache_key)) == (record(), other)


def test_any_software(cache: Cache):
    """Failing the very record, the newest of any versions; never that of other hardware, code or candidates."""
    here = record(environment=environment(triton="3.9.0"))
    others = [record(environment=environment(cuda=None, triton=f"3.{i}"), tuned_at=NOON + timedelta(days=(i, -i)[i % 2])) for i in range(5)]
    for each in [
        *others,
        record(environment=environment(triton="3.9.0", world_size=8)),
        record(2, environment=environment(triton="3.9.0")),
    ]:
        cache.store(each)
    assert cache.find(here.cache_key) is None
    assert cache.find(here.cache_key, any_software=True) == others[4]
    cache.store(here)
    assert cache.find(here.cache_key, any_software=True) == here


def test_siblings(cache: Cache):
    """Equal but for the candidates, newest first; not the record itself, nor one of another version."""
    others = [record(n, tuned_at=NOON + timedelta(days=(n, -n)[n % 2])) for n in range(4, 8)]
    for each in [record(), *others, record(9, environment=environment(triton="3.9.0")), record(9, key="[1]")]:
        cache.store(each)
    assert [len(each.candidates) for each in cache.siblings(record().cache_key)] == [6, 4, 5, 7]


def test_lists_of_records(cache: Cache):
    """One name's, newest first; and all, in the order of their names and keys."""
    days = {"4": 0, "2": 2, "0": 1, "3": 4, "1": 3}
    for name in ("b", "a", "a/b"):
        for key, day in days.items():
            cache.store(record(kernel=name, key=key, tuned_at=NOON + timedelta(days=day)))
    assert [each.key for each in cache.of_name("a")] == ["3", "1", "2", "0", "4"]
    assert {each.kernel for each in cache.of_name("a/b")} == {"a/b"}
    assert [each.record.kernel + each.record.key for each in cache.entries()] == [
        name + key for name in ("a", "a/b", "b") for key in "01234"
    ]
    assert cache.entries()[0] == Entry(cache.path_of(record(kernel="a", key="0").cache_key), cache.of_name("a")[3])


NAMES = [
    "../../x",
    "..",
    ".",
    "",
    "/",
    "/etc/passwd",
    "<lambda>",
    "f.<locals>.<lambda>",
    "x" * 10_000,
    "a\0b",
    "日本",
    ".hidden",
    "-rf",
    "~",
    "a\nb",
    "$HOME",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_is_no_path(cache: Cache, name: str):
    """Whatever a kernel is called, its folder lies in the cache, and its record is found."""
    path = cache.store(record(kernel=name))
    assert path is not None
    assert path.parent.parent == cache.folder
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", path.parent.name)
    assert cache.find(record(kernel=name).cache_key) == record(kernel=name)
    assert cache.of_name(name) == [record(kernel=name)]


@given(Text, Text)
def test_two_names_do_not_share_a_folder(one: str, other: str):
    """Also where what is left of them without strange characters is the same."""
    paths = [Cache(Path("cache")).path_of(record(kernel=name).cache_key) for name in (one, other)]
    assert (paths[0].parent == paths[1].parent) == (one == other)
    assert Cache(Path("cache")).path_of(record(kernel="model.gemm_3-x").cache_key).parent.name == "model.gemm_3-x"


BETTER: list[tuple[TuningRecord, TuningRecord, bool, bool]] = [
    # (present, stored, whether the stored one wins, whether it wins an import); a tuning takes 10 s
    (measured(9), measured(1, tuned_at=NOON + timedelta(seconds=10)), True, False),
    (measured(9), measured(1, tuned_at=NOON + timedelta(seconds=9)), False, False),
    (measured(9), measured(10, tuned_at=NOON + timedelta(seconds=9)), True, True),
    (measured(9), measured(9, tuned_at=NOON + timedelta(seconds=9)), True, True),
    (measured(9), measured(9, tuned_at=NOON - timedelta(seconds=9)), False, False),
    (measured(9), measured(10, tuned_at=NOON - timedelta(days=9)), True, True),
    (measured(9), measured(1, tuned_at=NOON - timedelta(days=9)), False, False),
    (measured(1), measured(9, tuned_at=NOON + timedelta(days=9)), True, True),
    (measured(9), measured(1, tuned_at=NOON + timedelta(days=9)), True, False),
    (measured(9, tuned_at=datetime(9999, 12, 31, tzinfo=UTC)), measured(1), True, False),
    (measured(9), measured(1, tuned_at=datetime(1, 1, 1, tzinfo=UTC), seconds=1e300), False, False),
    (measured(1), measured(1, tuned_at=NOON + timedelta(days=9), seconds=-1e300), True, True),
]


@pytest.mark.parametrize(("present", "stored", "wins", "wins_import"), BETTER)
def test_the_better_of_two_stays(cache: Cache, present: TuningRecord, stored: TuningRecord, wins: bool, wins_import: bool):
    """Of two tunings at the same time the better measured one, otherwise the later; of imported ones always the better measured."""
    for is_import, winner in ((False, stored if wins else present), (True, stored if wins_import else present)):
        shutil.rmtree(cache.folder, ignore_errors=True)
        cache.store(present)
        assert cache.store(stored, is_import=is_import) == cache.path_of(stored.cache_key)
        assert cache.find(stored.cache_key) == winner


@pytest.mark.parametrize("is_import", [False, True])
@settings(max_examples=25)
@given(st.permutations([(n, second) for n in (1, 2, 3) for second in (0, 3, 6)]))
def test_the_order_of_storing_does_not_matter(is_import: bool, order: list[tuple[int, int]]):
    """Records of tunings that overlapped: the best and newest is there in the end, in whatever order they came."""
    with tempfile.TemporaryDirectory() as folder:
        for n, second in order[:6]:
            Cache(Path(folder)).store(measured(n, tuned_at=NOON + timedelta(seconds=second)), is_import=is_import)
        found = Cache(Path(folder)).find(measured(1).cache_key)
        assert found is not None
        assert (found.n_samples, (found.tuned_at - NOON).total_seconds()) == max(order[:6])


def test_a_key_is_found_by_its_name_alone(cache: Cache, monkeypatch: pytest.MonkeyPatch):
    """Of a thousand records of a kernel only those that may fit are opened."""
    for number in range(20):
        cache.store(record(key=f"[{number}]"))
    cache.store(record(2))
    opened: list[Path] = []

    def read(path: Path) -> TuningRecord:
        opened.append(path)
        return read_record(path)

    monkeypatch.setattr("dist_tune.cache.folder.read_record", read)
    assert cache.find(record(environment=environment(torch="x")).cache_key, any_software=True) is None
    assert len(cache.siblings(record().cache_key)) == 1
    assert len(opened) == 2


def test_versions_of_dist_tune_do_not_displace_each_other(cache: Cache, monkeypatch: pytest.MonkeyPatch):
    """A record of another schema lies elsewhere: two versions that share a folder do not set aside each other's records in turn."""
    path = cache.path_of(record().cache_key)
    monkeypatch.setattr("dist_tune.cache.folder.SCHEMA_VERSION", 99)
    assert cache.path_of(record().cache_key) != path


def test_equal_digests_are_no_equal_keys(cache: Cache, monkeypatch: pytest.MonkeyPatch):
    """A file name is twelve digits of a digest; what decides is the key itself."""
    monkeypatch.setattr("dist_tune.cache.folder._digest", lambda *values: "0" * 12)
    monkeypatch.setattr("dist_tune.cache.folder._place_of", _place_of.__wrapped__)  # places of other tests are remembered
    cache.store(record(kernel="a/b", source="other"))
    with warned():
        for key in (record(kernel="a/b").cache_key, record(kernel="a/b", environment=environment(torch="x")).cache_key):
            assert cache.path_of(key) == cache.entries()[0].path
            assert cache.find(key, any_software=True) is None
            assert cache.siblings(key) == []
        assert cache.of_name("a b") == []


def test_keys_of_text_that_is_alike(cache: Cache):
    """Fields are not run together: what moves from one to the next makes another key."""
    keys = [record(source=source, key=key).cache_key for source, key in (("ab", "c"), ("a", "bc"), ('a","b', "c"), ("a", 'b","c'))]
    assert len({cache.path_of(key) for key in keys}) == 4
    nones = [CacheKey(**{**dict(record().cache_key), "environment": environment(cuda=cuda)}) for cuda in (None, "None", "null", "")]
    assert len({cache.path_of(key) for key in nones}) == 4


FUTURE = datetime(9999, 12, 31, tzinfo=UTC)


def test_a_date_in_the_future_wins_no_comparison(cache: Cache):
    """Of a clock that was wrong, or of a forged file: the record is found, and replaced by the next tuning or by an equal one."""
    wrong = measured(9, tuned_at=FUTURE)
    cache.store(wrong)
    assert cache.find(wrong.cache_key) == wrong
    cache.store(measured(9), is_import=True)
    assert cache.find(wrong.cache_key) == measured(9)
    cache.store(wrong, is_import=True)
    assert cache.find(wrong.cache_key) == measured(9)
    here = record(environment=environment(triton="3.9.0"))
    cache.store(measured(1, environment=environment(triton="3.1"), tuned_at=FUTURE))
    assert cache.find(here.cache_key, any_software=True) == measured(9)
    assert [each.tuned_at for each in cache.of_name("model.gemm")] == [NOON, FUTURE]
