"""The commands report, watch, diff and trace: files in, files out, one line where that cannot be, and damaged files of a rank."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_tune.cache import Cache
from dist_tune.cli.transfer import write_export
from tests.cached_records import candidate, record
from tests.cli_answers import Done, refusal, run
from tests.report.stories import BEGIN, events, lines, write_story
from tests.report.stories import record as story_record

pytestmark = pytest.mark.once

CUT_OFF = re.compile(r"dist-tune: \S+/rank-0\.jsonl, line \d+: cut off: the rest of rank 0 is left out")


@pytest.fixture
def cut(logs: Path) -> Path:
    """Logs of which one ends within a line, as of a job that was killed."""
    file = logs / "rank-0.jsonl"
    file.write_bytes(file.read_bytes()[:-10])
    return logs


# -- report, trace -----------------------------------------------------------------------------------------------------


def test_a_page_is_written_where_it_is_told(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without -o it is report.html of the working directory, unless --text is asked for; --json tells which page was written."""
    monkeypatch.chdir(tmp_path)
    assert run("report", logs, "--text").stdout.startswith("Tuning of step\n")
    assert not list(tmp_path.glob("*.html"))
    assert "page.html: 2 sites, " in run("report", logs, "-o", tmp_path / "page.html").stdout
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
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


def test_a_trace_is_one_json_file(logs: Path, tmp_path: Path):
    assert "events; open it in ui.perfetto.dev" in run("trace", logs, "-o", tmp_path / "trace.json").stdout
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > 100


