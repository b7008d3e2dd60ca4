"""What one rank says of its cache, and what it keeps, without any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dist_tune.cache.lookup import CacheLookup, LookupResult
from dist_tune.cache.records import TuningRecord, environment
from dist_tune.cache.store import Cache
from dist_tune.settings import Settings
from tests.cached_records import candidate, record

pytestmark = pytest.mark.once

TEXTS = [each.config for each in record().candidates]
NAMED = ("model.gemm", "[4096,2752,torch.bfloat16]")
SITE = "model.gemm[4096,2752,torch.bfloat16]"
HERE = environment(2, 2)


class Log:
    """As much of a logger as is used; what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.debug = self.lines.append

    def warning(self, text: str, *, shown: bool = False) -> None:
        self.lines.append(f"{shown=} {text}")


def lookup(folder: Path, *, is_used: bool = True, **settings: Any) -> CacheLookup:
    values = {"cache_dir": folder, "cache_path": "", **settings}
    made = Settings.model_construct(**{**Settings().model_dump(), **values})
    return CacheLookup(made, Log(), is_used=is_used, world_size=2, ranks_per_host=2)  # type: ignore[arg-type]  # of it only debug and warning


def found(**changes: Any) -> TuningRecord:
    """A record of this machine."""
    return record(**{"environment": HERE, **changes})


def kept(folder: Path, *records: TuningRecord) -> Path:
    for each in records:
        assert Cache(folder).store(each) is not None
    return folder


def look_up(mine: CacheLookup, texts: list[str] = TEXTS, named: tuple[str, str] = NAMED, source: str = "0123456789abcdef") -> Any:
    return mine.look_up(SITE, named, lambda: source, texts)


def asked(mine: CacheLookup) -> tuple[TuningRecord | None, LookupResult]:
    """What it finds of the site, and what it tells the others."""
    one = look_up(mine)
    return one, mine.ticket(SITE, one)


def test_what_was_kept_is_found(tmp_path: Path):
    """By the next job, which tells its key and the winner."""
    first = lookup(tmp_path)
    nothing, miss = asked(first)
    assert (nothing, miss.winner, miss.miss, miss.is_open) == (None, "", "", True)
    first.keep(found())
    one, ticket = asked(lookup(tmp_path))
    assert one == found()
    assert ticket == LookupResult(miss.key, TEXTS[1])
    assert lookup(tmp_path).source(SITE) == ""
    assert first.source(SITE) == "0123456789abcdef"


@pytest.mark.parametrize(
    ("named", "source", "texts", "differing", "is_new_shape"),
    [
        (("model.gemm", "[1]"), "0123456789abcdef", TEXTS, ["key: [1] here"], True),
        (("model.gemm", "[1]"), "0123456789abcdef", TEXTS[:2], ["key: [1] here", "candidates"], True),
        (("model.gemm", "[1]"), "f" * 16, TEXTS, ["source", "key: [1] here"], False),
        (NAMED, "f" * 16, TEXTS, ["source"], False),
        (NAMED, "0123456789abcdef", TEXTS[:2], ["candidates"], False),
        (("other.gemm", NAMED[1]), "0123456789abcdef", TEXTS, [], False),
        (NAMED, "0123456789abcdef", TEXTS, [], False),
    ],
)
def test_a_miss_tells_a_new_shape_from_a_record_that_does_not_count(
    tmp_path: Path, named: tuple[str, str], source: str, texts: list[str], differing: list[str], is_new_shape: bool
):
    """Prune rules may leave another list for another shape; another code, version or device is no matter of the shape."""
    mine = lookup(kept(tmp_path, found()))
    look_up(mine, texts, named, source)
    miss = mine.reason_of_miss(SITE)
    assert ([each in miss.reason for each in differing], miss.is_near) == ([True] * len(differing), bool(differing))
    assert miss.is_new_shape == is_new_shape


def test_a_config_that_does_not_run_closes_the_vote(tmp_path: Path):
    """The others hear that there is a record, and that this rank will not use it."""
    mine = lookup(kept(tmp_path, found()))
    one, ticket = asked(mine)
    assert mine.ticket(SITE, one, runs=False) == ticket._replace(is_open=False)


def test_a_rank_that_shall_tune_finds_nothing_and_says_so(tmp_path: Path):
    """It tells its key, under which it will keep what comes of it."""
    _, ticket = asked(lookup(kept(tmp_path, found())))
    one, told = asked(lookup(tmp_path, always_tune=True))
    assert (one, told) == (None, LookupResult(ticket.key, is_open=False))
    mine = lookup(tmp_path, always_tune=True)
    look_up(mine, TEXTS[:2])
    assert mine.prior_times(SITE, TEXTS[:2]).times == {}


def test_without_a_cache_nothing_is_touched(tmp_path: Path):
    """No folder, no key, nothing kept."""
    mine = lookup(tmp_path / "cache", is_used=False)
    assert asked(mine) == (None, LookupResult("", is_open=False))
    mine.keep(found())
    assert (mine.folder, mine.source(SITE), mine.prior_times(SITE, TEXTS).times) == ("", "", {})
    assert not (tmp_path / "cache").exists()


def test_the_folder_is_named_once_it_was_asked(tmp_path: Path):
    """Two that share it say the same; before any look-up nothing is made."""
    one, other = lookup(tmp_path / "cache"), lookup(tmp_path / "cache")
    assert one.folder == ""
    assert not (tmp_path / "cache").exists()
    asked(one)
    asked(other)
    assert one.folder == other.folder != ""


