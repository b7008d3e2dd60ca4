"""``dist-tune cache path``, ``ls``, ``show`` and ``explain``: tables and JSON documents."""

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dist_tune.cache import records
from dist_tune.cache.records import Seconds, TuningRecord
from dist_tune.cache.store import Cache
from dist_tune.search import NOT_TRIED
from tests.cached_records import candidate, environment, record
from tests.cli_answers import Answers, keep

pytestmark = pytest.mark.once


def test_path_is_nothing_but_the_path(cache: Cache, ask: Answers):
    """For ``cd "$(dist-tune cache path)"``; asking makes no folder."""
    assert ask("path") == f"{cache.folder}\n"
    assert ask.json("path") == {"path": str(cache.folder), "exists": False}
    assert not cache.folder.exists()


def test_ls_says_what_won_where_and_when(cache: Cache, ask: Answers):
    """A line for each record, under the environment that it was made in."""
    fresh = datetime.now(UTC) - timedelta(hours=2, minutes=5)
    stems = keep(
        cache,
        record(tuned_at=fresh),
        record(key="[8192]", tuned_at=fresh),
        record(environment=environment(world_size=16, ranks_per_host=8, device_count=8, cuda=None)),
    )
    out = ask("ls")
    first, second, third = (next(line for line in out.splitlines() if stem[:8] in line) for stem in stems)
    for word in ("model.gemm", "[4096,2752,bfloat16]", "1.1000", "BLOCK_M=32 num_warps=4", "2 h", " 3 "):
        assert word in first
    assert "[8192]" in second
    assert " d " in third
    assert "16 ranks, 8 per host, on 8 x NVIDIA H200 · Python 3.11 · torch 2.13.0 · triton 3.6.0 · no CUDA" in out
    assert out.count("4 ranks on 4 x NVIDIA H200") == 1
    assert out.index("16 ranks") < out.index("4 ranks on"), "the newest at the end"
    assert out.splitlines()[-1].startswith("3 records, ")


def test_ls_of_nothing_is_no_error(cache: Cache, ask: Answers):
    assert ask("ls") == f"no records in {cache.folder}\n"
    assert ask.json("ls") == {"path": str(cache.folder), "records": [], "damaged": []}


def test_ls_for_programs_has_every_record(cache: Cache, ask: Answers):
    (stem,) = keep(cache, record())
    (row,) = ask.json("ls")["records"]
    assert (row["stem"], row["id"], row["path"]) == (stem, stem[:8], str(cache.path_of(record().cache_key)))
    assert (row["kernel"], row["key"]) == ("model.gemm", "[4096,2752,torch.bfloat16]")
    assert row["winner"] == {"index": 1, "config": record().best.config, "fields": record().best.fields}
    assert (row["latency_ms"], row["n_candidates"], row["n_dropped"], row["n_samples"]) == (1.1, 3, 0, 15)
    assert row["environment"] == environment().model_dump()
    assert datetime.fromisoformat(row["tuned_at"]) == record().tuned_at


def test_a_line_of_a_pipe_is_a_record(cache: Cache, ask: Answers):
    """Nothing is wrapped, cut or padded on its way to grep, however long a config is."""
    config = " ".join(f"BLOCK_{index}=128" for index in range(14))
    keep(cache, record(candidates=[candidate(0, config=config), candidate(1, config=config)]))
    lines = ask("ls").splitlines()
    assert sum(config in line for line in lines) == 1
    assert all(line == line.rstrip() for line in lines)