@pytest.mark.parametrize("command", ["report", "trace"])
def test_an_output_that_cannot_be_written_is_one_line(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str):
    """A folder that is missing; a folder, a fifo or a device is left alone; and a link keeps leading to its file."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    assert refusal(command, logs, "-o", "no/page.html") == "dist-tune: no/page.html: No such file or directory"
    for output in ("fifo", "logs"):
        assert refusal(command, logs, "-o", output) == f"dist-tune: {output} cannot be written: it is no regular file"
    assert Path("fifo").is_fifo()
    Path("link").symlink_to("linked")
    run(command, logs, "-o", "link")
    assert (Path("link").is_symlink(), Path("linked").stat().st_size > 1000) == (True, True)


# -- diff --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "code", "verdict"), [(1.0, 0, "as fast"), (1.01, 0, "as fast"), (1.5, 1, "slower"), (0.5, 0, "faster")])
def test_diff_fails_where_a_winner_got_slower(tmp_path: Path, factor: float, code: int, verdict: str):
    """By more than its noise, which is 0.02 of 1.1 ms."""
    for name, times in (("a", 1.0), ("b", factor)):
        write_export(tmp_path / f"{name}.json", [record(candidates=[candidate(i, latency_ms=(0.1 + i) * times) for i in range(3)])])
    assert verdict in run("diff", tmp_path / "a.json", tmp_path / "b.json", code=code).stdout
    told = json.loads(run("diff", tmp_path / "a.json", tmp_path / "b.json", "--json", code=code).stdout)
    assert (told["n_slower"], told["pairs"][0]["verdict"]) == (code, verdict)


def test_diff_compares_folders(tmp_path: Path, logs: Path):
    """Two cache folders, a log folder with itself, and a folder of exports; another file in it costs a line on stderr."""
    for name in ("a", "b"):
        Cache(tmp_path / name).store(record())
    assert run("diff", tmp_path / "a", tmp_path / "b").stdout.splitlines()[-1] == "1 compared: 1 as fast"
    assert run("diff", logs, logs).stdout.splitlines()[-1] == "2 compared: 2 as fast"
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    write_export(mixed / "export.json", [record()])
    (mixed / "other.json").write_text("{}")
    done = run("diff", mixed, mixed)
    assert done.stdout.splitlines()[-1] == "1 compared: 1 as fast"
    assert all("other.json holds no record that can be read" in line for line in done.stderr.splitlines())


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


# -- what stands for nothing -------------------------------------------------------------------------------------------


def test_what_stands_for_nothing_is_one_line(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder that is not there or without events, an id that no record has, a file that is not there, the log of one rank."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DIST_TUNE_LOG_DIR", raising=False)
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    for words in (["report"], ["trace"], ["watch", "--once"]):
        assert re.search("nothing: .*o such file or ", refusal(words[0], tmp_path / "nothing", *words[1:]))
        assert str(tmp_path) in refusal(words[0], tmp_path, *words[1:])
    advice = "run this where the tuning ran, or name the folder of its logs (DIST_TUNE_LOG_DIR)"
    for command in ("report", "trace"):
        assert refusal(command) == f"dist-tune: .autotune_logs: no such file or folder: {advice}"
    assert "nothing is called" in refusal("report", "abcdef12")
    assert "no such file or folder" in refusal("report", tmp_path / "record.json")
    assert "say --once" in json.loads(run("watch", tmp_path, "--json", code=1).stdout)["error"]
    (logs / "rank-0.log").touch()
    for name in ("rank-0.jsonl", "rank-0.log"):
        assert f"is the log of one rank: name its folder, {logs}" in refusal("report", logs / name)


def test_a_record_of_another_schema_is_one_line(tmp_path: Path):
    """And a file that holds none."""
    path = Cache(tmp_path).store(record())
    assert path is not None
    (tmp_path / "old.json").write_bytes(path.read_bytes().replace(b'"schema_version":3', b'"schema_version":2'))
    (tmp_path / "no.json").write_text("{}")
    aside = tmp_path / "cache" / path.parent.name
    aside.mkdir(parents=True)
    (aside / path.name).write_bytes((tmp_path / "old.json").read_bytes())
    old = "written with schema 2, and this dist_tune reads schema 3"
    told = run("report", tmp_path / "cache", code=1).stderr.splitlines()
    assert old in told[0]
    assert told[1:] == [f"dist-tune: there are no events in {tmp_path / 'cache'}, and no records that can be read"]
    for command in (("report",), ("diff", path)):
        assert f"old.json holds no record that can be read: {old}" in refusal(*command, tmp_path / "old.json")
        assert "no.json holds no record that can be read: closure: Field required" in refusal(*command, tmp_path / "no.json")


@pytest.mark.parametrize(
    ("n_events", "schema", "reason"),
    [(-3, 3, "no site has its winner yet"), (10_000, 2, "written with schema 2, and this dist_tune reads schema 3")],
)
def test_tunings_without_a_record_are_not_called_absent(tmp_path: Path, n_events: int, schema: int, reason: str):
    """They have not ended, or their records are of another dist_tune."""
    told = list(events([story_record(0, 8)], 0, 1))[:n_events]
    (tmp_path / "rank-0.jsonl").write_bytes(lines(told).replace(b'"schema_version":3', b'"schema_version":%d' % schema))
    done = run("diff", tmp_path, tmp_path, code=2)
    assert done.stderr.splitlines()[-1] == f"dist-tune: the tunings in {tmp_path} have no record that can be read: {reason}"


def test_a_folder_of_an_odd_name_is_named_so_that_a_shell_takes_it(logs: Path, tmp_path: Path):
    """Quoted in a command to copy, and without escape sequences for the terminal."""
    spaced = logs.rename(tmp_path / "my logs")
    assert f"dist-tune report '{spaced}' tells more" in run("watch", spaced).stdout
    odd = spaced.rename(tmp_path / "\x1b[31mred")
    for words in (("watch", odd), ("report", odd, "-o", odd / "page.html"), ("trace", odd, "-o", odd / "trace.json")):
        assert "\x1b" not in run(*words).stdout


def test_two_jobs_that_write_to_one_folder_at_once_are_told(tmp_path: Path):
    """Their events are mixed, and no figure of them is to be trusted; a closure of the same name in one process is no second job."""
    told = list(events([story_record(0, 8)], 0, 1))
    (tmp_path / "rank-0.jsonl").write_bytes(lines(told + told[8:]))
    mixed = "two jobs have written to this folder at once, and their events are mixed: set DIST_TUNE_LOG_DIR for each"
    assert f"note: {mixed}" in run("report", tmp_path, "--text").stdout
    assert run("watch", tmp_path, "--once").stdout.splitlines()[-1] == mixed
    last_run = next(each for each in reversed(told) if each.kind == "replay")
    (tmp_path / "rank-0.jsonl").write_bytes(lines([*told, last_run, *told[1:]]))
    assert "two jobs" not in run("report", tmp_path, "--text").stdout


# -- damaged files of a rank -------------------------------------------------------------------------------------------


def cut_in_the_middle(file: Path) -> str:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    return f", line {content[: len(content) // 2].count(bytes([10])) + 1}: cut off: the rest of rank 1 is left out"


def one_line_of_garbage(file: Path) -> str:
    content = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*content[:7], b"no event\n", *content[7:]]))
    return ", line 8: no event: the rest of rank 1 is left out"


def empty(file: Path) -> str:
    file.write_bytes(b"")
    return ": the file is empty: rank 1 is left out"


def folder(file: Path) -> str:
    file.unlink()
    file.mkdir()
    return ": Is a directory: rank 1 is left out"


def fifo(file: Path) -> str:
    file.unlink()
    os.mkfifo(file)
    return ": not a regular file: rank 1 is left out"


def another_version(file: Path) -> str:
    file.write_text('{"v":7}\n')
    return ", line 1: written with events version 7, and this dist_tune reads version 1: rank 1 is left out"


def a_gigabyte(file: Path) -> str:
    os.truncate(file, 2**30)
    return ": 1024 MiB, and at most 256 MiB are read: move it away, and the next tuning begins a new one: rank 1 is left out"


class Waits:
    """Stands for ``time.sleep``: each wait does the next thing, and one too many is Ctrl-C."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> None:
        self._steps = iter(steps)
        self.n_asked = 0
        monkeypatch.setattr("time.sleep", self)

    def __call__(self, _seconds: float) -> None:
        self.n_asked += 1
        step = next(self._steps, None)
        if step is None:
            raise KeyboardInterrupt
        step()


