"""The commands report, watch, diff and trace: files in, files out, one line where that cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer

from dist_tune.cache import Cache
from dist_tune.cli.records.transfer import write_export
from tests.cached_records import candidate, record
from tests.report.stories import write_story
from tests.report_commands import app, refusal, run

pytestmark = pytest.mark.once


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    write_story(tmp_path / "logs", 2, 24)
    return tmp_path / "logs"


def slower(factor: float) -> object:
    return record(candidates=[candidate(i, latency_ms=(0.1 + i) * factor) for i in range(3)])


def test_a_page_is_written_where_it_is_told(logs: Path, tmp_path: Path):
    """Without -o it is report.html of the working directory."""
    done = run("report", logs, "-o", tmp_path / "page.html")
    assert "page.html: 2 sites, " in done.stdout
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_text_and_json_write_no_page_unasked(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """--text prints; --json tells which page was written."""
    monkeypatch.chdir(tmp_path)
    assert run("report", logs, "--text").stdout.startswith("Tuning of step\n")
    assert not list(tmp_path.glob("*.html"))
    told = json.loads(run("report", logs, "--json").stdout)
    assert told["page"] == "report.html"
    assert [site["slowest_rank"][:6] for site in told["sites"]] == ["rank 3", "rank 3"]


def test_records_are_reported_from_files_exports_folders_and_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One page for all of them, without a time line."""
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    cache = Cache(tmp_path / "cache")
    path = cache.store(record())
    assert path is not None
    write_export(tmp_path / "export.json", [record(), record(kernel="model.other")])
    for source, n_sites in ((path, 1), (tmp_path / "export.json", 2), (cache.folder, 1), (path.stem[:12], 1), ("gemm", 1)):
        assert len(json.loads(run("report", source, "--json", "--text").stdout)["sites"]) == n_sites
    assert "2 sites" in run("report", path, "gemm", "-o", tmp_path / "page.html").stdout


@pytest.mark.parametrize(("factor", "code", "verdict"), [(1.0, 0, "as fast"), (1.01, 0, "as fast"), (1.5, 1, "slower"), (0.5, 0, "faster")])
def test_diff_fails_where_a_winner_got_slower(tmp_path: Path, factor: float, code: int, verdict: str):
    """By more than its noise, which is 0.02 of 1.1 ms."""
    for name, each in (("a", slower(1.0)), ("b", slower(factor))):
        write_export(tmp_path / f"{name}.json", [each])  # type: ignore[list-item]  # records
    done = run("diff", tmp_path / "a.json", tmp_path / "b.json", code=code)
    assert verdict in done.stdout
    told = json.loads(run("diff", tmp_path / "a.json", tmp_path / "b.json", "--json", code=code).stdout)
    assert (told["n_slower"], told["pairs"][0]["verdict"]) == (code, verdict)


def test_diff_compares_folders(tmp_path: Path, logs: Path):
    """Two cache folders; a log folder with itself."""
    for name in ("a", "b"):
        Cache(tmp_path / name).store(record())
    assert run("diff", tmp_path / "a", tmp_path / "b").stdout.splitlines()[-1] == "1 compared: 1 as fast"
    assert run("diff", logs, logs).stdout.splitlines()[-1] == "2 compared: 2 as fast"


@pytest.mark.parametrize("n_records", [1, 2])
def test_diff_with_nothing_in_common_fails(tmp_path: Path, n_records: int):
    """With a code that is neither "slower" nor "as fast", and one line that names both sides; stdout lists what each has."""
    for name in ("a", "b"):
        write_export(tmp_path / f"{name}.json", [record(kernel=f"model.{name}", key=f"[{i}]") for i in range(n_records)])
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    done = run("diff", a, b, code=2)
    records = "1 record" if n_records == 1 else "2 records"
    assert done.stderr == f"dist-tune: nothing to compare: {a} has {records}, {b} has {records}, with no kernel and key in common\n"
    assert done.stdout.splitlines()[0] == "only in the first: model.a [0]"
    assert done.stdout.splitlines()[-1] == f"only in the second: model.b [{n_records - 1}]"
    told = json.loads(run("diff", a, b, "--json", code=2).stdout)
    assert (told["pairs"], len(told["only_before"]), len(told["only_after"])) == ([], n_records, n_records)
    assert told["error"] in done.stderr


