"""The commands report and diff: files in, files out, what cannot be, damaged files of a rank."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_tune.cli.records import packed
from dist_tune.records import Cache
from tests.cached_records import candidate, record
from tests.cli_answers import refusal, run
from tests.report.stories import events, header, lines, write_story
from tests.report.stories import record as story_record

# -- report ----------------------------------------------------------------------------------------


def test_a_page_is_written_where_it_is_told(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without -o it is report.html of the working directory, unless --text is asked for; --json
    tells which page was written.
    """
    monkeypatch.chdir(tmp_path)
    assert run("report", logs, "--text").stdout.startswith("Tuning of step\n")
    assert not list(tmp_path.glob("*.html"))
    assert "page.html: 2 sites, " in run("report", logs, "-o", tmp_path / "page.html").stdout
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    told = json.loads(run("report", logs, "--json").stdout)
    assert (told["page"], [site["facts"]["slowest rank"][0] for site in told["sites"]]) == (
        "report.html",
        ["3", "3"],
    )


def test_records_are_reported_from_files_exports_folders_and_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One page for all of them, without a time line."""
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    cache = Cache(tmp_path / "cache")
    path = cache.store(record())
    assert path is not None
    (tmp_path / "export.json").write_bytes(packed([record(), record(kernel="model.other")]))
    for source, n_sites in (
        (path, 1),
        (tmp_path / "export.json", 2),
        (cache.folder, 1),
        (path.stem[:12], 1),
        ("gemm", 1),
    ):
        assert len(json.loads(run("report", source, "--json", "--text").stdout)["sites"]) == n_sites
    assert "2 sites" in run("report", path, "gemm", "-o", tmp_path / "page.html").stdout


# -- diff ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "code", "verdict"), [(1.01, 0, "as fast"), (1.5, 1, "slower")])
def test_diff_fails_where_a_winner_got_slower(
    tmp_path: Path, factor: float, code: int, verdict: str
):
    """By more than its noise, which is 0.02 of 1.1 ms."""
    for name, times in (("a", 1.0), ("b", factor)):
        (tmp_path / f"{name}.json").write_bytes(
            packed(
                [record(candidates=[candidate(i, latency_ms=(0.1 + i) * times) for i in range(3)])]
            )
        )
    assert verdict in run("diff", tmp_path / "a.json", tmp_path / "b.json", code=code).stdout
    told = json.loads(
        run("diff", tmp_path / "a.json", tmp_path / "b.json", "--json", code=code).stdout
    )
    assert (told["n_slower"], told["pairs"][0]["verdict"]) == (code, verdict)


def test_diff_compares_folders(tmp_path: Path, logs: Path):
    """Two cache folders, a log folder with itself, and a folder of exports; another file in it
    costs a line on stderr.
    """
    for name in ("a", "b"):
        Cache(tmp_path / name).store(record())
    assert (
        run("diff", tmp_path / "a", tmp_path / "b").stdout.splitlines()[-1]
        == "1 compared: 1 as fast"
    )
    assert run("diff", logs, logs).stdout.splitlines()[-1] == "2 compared: 2 as fast"
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "export.json").write_bytes(packed([record()]))
    (mixed / "other.json").write_text("{}")
    done = run("diff", mixed, mixed)
    assert done.stdout.splitlines()[-1] == "1 compared: 1 as fast"
    assert all("other.json, record 1 cannot be read" in line for line in done.stderr.splitlines())


def test_diff_with_nothing_in_common_fails(tmp_path: Path):
    """With a code that is neither "slower" nor "as fast", and one line that names both sides;
    stdout lists what each has.
    """
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_bytes(
            packed([record(kernel=f"model.{name}", key=f"[{i}]") for i in range(2)])
        )
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    done = run("diff", a, b, code=2)
    assert (
        done.stderr
        == f"dist-tune: nothing to compare: {a} has 2 records, {b} has 2 records, with no kernel"
        " and key in common\n"
    )
    assert [done.stdout.splitlines()[i] for i in (0, -1)] == [
        "only in the first: model.a [0]",
        "only in the second: model.b [1]",
    ]
    told = json.loads(run("diff", a, b, "--json", code=2).stdout)
    assert (told["pairs"], len(told["only_before"]), len(told["only_after"])) == ([], 2, 2)
    assert told["error"] in done.stderr


# -- what stands for nothing -----------------------------------------------------------------------


def test_what_stands_for_nothing_is_one_line(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A folder that is not there or without events, an id that no record has, a file that is not
    there, files without records.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DIST_TUNE_LOG_DIR", raising=False)
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    told = "no rank-<i>.jsonl in .autotune_logs tells of a tuning: name the folder of"
    assert refusal("report") == f"dist-tune: {told} DIST_TUNE_LOG_DIR, or records"
    for folder in (tmp_path, tmp_path / "nothing"):
        assert str(folder) in refusal("report", folder)
    assert "nothing is called" in refusal("report", "abcdef12")
    assert "no such file or folder" in refusal("report", tmp_path / "record.json")
    assert f"{logs}/rank-0.jsonl, record 1 cannot be read" in refusal(
        "report", logs / "rank-0.jsonl"
    )


def test_a_record_of_another_schema_is_one_line(tmp_path: Path):
    """And a file that holds none; also among the events of a log folder."""
    path = Cache(tmp_path).store(record())
    assert path is not None
    (tmp_path / "old.json").write_bytes(
        path.read_bytes().replace(b'"schema_version":3', b'"schema_version":2')
    )
    (tmp_path / "no.json").write_text("{}")
    old = "schema_version: Input should be 3"
    for command in (("report",), ("diff", path)):
        assert f"old.json, record 1 cannot be read: {old}" in refusal(
            *command, tmp_path / "old.json"
        )
        assert "no.json, record 1 cannot be read: closure: Field required" in refusal(
            *command, tmp_path / "no.json"
        )
    told = lines(list(events([story_record(0, 8)], 0, 1))).replace(
        b'"schema_version":3', b'"schema_version":2'
    )
    (tmp_path / "rank-0.jsonl").write_bytes(told)
    of_site = f"site 0: its record cannot be read ({old})"
    assert (
        refusal("diff", tmp_path, tmp_path)
        == f"dist-tune: the tunings in {tmp_path} have no record that can be read; {of_site}"
    )


def test_two_jobs_that_write_to_one_folder_at_once_are_told(tmp_path: Path):
    """Their events are mixed, and no figure of them is to be trusted; a closure of the same name in
    one process is no second job.
    """
    told = list(events([story_record(0, 8)], 0, 1))
    (tmp_path / "rank-0.jsonl").write_bytes(lines(told + told[8:]))
    mixed = (
        "two jobs have written to this folder at once, and their events are mixed: set"
        " DIST_TUNE_LOG_DIR for each"
    )
    assert f"note: {mixed}" in run("report", tmp_path, "--text").stdout
    (tmp_path / "rank-0.jsonl").write_bytes(lines([*told, *told[1:]]))
    assert "two jobs" not in run("report", tmp_path, "--text").stdout


# -- damaged files of a rank -----------------------------------------------------------------------


def replaced_by(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(file: Path) -> None:
        file.unlink()
        make(file)

    return damage


NO_EVENT = "no event of version 1, which this dist_tune reads"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (
        lambda file: os.truncate(file, file.stat().st_size - 10),
        r", line \d+: cut off: the rest of rank 1 is left out",
    ),
    "garbage": (
        lambda file: file.write_bytes(file.read_bytes().replace(b"\n", b"\nno event\n", 7)),
        f", line 2: {NO_EVENT}: the rest of rank 1 is left out",
    ),
    "empty": (lambda file: os.truncate(file, 0), ": the file is empty: rank 1 is left out"),
    "folder": (replaced_by(os.mkdir), ": Is a directory: rank 1 is left out"),
    "fifo": (replaced_by(os.mkfifo), ": not a regular file: rank 1 is left out"),
    "version": (
        lambda file: file.write_bytes(lines([header(1)]).replace(b'"v":1', b'"v":7')),
        f", line 1: {NO_EVENT}: rank 1 is left out",
    ),
    "gigabyte": (
        lambda file: os.truncate(file, 2**30),
        ": larger than 268435456 bytes: rank 1 is left out",
    ),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_one_damaged_file_is_told_and_the_other_ranks_are_shown(
    logs: Path,
    tmp_path: Path,
    damage: Callable[[Path], object],
    reason: str,
):
    """By each command alike, with and without --json: one line with the file, the line and what is
    wrong, and exit code 3.
    """
    damage(logs / "rank-1.jsonl")
    commands: list[tuple[str | Path, ...]] = [
        ("report", logs, "-o", tmp_path / "page.html"),
        ("report", logs, "--text"),
        ("diff", logs, logs),
    ]
    for words in [*commands, *((*each, "--json") for each in commands)]:
        done = run(*words, code=3)
        (line,) = [line for line in done.stderr.splitlines() if "rank-1.jsonl" in line]
        assert re.search(f"rank-1.jsonl{reason}", line), words
        assert done.stdout, words
        if "--json" in words and words[0] != "diff":
            assert any("rank-1.jsonl" in note for note in json.loads(done.stdout)["notes"]), words
    assert "rank 3" in (tmp_path / "page.html").read_text()
    assert "rank-1.jsonl" in (tmp_path / "page.html").read_text()


def test_damaged_files_alone_or_of_an_earlier_job(logs: Path):
    """Where there is nothing to show, the command has failed; a file of a job with more ranks is no
    damage of the present one.
    """
    (logs / "rank-4.jsonl").write_text("no event\n")
    assert "rank-4" not in run("report", logs, "--text").stderr
    for rank in range(4):
        (logs / f"rank-{rank}.jsonl").write_text("no event\n")
    for words in (("report", logs), ("diff", logs, logs)):
        assert refusal(*words).endswith(
            f"; {logs}/rank-0.jsonl, line 1: {NO_EVENT}: rank 0 is left out"
        )


def test_diff_says_slower_rather_than_left_out(logs: Path, tmp_path: Path):
    """A winner that got slower did so for all ranks."""
    write_story(tmp_path / "later", 2, 24)
    for file in (tmp_path / "later").iterdir():
        file.write_text(file.read_text().replace('"latency_ms":0.', '"latency_ms":1.'))
    (tmp_path / "later" / "rank-1.jsonl").write_bytes(b"")
    done = run("diff", logs, tmp_path / "later", code=1)
    assert ("slower" in done.stdout, "rank-1.jsonl" in done.stderr) == (True, True)