def test_a_narrow_terminal_loses_no_digit(cache: Cache, ask: Answers, monkeypatch: pytest.MonkeyPatch):
    """There the terminal breaks lines; a table that fits itself in would cut the numbers."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    keep(cache, record())
    assert "1.1000" in ask("ls")
    out = ask("show", "gemm")
    for word in ("0.1000", "1.1000", "2.1000", "96 KiB", "255"):
        assert word in out


def test_facts_fit_a_terminal_of_40_columns(cache: Cache, ask: Answers, monkeypatch: pytest.MonkeyPatch):
    """A wide table beside them makes them no wider, and no line is filled with blanks, which a narrow terminal breaks into empty lines."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    keep(cache, record())
    lines = re.sub("\x1b\\[[0-9;]*m", "", ask("show", "gemm")).splitlines()
    table = next(k for k, line in enumerate(lines) if "kernel" in line and "behind" in lines[k + 1])
    assert [line for line in lines[:table] if len(line) > 40] == []
    assert [line for line in lines if line != line.rstrip()] == []


# -- show and what KEY stands for ------------------------------------------------------------------------------------


def test_show_tells_all_of_one_tuning(cache: Cache, ask: Answers):
    """Candidates from fastest to slowest with all that was measured, the dropped ones last with the reason, the winner marked."""
    rows = [
        candidate(0, latency_ms=None, rank_latencies_ms={}, failure="rank 1: OutOfResources:\n shared memory"),
        candidate(1, latency_ms=0.25, left=None, rank_latencies_ms={0: 0.25, 7: 0.2}, shared_bytes=232448),
        candidate(2, latency_ms=0.2525, n_spills=12, left="rung 2"),
    ]
    keep(cache, record(candidates=rows, winner=1))
    out = ask("show", "gemm")
    table = out.splitlines()[-3:]
    assert [line.split()[0] for line in table] == [">", "2", "0"]
    assert table[0].split()[:6] == [">", "1", "0.2500", "0.0100", "1.3000", "0.2000"]
    assert table[0].endswith("winner")
    for word in ("+1.0%", "12"):
        assert word in table[1]
    assert table[2].endswith("rank 1: OutOfResources: shared memory")
    for word in ("slowest rank 0, fastest 0.2000 ms", "227 KiB", "10.0 s (race 8.0)", "90 replays of step", "2026-03-01 12:00:00 UTC"):
        assert word in out
    told = "3 tried: 1 in the finals, 1 raced out, 1 cannot run here (shared memory)"
    assert f"{told}; all with num_warps=4 FAST=True MODE='x' NONE=None" in out


def test_what_was_never_tried_has_not_left_the_race(cache: Cache, ask: Answers):
    """A guided search tries a part of a large space; the rest is named as such, by the number and in each row."""
    bare: dict[str, Any] = {"latency_ms": None, "spread_ms": None, "closure_ms": None, "n_replays": 0, "rank_latencies_ms": {}}
    keep(
        cache,
        record(candidates=[candidate(0, left=None), candidate(1, **bare, left=NOT_TRIED), candidate(2, **bare, left=NOT_TRIED)], winner=0),
    )
    out = ask("show", "gemm")
    assert "1 tried: 1 timed, 2 untried" in out
    assert "left the race" not in out


def test_show_for_programs_is_the_whole_record(cache: Cache, ask: Answers):
    (stem,) = keep(cache, record())
    (only,) = ask.json("show", stem)["records"]
    assert TuningRecord.model_validate_json(json.dumps(only["record"])) == record()


def test_show_without_measured_times(cache: Cache, ask: Answers):
    """The only candidate that runs is never timed; columns that say nothing are left out."""
    bare: dict[str, Any] = {"latency_ms": None, "spread_ms": None, "closure_ms": None, "n_replays": 0, "rank_latencies_ms": {}}
    bare |= {"shared_bytes": None, "n_regs": None, "n_spills": None, "fields": {}, "left": None}
    keep(cache, record(candidates=[candidate(0, **bare)], winner=0))
    out = ask("show", "gemm")
    assert "not measured" in out
    assert out.splitlines()[-1].split() == [">", "0", "BLOCK_M=16", "num_warps=4", "SCALE=0", "winner"]
    assert "regs" not in out


def test_imports_that_a_source_leaves_out_are_shown(cache: Cache, ask: Answers):
    """A change of their code is not noticed, and the page says so."""
    (stem,) = keep(cache, record(not_followed=["helper.work", "import_module(...)"]))
    for command in ("show", "explain"):
        assert "without helper.work, import_module(...): if these change, the record still counts" in ask(command, stem)
        assert ask.json(command, stem)
    (other,) = keep(cache, record(key="[8192]"))
    assert "without helper" not in ask("show", other)