def nothing() -> None:
    """No news."""


@pytest.mark.parametrize("damage", [cut_in_the_middle, one_line_of_garbage, empty, folder, fifo, another_version, a_gigabyte])
def test_one_damaged_file_is_told_and_the_other_ranks_are_shown(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], str]
):
    """By each command alike, with and without --json: one line with the file, the line and what is wrong, and exit code 3."""
    Waits(monkeypatch)  # Ctrl-C where a rank's end is missing
    damaged = logs / "rank-1.jsonl"
    told = f"dist-tune: {damaged}{damage(damaged)}"
    commands: list[tuple[str | Path, ...]] = [
        ("report", logs, "-o", tmp_path / "page.html"), ("report", logs, "--text"), ("watch", logs, "--once"), ("watch", logs),
        ("trace", logs, "-o", tmp_path / "trace.json"), ("diff", logs, logs),
    ]  # fmt: skip
    for words in [*commands, *((*each, "--json") for each in commands if each != ("watch", logs))]:
        done = run(*words, code=3)
        of_file = {line for line in done.stderr.splitlines() if "rank-1.jsonl" in line}
        assert len(of_file) == 1, (words, done.stderr)
        assert told in of_file.pop(), words
        assert done.stdout, words
        if "--json" in words and words[0] != "diff":
            assert any("rank-1.jsonl" in note for note in json.loads(done.stdout)["notes"]), words
    assert "rank 3" in (tmp_path / "page.html").read_text()
    assert "rank-1.jsonl" in (tmp_path / "page.html").read_text()
    assert {0, 2, 3} <= {each["pid"] for each in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}


