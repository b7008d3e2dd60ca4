"""``dist-tune show`` and ``dist-tune cache`` path, ls, explain and clear: tables, JSON documents,
and files that go or stay.
"""

import json
import sys
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from dist_tune.records import Cache, QuarantinedConfig, Seconds, TuningRecord, quarantine, words
from dist_tune.records import environment as environment_here
from dist_tune.search import NOT_TRIED
from tests.cached_records import candidate, environment, record
from tests.cli_answers import FILE, Answers, keep, run

NOW = datetime.now(UTC)


# -- path, ls --------------------------------------------------------------------------------------


def test_path_is_nothing_but_the_path(cache: Cache, ask: Answers):
    """For ``cd "$(dist-tune cache path)"``; asking makes no folder."""
    assert ask("path") == f"{cache.folder}\n"
    assert ask.json("path") == {"path": str(cache.folder), "exists": False}
    assert not cache.folder.exists()
    assert ask("ls") == f"no records in {cache.folder}\n"
    assert ask.json("ls") == {"path": str(cache.folder), "records": [], "damaged": []}


def test_ls_says_what_won_where_and_when(cache: Cache, ask: Answers):
    """A line for each record, and nothing of it is wrapped or cut on its way to grep; a hook's name
    says nothing of a config's speed.
    """
    hooked = [
        candidate(
            0, config="BLOCK=64 pre_hook=m.f", fields={"BLOCK": 64, "pre_hook": "m.f"}, left=None
        )
    ]
    config = " ".join(f"BLOCK_{index}=128" for index in range(14))
    long = [candidate(0, config=config, fields={}), candidate(1, config=config, fields={})]
    elsewhere = environment(world_size=16, ranks_per_host=8, device_count=8)
    three = (
        record(tuned_at=NOW - timedelta(hours=7)),
        record(key="[8192]", candidates=hooked, winner=0),
        record(key="[1]", candidates=long),
    )
    stems = keep(cache, *three, record(environment=elsewhere))
    out = ask("ls")
    first, second, third, fourth = (
        next(line for line in out.splitlines() if stem[:8] in line) for stem in stems
    )
    for word in (
        "model.gemm",
        "[4096,2752,bfloat16]",
        "1.1000",
        "BLOCK_M=32 num_warps=4",
        "7 h",
        " 3 ",
        "4 ranks on 4 x NVIDIA H200",
    ):
        assert word in first
    assert ("[8192]" in second, second.endswith("BLOCK=64"), third.endswith(config)) == (
        True,
        True,
        True,
    )
    assert ("16 ranks, 8 per host, on 8 x NVIDIA H200" in fourth, " d " in fourth) == (True, True)
    assert out.splitlines()[-1] == f"4 records in {cache.folder}"
    row = next(each for each in ask.json("ls")["records"] if each["stem"] == stems[0])
    assert (row["id"], row["path"]) == (stems[0][:8], str(cache.path_of(three[0].cache_key)))
    assert (row["kernel"], row["key"]) == ("model.gemm", "[4096,2752,torch.bfloat16]")
    assert (row["winner"], row["n_candidates"], row["n_dropped"]) == (
        json.loads(record().best.model_dump_json()),
        3,
        0,
    )
    assert row["environment"] == environment().model_dump()
    assert datetime.fromisoformat(row["tuned_at"]) == three[0].tuned_at


ORDERS = {
    "": "[a100] [new] [old]",
    "--kernel GEMM": "[new] [old]",
    "--device a100": "[a100]",
    "--device a100 --kernel gemm": "",
    "--since 2h": "[new]",
    "--since 2026-03-01T11:00+00:00": "[a100] [new] [old]",
    "--sort age": "[old] [a100] [new]",
    "--sort ms": "[a100] [old] [new]",
    "--sort seconds": "[a100] [old] [new]",
}


@pytest.mark.parametrize("options", ORDERS)
def test_ls_chooses_and_sorts(cache: Cache, ask: Answers, options: str):
    """In JSON and on the page alike; the last line counts what is shown, and what there is."""
    fast, slow = ([candidate(0, latency_ms=ms, left=None)] for ms in (0.25, 4.0))
    a100: dict[str, Any] = {
        "kernel": "layers.softmax",
        "environment": environment(device="NVIDIA A100"),
        "tuned_at": NOW - timedelta(2),
    }
    new = record(
        key="[new]", tuned_at=NOW - timedelta(hours=1), candidates=slow, winner=0, seconds=7.0
    )
    keep(
        cache,
        new,
        record(key="[a100]", candidates=fast, winner=0, seconds=3.0, **a100),
        record(key="[old]", seconds=5.0),
    )
    keys = ORDERS[options].split()
    assert [each["key"] for each in ask.json("ls", *options.split())["records"]] == keys
    *rows, total = ask("ls", *options.split()).splitlines()
    assert [key for row in rows for key in ("[a100]", "[new]", "[old]") if key in row] == keys
    assert total.startswith({0: "no records", 1: "1 record"}.get(len(keys), f"{len(keys)} records"))
    assert (" of 3" in total) is (len(keys) < 3)