def test_where_a_record_is_required_a_miss_has_a_reason(tmp_path: Path):
    """Which field differs; that tuning was asked for; that there is no cache. A hit has none."""
    assert "There is no record of model.gemm" in asked(lookup(tmp_path, require_cache=True))[1].miss
    kept(tmp_path, found(source="f" * 16))
    assert "source: the code of model.gemm" in asked(lookup(tmp_path, require_cache=True))[1].miss
    assert "ALWAYS_TUNE" in asked(lookup(tmp_path, require_cache=True, always_tune=True))[1].miss
    assert "no cache" in asked(lookup(tmp_path, require_cache=True, is_used=False))[1].miss
    kept(tmp_path, found())
    assert asked(lookup(tmp_path, require_cache=True))[1].miss == ""


def test_other_software_is_overlooked_with_a_warning(tmp_path: Path):
    """Where that was asked for: the versions of the record and those here. Other hardware is not."""
    kept(tmp_path, found(environment=HERE.model_copy(update={"torch": "1.0", "triton": "2.7"})))
    assert asked(lookup(tmp_path))[0] is None
    mine = lookup(tmp_path, version_check=False)
    assert asked(mine)[0] is not None
    lines = mine._log.lines  # type: ignore[attr-defined]
    assert lines[0].startswith("shown=True ")
    assert f"tuned with torch 1.0, here {HERE.torch}, triton 2.7, here {HERE.triton} (DIST_TUNE_VERSION_CHECK=0)" in lines[0]
    elsewhere = kept(tmp_path / "elsewhere", found(environment=HERE.model_copy(update={"device": "another GPU"})))
    assert asked(lookup(elsewhere, version_check=False))[0] is None


def known(folder: Path, texts: list[str], *records: TuningRecord) -> tuple[dict[int, float], int | None]:
    """What it knows of these candidates: index -> reduced time, and the winner."""
    mine = lookup(kept(folder, *records))
    look_up(mine, texts)
    each = mine.prior_times(SITE, texts)
    return {i: times.kernel_ms for i, times in each.times.items()}, each.winner


def test_candidates_of_another_list_are_known_by_their_description(tmp_path: Path):
    """Whatever their order is now; with all that is needed to keep them in the new record."""
    texts = ["new", TEXTS[2], TEXTS[1]]
    assert known(tmp_path, texts, found()) == ({1: 2.1, 2: 1.1}, 2)
    assert known(tmp_path, [TEXTS[0], "new"], found()) == ({0: 0.1}, None), "without its winner"
    mine = lookup(tmp_path)
    look_up(mine, texts)
    times, original = mine.prior_times(SITE, texts).times[2], found().candidates[1]
    assert (times.closure_ms, times.spread_ms, times.n_replays) == (original.closure_ms, original.spread_ms, original.n_replays)
    assert times.rank_latencies_ms == original.rank_latencies_ms


def test_what_failed_or_was_not_measured_is_not_known(tmp_path: Path):
    """Nor is a time of zero, which no clock gives and a file may hold."""
    candidates = [
        candidate(0, latency_ms=None, failure="rank 1: no"),
        candidate(1),
        candidate(2, latency_ms=0.0),
        candidate(3, closure_ms=None),
    ]
    texts = [each.config for each in candidates]
    assert known(tmp_path, [*texts, "new"], found(candidates=candidates)) == ({1: 1.1}, 1)


def test_of_several_tunings_the_one_that_knows_most_counts(tmp_path: Path):
    """And the newest of those: a winner has beaten those of its own list, and no others."""
    small = found(candidates=[candidate(0), candidate(1)], tuned_at=found().tuned_at.replace(hour=20))
    assert known(tmp_path, [*TEXTS, "new"], small, found(winner=2)) == ({0: 0.1, 1: 1.1, 2: 2.1}, 2)
    newest = found(candidates=[candidate(i, latency_ms=5.0) for i in range(4)], winner=0, tuned_at=found().tuned_at.replace(hour=22))
    assert known(tmp_path, [*TEXTS, "new"], newest) == ({0: 5.0, 1: 5.0, 2: 5.0}, 0)


def test_a_choice_is_kept_only_if_it_was_measured(tmp_path: Path):
    """One that nothing is known of would be taken for a result for ever; where one alone runs there was no choice."""
    unmeasured = [candidate(i, latency_ms=None, closure_ms=None, n_replays=0) for i in range(3)]
    for record_, n_kept in (
        (found(candidates=unmeasured), 0),
        (found(candidates=[candidate(0), unmeasured[1], candidate(2)]), 0),
        (found(source=""), 0),
        (found(candidates=[candidate(0, latency_ms=None, failure="rank 0: no"), unmeasured[1]]), 1),
        (found(), 2),
    ):
        lookup(tmp_path).keep(record_)
        assert len(Cache(tmp_path).entries()) == n_kept


def test_a_record_that_is_kept_has_an_id(tmp_path: Path):
    """The beginning of its file's name, and of no other's: also where the candidates or the version of Triton alone differ."""
    mine, older = lookup(tmp_path), HERE.model_copy(update={"triton": "3.0.0"})
    for each in (found(), found(environment=older), found(candidates=[candidate(0), candidate(1)], winner=0), found(key="[1]")):
        mine.keep(each)
        assert len([path for path in tmp_path.glob("*/*.json") if path.stem.startswith(mine.record_id(each))]) == 1
    assert mine.record_id(found(source="")) == ""