def test_a_field_in_brackets_is_a_heading(cache: Cache, ask: Answers):
    """The name of a field is no markup of the table."""
    keep(cache, record(candidates=[candidate(index, fields={"[bold]M": index, "N": -index}) for index in range(2)]))
    assert "[bold]M" in ask("show", "gemm")


@pytest.mark.parametrize("name", ["stem", "file", "prefix", "first letter", "kernel", "last part"])
def test_a_record_has_many_names(cache: Cache, ask: Answers, name: str):
    """The file's name or any beginning of it that is its own, and the kernel's with or without its module."""
    stem, _ = keep(cache, record(), record(kernel="other"))
    key = {"stem": stem, "file": f"{stem}.json", "prefix": stem[:5], "first letter": stem[0], "kernel": "model.gemm", "last part": "gemm"}[
        name
    ]
    assert [each["stem"] for each in ask.json("show", key)["records"]] == [stem]


def test_show_of_several_is_a_list(cache: Cache, ask: Answers):
    """One has to be named: each has an id that is its own, also where two files begin alike."""
    stems = keep(cache, *(record(environment=environment(triton=f"3.{minor}.0")) for minor in range(18)))
    assert len({stem[:12] for stem in stems}) == 1
    assert ask("show", "model.gemm").splitlines()[-1] == "18 records of model.gemm: name one by its id"
    ids = [each["id"] for each in ask.json("show", "gemm")["records"]]
    assert len(set(ids)) == 18
    for short in ids:
        (only,) = ask.json("show", short)["records"]
        assert only["id"] == short


@pytest.mark.parametrize("command", ["show", "explain", "clear"])
def test_the_beginning_of_several_ids_is_refused(cache: Cache, ask: Answers, command: str):
    """A beginning shared by several ids names no record, least of all one to delete; the ids are listed."""
    stems = keep(cache, record(), record(environment=environment(triton="3.9.0")))
    ask(command, stems[0][:12], *(["--yes"] if command == "clear" else []), code=1)
    assert f"2 ids begin with {stems[0][:12]}" in ask.err
    for stem in stems:
        assert stem[:14] in ask.err
    assert len(cache.entries()) == 2


def test_a_kernel_called_like_an_id_is_found_first(cache: Cache, ask: Answers):
    """A name is chosen by a person; the hexadecimal "added" may begin a file's name by chance."""
    (stem,) = keep(cache, record())
    keep(cache, record(kernel=stem[:6]))
    assert [each["record"]["kernel"] for each in ask.json("show", stem[:6])["records"]] == [stem[:6]]


@pytest.mark.parametrize(("key", "hint"), [("gem", "model.gemm"), ("attentoin", "attention"), ("", "ls"), ("zzz", "ls")])
@pytest.mark.parametrize("command", ["show", "explain", "clear"])
def test_what_is_not_there_is_not_found(cache: Cache, ask: Answers, command: str, key: str, hint: str):
    """Exit code 1, and what may have been meant; for programs the same as JSON."""
    keep(cache, record(), record(kernel="layers.attention"))
    ask(command, key, code=1)
    assert ask.out == ""
    assert "nothing is called" in ask.err
    assert hint in ask.err
    assert ask.json(command, key, code=1)["error"] in " ".join(ask.err.split())


# -- explain ---------------------------------------------------------------------------------------------------------


def here(**changes: Any) -> dict[str, Any]:
    return {"environment": records.environment(world_size=2, ranks_per_host=2).model_copy(update=changes)}