def test_damaged_files_are_told_and_set_the_exit_code(cache: Cache, ask: Answers):
    """Beside the whole records, with the reason; the file stays where it is, and its id says what
    is wrong with it.
    """
    whole, broken = keep(cache, record(), record(key="[1]"))
    path = cache.path_of(record(key="[1]").cache_key)
    path.write_text("{")
    reason = "Invalid JSON: EOF while parsing an object at line 1 column 1"
    told = (
        f"cache file {path} is not used: {reason}. A new tuning takes its place and keeps it as"
        " *.bak, or delete it"
    )
    ask("ls", code=1)
    assert ask.err == f"dist-tune: {told}\n"
    assert ask.json("ls", code=1)["damaged"] == [{"path": str(path), "reason": reason}]
    for command in ("ls", "explain"):
        assert [each["stem"] for each in ask.json(command, code=1)["records"]] == [whole]
    assert ask.json("show", broken, code=1)["error"] == f"{path} is damaged: {reason}"
    assert ask.json("show", whole)["records"]
    assert ask.json("explain", whole)["records"], "exit code 1 where it was asked for"
    assert path.read_text() == "{"


# -- show and what KEY stands for ------------------------------------------------------------------


def test_show_tells_all_of_one_tuning(cache: Cache, ask: Answers):
    """Candidates from fastest to slowest with all that was measured, the dropped ones last with the
    reason, as the page has them.
    """
    rows = [
        candidate(
            0,
            latency_ms=None,
            rank_latencies_ms={},
            failure="rank 1: OutOfResources:\n shared memory",
        ),
        candidate(
            1, latency_ms=0.25, left=None, rank_latencies_ms={0: 0.25, 7: 0.2}, shared_bytes=232448
        ),
        candidate(2, latency_ms=0.2525, n_spills=12, left="rung 2"),
        candidate(3, latency_ms=None, rank_latencies_ms={}, left=NOT_TRIED),
    ]
    spent = Seconds(total=10.0, discover=1.0, race=7.0, meetings=3.0, compile_cpu=99.0)
    (stem,) = keep(cache, kept := record(candidates=rows, winner=1, spent=spent))
    (only,) = ask.json("show", stem)["records"]
    assert TuningRecord.model_validate_json(json.dumps(only["record"])) == kept
    out = ask("show", "gemm")
    assert out == run("show", "gemm").stdout, "the lines of a tuning name it so"
    table = out.splitlines()[-5:-1]
    assert [line.split()[0] for line in table] == ["1", "2", "3", "0"]
    assert table[0].split()[:8] == ["1", "0.2500", "1.00", "0.0100", "1.3000", "5", "255", "0"]
    assert "winner: fastest step" in table[0]
    for word in ("1.01", "12", "rung 2"):
        assert word in table[1]
    assert table[3].endswith("rank 1: OutOfResources: shared memory")
    for word in (" 227 ", "90 replays of step", "2026-03-01 12:00:00 UTC"):
        assert word in out
    assert "10.00 s (discover 1.00, race 7.00, waits 3.00, compile_cpu 99.00)" in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert [
        f"{heading} {told}"
        for heading, told in words.facts(kept).items()
        if f"{heading} {told}" not in lines
    ] == []


def test_show_of_what_was_not_measured(cache: Cache, ask: Answers):
    """The only candidate that runs is never timed: columns that say nothing are left out."""
    bare: dict[str, Any] = {
        "latency_ms": None,
        "spread_ms": None,
        "closure_ms": None,
        "n_replays": 0,
        "rank_latencies_ms": {},
    }
    bare |= {"shared_bytes": None, "n_regs": None, "n_spills": None, "fields": {}, "left": None}
    keep(cache, record(candidates=[candidate(0, **bare)], winner=0))
    out = ask("show", "gemm")
    assert ("not timed" in out, "registers" in out) == (True, False)
    assert out.splitlines()[-2].split() == [
        "0",
        "BLOCK_M=16",
        "num_warps=4",
        "SCALE=0",
        "winner:",
        "fastest",
        "step",
    ]