def test_a_trace_is_one_json_file(logs: Path, tmp_path: Path):
    assert "events; open it in ui.perfetto.dev" in run("trace", logs, "-o", tmp_path / "trace.json").stdout
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > 100


@pytest.mark.parametrize("command", ["report", "watch", "trace"])
def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path, command: str):
    """So is one without events."""
    once = ["--once"] if command == "watch" else []
    line = refusal(command, tmp_path / "nothing", *once)
    assert "nothing: " in line
    assert "o such file or " in line
    assert str(tmp_path) in refusal(command, tmp_path, *once)


@pytest.mark.parametrize("command", ["report", "trace"])
def test_a_folder_in_which_nothing_was_tuned_is_told_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str):
    """As a first try in the wrong directory finds it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DIST_TUNE_LOG_DIR", raising=False)
    advice = "run this where the tuning ran, or name the folder of its logs (DIST_TUNE_LOG_DIR)"
    assert refusal(command) == f"dist-tune: .autotune_logs: no such file or folder: {advice}"


@pytest.mark.parametrize("command", ["report", "trace"])
def test_an_output_that_cannot_be_written_is_one_line(logs: Path, tmp_path: Path, command: str):
    """A folder that is missing, and a path that is a folder."""
    assert "cannot be written: No such file or directory" in refusal(command, logs, "-o", tmp_path / "no/page.html")
    assert "cannot be written: Is a directory" in refusal(command, logs, "-o", tmp_path)


def test_a_record_of_another_schema_is_one_line(tmp_path: Path):
    """And a file that holds none."""
    path = Cache(tmp_path).store(record())
    assert path is not None
    (tmp_path / "old.json").write_bytes(path.read_bytes().replace(b'"schema_version":3', b'"schema_version":2'))
    (tmp_path / "no.json").write_text("{}")
    aside = tmp_path / "cache" / path.parent.name
    aside.mkdir(parents=True)
    (aside / path.name).write_bytes((tmp_path / "old.json").read_bytes())
    assert "written with schema 2, and this dist_tune reads schema 3" in refusal("report", tmp_path / "cache")
    for command in (("report",), ("diff", path)):
        assert "old.json holds no record that can be read: written with schema 2, and this dist_tune reads schema 3" in refusal(
            *command, tmp_path / "old.json"
        )
        assert "no.json holds no record that can be read: closure: Field required" in refusal(*command, tmp_path / "no.json")


def test_a_folder_may_hold_other_files_beside_records(tmp_path: Path):
    """Each costs a line on stderr."""
    write_export(tmp_path / "export.json", [record()])
    (tmp_path / "other.json").write_text("{}")
    done = run("diff", tmp_path, tmp_path)
    assert done.stdout.splitlines()[-1] == "1 compared: 1 as fast"
    assert all("other.json holds no record that can be read" in line for line in done.stderr.splitlines())


def test_exit_codes_reach_a_parser_that_is_not_standalone(tmp_path: Path):
    """As dist-tune's own one is run."""
    parser = typer.main.get_command(app)
    assert parser.main(["trace", str(tmp_path)], standalone_mode=False) == 1


def test_events_of_another_version_are_one_line(logs: Path):
    for rank in range(4):
        (logs / f"rank-{rank}.jsonl").write_text('{"v":7}\n')
    for words in (("report", logs), ("watch", logs, "--once"), ("trace", logs), ("diff", logs, logs)):
        assert "written with events version 7, and this dist_tune reads version 1" in refusal(*words)


def test_a_log_of_a_gigabyte_is_one_line(logs: Path):
    for rank in range(4):
        os.truncate(logs / f"rank-{rank}.jsonl", 2**30)
    assert "at most 256 MiB are read" in refusal("report", logs)


def test_a_word_that_names_nothing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An id that no record has, a file that is not there, --json of a running view."""
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    assert "nothing is called" in refusal("report", "abcdef12")
    assert "no such file or folder" in refusal("report", tmp_path / "record.json")
    assert "say --once" in json.loads(run("watch", tmp_path, "--json", code=1).stdout)["error"]


def test_the_log_of_one_rank_names_its_folder(logs: Path):
    """The file that is seen first in a folder of logs: its reader is told what to name."""
    (logs / "rank-0.log").touch()
    for name in ("rank-0.jsonl", "rank-0.log"):
        assert f"is the log of one rank: name its folder, {logs}" in refusal("report", logs / name)