def test_what_is_passed_over_is_among_the_notes(cut: Path, tmp_path: Path):
    """On stderr in any case, because stdout is the answer."""
    text = run("report", cut, "--text", code=3).stdout.replace("  note:", "dist-tune:")
    assert any(map(CUT_OFF.search, text.splitlines()))
    told = json.loads(run("trace", cut, "-o", tmp_path / "trace.json", "--json", code=3).stdout)
    assert any(CUT_OFF.fullmatch(f"dist-tune: {note}") for note in told["notes"])


def test_a_folder_of_damaged_files_alone_is_one_line(logs: Path):
    """There is nothing to show, so the command has failed."""
    for rank in range(4):
        (logs / f"rank-{rank}.jsonl").write_text("no event\n")
    for words in (("report", logs), ("watch", logs), ("watch", logs, "--once"), ("trace", logs), ("diff", logs, logs)):
        line = f"dist-tune: {logs}/rank-0.jsonl, line 1: no event: rank 0 is left out, and so are all others"
        assert refusal(*words) == line


def test_a_damaged_file_of_an_earlier_job_with_more_ranks_is_no_damage(logs: Path):
    """The present job has four ranks."""
    (logs / "rank-4.jsonl").write_text("no event\n")
    assert "rank-4" not in run("report", logs, "--text").stderr


def test_diff_says_slower_rather_than_left_out(logs: Path, tmp_path: Path):
    """A winner that got slower did so for all ranks."""
    later = tmp_path / "later"
    write_story(later, 2, 24)
    for file in later.iterdir():
        content = file.read_text()
        file.write_text(content.replace('"latency_ms":0.', '"latency_ms":1.'))
    empty(later / "rank-1.jsonl")
    done = run("diff", logs, later, code=1)
    assert "slower" in done.stdout
    assert "rank-1.jsonl" in done.stderr


# -- watch -------------------------------------------------------------------------------------------------------------


def plain(done: Done) -> str:
    """Its output without what moves a terminal's cursor."""
    return re.sub("\x1b\\[[^A-Za-z]*[A-Za-z]", "", done.stdout)


def heads(done: Done) -> list[str]:
    """What the output says of tunings, without their sites."""
    return [line.split(",")[0] for line in done.stdout.splitlines() if not line.startswith(" ")]


def test_watch_once_prints_the_present_state(cut: Path):
    """As lines, and with --json as a document; a silence of months is not told in seconds."""
    told = run("watch", cut, "--once", code=3).stdout
    assert told.startswith("step: ")
    assert json.loads(run("watch", cut, "--once", "--json", code=3).stdout)["lines"][0] == told.splitlines()[0]
    assert " d ago" in told
    assert max((len(word) for word in told.split() if word.isdecimal()), default=0) < 6


def test_watch_follows_until_all_have_finished(logs: Path, monkeypatch: pytest.MonkeyPatch):
    """Where stdout is no terminal: lines whenever there is something new. A job's next tuning is waited for as long as there is news."""
    file = logs / "rank-0.jsonl"
    steps = [list(events([story_record(0, 8)], 0, 1, name=f"step#{k}"))[1:] for k in (2, 3)]
    news = [steps[0][:4], steps[0][4:], steps[1][:4], steps[1][4:]]
    file.write_bytes(file.read_bytes() + lines(news[0]))
    appended = [lambda part=part: file.write_bytes(file.read_bytes() + lines(part)) for part in news[1:]]
    waits = Waits(monkeypatch, *appended, nothing, nothing)
    done = run("watch", logs)
    assert heads(done) == ["step: discover", "step: done", "step: discover", "step: done", "all 3 tunings have finished"]
    assert waits.n_asked == 4


@pytest.mark.parametrize("is_terminal", [False, True])
def test_watch_of_finished_tunings_ends(logs: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool):
    """At once, with the winners, the age, and the command that tells more."""
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "400")
    waits = Waits(monkeypatch)
    done = run("watch", logs)
    assert re.search("winner BLOCK_M=", done.stdout)
    last = plain(done).splitlines()[-1]
    assert re.fullmatch(r"the tuning has finished, \d+ d ago: dist-tune report .*/logs tells more", last)
    assert waits.n_asked == 0