def test_a_record_has_many_names(cache: Cache, ask: Answers):
    """The file's name or any beginning of it that is its own, and the kernel's with or without its
    module.
    """
    stem, _ = keep(cache, record(), record(kernel="other"))
    for key in (stem, f"{stem}.json", stem[:5], stem[0], "model.gemm", "gemm"):
        assert [each["stem"] for each in ask.json("show", key)["records"]] == [stem]
    # A name is chosen by a person; a hexadecimal word may begin a file's name by chance.
    keep(cache, record(kernel=stem[:6]))
    assert [each["record"]["kernel"] for each in ask.json("show", stem[:6])["records"]] == [
        stem[:6]
    ]


def test_show_of_several_is_a_list(cache: Cache, ask: Answers):
    """One has to be named: each has an id that is its own."""
    stems = keep(
        cache, *(record(environment=environment(triton=f"3.{minor}.0")) for minor in range(18))
    )
    assert (
        ask("show", "model.gemm").splitlines()[-1] == "18 records of model.gemm: name one by its id"
    )
    ids = [each["id"] for each in ask.json("show", "gemm")["records"]]
    assert len(set(ids)) == 18
    (only,) = ask.json("show", ids[3])["records"]
    assert only["id"] == ids[3]
    # A beginning shared by several ids names no record, least of all one to delete.
    begin, n = Counter(stem[0] for stem in stems).most_common(1)[0]
    for command in (["show"], ["explain"], ["clear", "--yes"]):
        ask(*command, begin, code=1)
        assert f"{n} ids begin with {begin}: " in ask.err
    assert len(cache.entries()) == 18


@pytest.mark.parametrize(
    ("key", "hint"), [("gem", "gemm"), ("attentoin", "attention"), ("", "ls"), ("zzz", "ls")]
)
def test_what_is_not_there_is_not_found(cache: Cache, ask: Answers, key: str, hint: str):
    """Exit code 1, and what may have been meant; for programs the same as JSON."""
    keep(cache, record(), record(kernel="layers.attention"))
    for command in ("show", "explain", "clear"):
        assert ask(command, key, code=1) == ""
        assert ("nothing is called" in ask.err, hint in ask.err) == (True, True)
        assert ask.json(command, key, code=1)["error"] in " ".join(ask.err.split())


# -- explain ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "setting", "would_hit", "reason"),
    [
        ({}, "", True, "that fits"),
        ({}, "DIST_TUNE_ALWAYS_TUNE=1", False, "DIST_TUNE_ALWAYS_TUNE"),
        ({"torch": "1.0"}, "", False, "DIST_TUNE_VERSION_CHECK=0 accepts it"),
        (
            {"torch": "1.0"},
            "DIST_TUNE_VERSION_CHECK=0",
            True,
            "DIST_TUNE_VERSION_CHECK=0 accepts it",
        ),
        (
            {"torch": "1.0", "device": "A100"},
            "DIST_TUNE_VERSION_CHECK=0",
            False,
            "A100 in the record; torch: ",
        ),
    ],
)
def test_explain_says_whether_it_would_hit(
    cache: Cache,
    ask: Answers,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    setting: str,
    would_hit: bool,
    reason: str,
):
    """By field, the record's value and this machine's, with the settings of this environment: a hit
    if and only if the cache finds it.
    """
    if setting:
        monkeypatch.setenv(*setting.split("="))
    here = environment_here(world_size=2, ranks_per_host=2)
    keep(cache, record(environment=here.model_copy(update=changes)))
    (row,) = ask.json("explain")["records"]
    assert row["differing"] == {
        name: {"record": theirs, "here": getattr(here, name)} for name, theirs in changes.items()
    }
    assert (row["would_hit"], reason in row["reason"]) == (would_hit, True)
    out = ask("explain")
    assert (out.splitlines()[1].split()[0], "DIST_TUNE_MODE=require" in out) == (
        "hit" if would_hit else "miss",
        True,
    )
    if "ALWAYS" not in setting:
        assert (
            cache.find(record(environment=here).cache_key, any_software=bool(setting)) is not None
        ) is would_hit


# -- clear, and configs in quarantine --------------------------------------------------------------


def bar(cache: Cache, key: str, kernel: str, config: str) -> None:
    one = QuarantinedConfig(
        kernel=kernel, key="[64]", config=config, rank=1, since=time.time() - 25_300
    )
    quarantine(cache.folder / "quarantine" / f"{key}.jsonl", one)


def test_clear_deletes_what_is_asked_for(cache: Cache, ask: Answers):
    """One record by its id, all of a kernel by its name, then all files of the cache with journals
    and quarantine.
    """
    one, other, *_ = keep(
        cache, record(), record(key="[1]"), record(kernel="other"), record(kernel="third")
    )
    assert [Path(path).stem for path in ask.json("clear", one, "--yes")["deleted"]] == [one]
    assert [
        entry.path.stem for entry in cache.entries() if entry.record.kernel == "model.gemm"
    ] == [other]
    assert ask("clear", "gemm", "--yes") == "deleted 1 record of model.gemm\n"
    assert [entry.record.kernel for entry in cache.entries()] == ["other", "third"]
    bar(cache, "0123456789abcdef", "library.gemm", "BLOCK=32")
    (cache.folder / "journals").mkdir()
    (cache.folder / "journals" / "0123456789abcdef.jsonl").write_text("")
    assert ask("clear", "--yes") == "deleted all 2 records, 4 files\n"
    assert list(cache.folder.iterdir()) == []
    assert ask("clear", "--yes") == f"nothing to delete in {cache.folder}\n"