def test_explain_compares_field_by_field(cache: Cache, ask: Answers):
    """The record's value, this machine's, and which differ; what only the program knows is said to be so."""
    keep(cache, record(environment=environment(triton="2.0.0", cuda="1.0")))
    out = ask("explain", "gemm")
    assert "1 record would miss here: device, torch, triton and cuda differ" in out
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith("  ")}
    assert lines["triton"] == ["2.0.0", here()["environment"].triton, "differs"]
    assert "python" not in lines
    assert lines["world_size"][:2] == ["4", "?"]
    assert f"{record().source}  {record().cache_key.candidates} (3)" in out
    assert "DIST_TUNE_REQUIRE_CACHE=1" in out


@pytest.mark.parametrize(
    ("changes", "setting", "would_hit", "reason"),
    [
        ({}, "", True, "nothing differs"),
        ({}, "DIST_TUNE_ALWAYS_TUNE=1", False, "DIST_TUNE_ALWAYS_TUNE"),
        ({"torch": "1.0"}, "", False, "torch differs; DIST_TUNE_VERSION_CHECK=0 would accept that"),
        ({"torch": "1.0"}, "DIST_TUNE_VERSION_CHECK=0", True, "torch differs, and DIST_TUNE_VERSION_CHECK=0 accepts that"),
        ({"torch": "1.0", "device": "A100"}, "DIST_TUNE_VERSION_CHECK=0", False, "device and torch differ"),
    ],
)
def test_explain_says_whether_it_would_hit(
    cache: Cache, ask: Answers, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], setting: str, would_hit: bool, reason: str
):
    """As the tuner itself decides, with the settings of this environment."""
    if setting:
        monkeypatch.setenv(*setting.split("="))
    keep(cache, record(**here(**changes)))
    (row,) = ask.json("explain")["records"]
    assert (row["would_hit"], row["differing"].keys()) == (would_hit, changes.keys())
    assert reason in row["reason"]
    assert ("would hit here" in ask("explain")) is would_hit


def test_explain_goes_with_the_cache(cache: Cache, ask: Answers):
    """The cache finds a record here if and only if explain calls it a hit."""
    for changes in ({}, {"triton": "1.0"}, {"device": "A100"}):
        wanted = record(**here()).cache_key
        keep(cache, record(**here(**changes)))
        (row,) = ask.json("explain")["records"]
        assert row["would_hit"] is (cache.find(wanted) is not None)
        assert ("DIST_TUNE_VERSION_CHECK=0 would" in row["reason"]) is (
            not row["would_hit"] and cache.find(wanted, any_software=True) is not None
        )
        ask("clear", "--yes")


def test_equal_candidates_are_named(cache: Cache, ask: Answers):
    """On the page beside each, and with their number there and in the comparison of environments."""
    (stem,) = keep(cache, record(candidates=[candidate(0, left=None), candidate(1, left=None), candidate(2, left=None, equal_to=1)]))
    page = ask("show", stem[:8])
    assert "3 tried: 2 timed, 1 the same kernel as another" in page
    assert page.count("the same kernel as candidate 1") == 1
    assert "(3, 1 the same kernel as another)" in " ".join(ask("explain", stem[:8]).split())


def test_show_leaves_no_finalist_without_a_reason(cache: Cache, ask: Answers):
    """What lost in the finals says by how much, as the log does; and the page names the reason of the choice as it was stored."""
    keep(cache, record(candidates=[candidate(0, left=None, spread_ms=0.0), candidate(1, left=None)], winner=0, reason="as it was stored"))
    page = " ".join(ask("show", "gemm").split())
    assert "chosen as it was stored" in page
    assert "not chosen: +1000.0% by its kernel, +1.0000 ms by the step" in page


def test_show_has_no_part_longer_than_its_whole(cache: Cache, ask: Answers):
    """CPU-seconds of all threads, and meetings inside phases, are no phases."""
    keep(cache, record(spent=Seconds(total=10.0, discover=1.0, compile=2.0, race=7.0, meetings=3.0, compile_cpu=99.0)))
    page = " ".join(ask("show", "gemm").split())
    assert "took 10.0 s (discover 1.0, compile 2.0, race 7.0; 3.0 s of it in meetings; 99.0 CPU-seconds of compilation)" in page