@pytest.mark.parametrize("terminal", ["none", "dumb", "xterm"])
def test_watch_may_be_started_before_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: str):
    """It says once what it waits for, and follows the tuning that begins; a folder that is named and is not there is a mistake."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DIST_TUNE_LOG_DIR", raising=False)
    if terminal != "none":
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", terminal)
        monkeypatch.setenv("COLUMNS", "400")
    Waits(monkeypatch, nothing, nothing, lambda: write_story(tmp_path / ".autotune_logs", 1, 8), nothing)
    done = run("watch")
    waiting = f"no tuning has written events in {tmp_path}/.autotune_logs yet: waiting for one, until Ctrl-C"
    assert waiting in done.stdout
    assert "step: done" in done.stdout
    if terminal != "xterm":
        assert heads(done) == [waiting.partition(",")[0], "step: done", "the tuning has finished"]
    assert refusal("watch", "elsewhere") == "dist-tune: elsewhere: No such file or directory"


def test_watch_fits_a_terminal_of_40_columns(logs: Path, monkeypatch: pytest.MonkeyPatch):
    """Lines are broken, and no word is lost."""
    wide = run("watch", logs).stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    *shown, command = plain(run("watch", logs)).splitlines()
    assert max(map(len, shown)) <= 40
    *picture, last = wide.splitlines()
    assert "".join("".join(shown).split()).replace("".join("".join(picture).split()), "", 2) == "", "the picture, drawn again at the end"
    assert command == last, "a command is not broken: it is copied"


def test_a_silence_is_told_where_nothing_is_redrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A rank that hangs writes nothing more: its silence is the news, told once however long it lasts."""
    (tmp_path / "rank-0.jsonl").write_bytes(lines(list(events([story_record(0, 8)], 0, 1))[:6]))
    passed_s = iter((0.0, 2.0, 7.0, 400.0, 900.0))
    monkeypatch.setattr("time.time", lambda: BEGIN + 1.0 + next(passed_s))
    Waits(monkeypatch, nothing, nothing, nothing, nothing)
    shown = run("watch", tmp_path).stdout.splitlines()
    assert [line.partition(",")[0] for line in shown if "late" in line] == ["  rank 0 is late: last event 7 s ago"]
    assert sum(line.startswith("step: ") for line in shown) == 2


def test_a_watch_whose_reader_has_gone_ends(cut: Path, monkeypatch: pytest.MonkeyPatch):
    """As ``| head -1`` goes, while the tuning may run for hours."""
    from dist_tune.cli import main

    waits = Waits(monkeypatch)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert main(["watch", str(cut)]) == 0
    assert waits.n_asked == 0


def test_a_file_that_is_being_written_is_no_damage_to_a_watch(logs: Path, monkeypatch: pytest.MonkeyPatch):
    """The line that was cut off when it was read is whole half a second later."""
    file = logs / "rank-1.jsonl"
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    Waits(monkeypatch, lambda: file.write_bytes(content), nothing, nothing)
    assert run("watch", logs).stderr == ""


def test_damage_is_told_while_a_watch_goes_on(logs: Path, monkeypatch: pytest.MonkeyPatch):
    """Once, as soon as it has stood for two looks; a tuning may last for hours."""
    told = list(events([story_record(0, 24), story_record(1, 24)], 0))
    (logs / "rank-0.jsonl").write_bytes(lines(told[:-3]))
    (logs / "rank-1.jsonl").write_bytes(b"no event\n")
    lengths: list[int] = []
    Waits(monkeypatch, *[lambda: lengths.append(sys.stderr.getvalue().count("\n"))] * 4)  # type: ignore[union-attr]  # of StringIO
    done = run("watch", logs, code=3)
    assert lengths == [0, 1, 1, 1]
    assert done.stderr.count("\n") == 1