def test_clear_leaves_what_is_not_the_caches(cache: Cache, ask: Answers, tmp_path: Path):
    """Records and temporary files go, also what lies in their place as a link; everything else
    stays.
    """
    (stem,) = keep(cache, record())
    folder, outside = cache.folder / "model.gemm", tmp_path / "outside"
    outside.mkdir()
    for path in (
        outside / f"{stem}.json",
        outside / "x.tmp",
        folder / "x.tmp",
        folder / f"{'0' * 12}-{'0' * 12}.json",
    ):
        path.write_text(FILE)
    (folder / f"{'1' * 12}-{'0' * 12}.json").symlink_to(outside / "x.tmp")
    (folder / "folder.tmp").mkdir()
    (cache.folder / "linked").symlink_to(outside)
    strange = [
        cache.folder / "x.tmp",
        cache.folder / f"{stem}.json",
        folder / "notes.txt",
        folder / "x.json",
    ]
    for path in strange:
        path.write_text(FILE)
    ask("clear", "--yes")
    assert sorted(cache.folder.rglob("*")) == sorted(
        [*strange, folder, folder / "folder.tmp", cache.folder / "linked"]
    )
    assert len(list(outside.iterdir())) == 2


def test_of_several_folders_the_first_alone_is_cleared(
    cache: Cache, ask: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Records of all folders are listed; a record of another folder is refused by its name."""
    keep(cache, record())
    other = Cache(tmp_path / "team")
    keep(other, record(kernel="model.theirs"))
    monkeypatch.setenv("DIST_TUNE_CACHE_PATH", f"{cache.folder}:{other.folder}")
    assert [each["kernel"] for each in ask.json("ls")["records"]] == ["model.gemm", "model.theirs"]
    ask("clear", "theirs", "--yes", code=1)
    assert f"is not in the cache folder {cache.folder}" in ask.err
    assert ask("clear", "--yes") == "deleted all 1 record, 1 file\n"
    assert [each["kernel"] for each in ask.json("ls")["records"]] == ["model.theirs"]


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "code"), [("y\n", 0), ("YES\n", 0), ("n\n", 1), ("\n", 1), ("", 1)]
)
def test_clear_asks_first(
    cache: Cache, ask: Answers, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
):
    """On stderr, naming what and where; anything but yes is no.

    A script has no terminal, and has to say --yes.
    """
    keep(cache, record())
    monkeypatch.setattr(sys, "stdin", StringIO(answer))
    assert "--yes" in ask.json("clear", code=1)["error"]
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    ask("clear", code=code)
    assert f"Delete all 1 record, 1 file in {cache.folder}?" in ask.err
    assert (cache.entries() == []) is (code == 0)


def test_configs_in_quarantine_are_listed_and_may_run_again(cache: Cache, ask: Answers):
    """With kernel, key, config, rank and time; each once.

    Damaged lines are passed over. Those of one kernel may run again, then all.
    """
    for _ in range(2):
        bar(cache, "0123456789abcdef", "library.gemm", "BLOCK=32 num_warps=4")
    bar(cache, "fedcba9876543210", "library.softmax", "BLOCK=64\x1b[2J")
    path = cache.folder / "quarantine" / "0123456789abcdef.jsonl"
    path.write_bytes(b"\x00\xff noise\n" + path.read_bytes() + b"00000000 {}\n12")
    page = ask("ls", "--quarantine")
    for word in (
        "library.gemm",
        "[64]",
        "BLOCK=32 num_warps=4",
        "7 h ago",
        "0123456789abcdef",
        "2 configs in quarantine",
    ):
        assert word in page
    assert ("\x1b" in page, "no records" in ask("ls")) == (False, True)
    assert "no config of nothing" in ask.json("clear", "--quarantine", "nothing", code=1)["error"]
    assert "1 config may run again" in ask("clear", "--quarantine", "gemm")
    assert [each["config"] for each in ask.json("ls", "--quarantine")["quarantine"]] == [
        "BLOCK=64\x1b[2J"
    ]
    assert len(ask.json("clear", "--quarantine")["cleared"]) == 1
    assert "no config is in quarantine" in ask("ls", "--quarantine")
