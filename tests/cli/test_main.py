"""The command ``dist-tune``: help, exit codes, streams, and what it cannot use, of all commands
alike.
"""

import json
import os
import subprocess
import sys
import tomllib
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import typer

from dist_tune import __version__
from dist_tune.cli import main
from dist_tune.cli.main import app, on_cache, since
from dist_tune.records import Cache
from tests.cached_records import candidate, environment, record
from tests.cli_answers import Answers, keep, refusal, run

LIGHT = """
import json, sys
from contextlib import redirect_stdout
from io import StringIO
from dist_tune.cli import main
found = []
for words, heavy in json.loads(sys.argv[1]):
    with redirect_stdout(StringIO()) as out:
        code = main(words)
    assert code in (0, 2) and (out.getvalue() or code), (words, code)
    found.append([words[:2], sorted(set(heavy) & set(sys.modules))])
print(json.dumps(found))
"""
HELP: list[list[str]] = [
    ["--help"],
    ["--version"],
    ["cache", "--help"],
    ["cache", "ls", "--help"],
    ["cache"],
    [],
    ["nonsense"],
]


# -- help, and what is imported --------------------------------------------------------------------


@pytest.mark.processes
def test_help_imports_nothing_heavy_and_reading_records_no_torch(
    cache: Cache, export: Path, tmp_path: Path
):
    """One process for all commands, lightest first: an import would stay for the rest."""
    (stem,) = keep(cache, record())
    all_of_them, page = str(tmp_path / "export.json"), str(tmp_path / "report.html")
    reading = [
        ["cache", "path"],
        ["cache", "ls"],
        ["cache", "ls", "--json"],
        ["cache", "ls", "--quarantine"],
        ["cache", "show", stem],
        ["show", stem],
        ["cache", "export", all_of_them],
        ["cache", "merge", all_of_them],
        ["diff", all_of_them, stem],
        ["report", stem, "--text"],
        ["report", str(export), "--json", "-o", page],
        ["report", all_of_them, "-o", page],
        ["cache", "clear", "--yes"],
    ]
    torch = ["torch", "triton"]
    heavy = [*torch, "numpy", "pydantic_settings", "rich", "dist_tune.records"]
    commands = [(each, heavy) for each in HELP] + [(each, torch) for each in reading]
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert [each for each in json.loads(done.stdout) if each[1]] == []


def test_the_installed_command_is_this_one():
    """The script that pip puts on the PATH is this function."""
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "scripts"
    ]
    assert {name: resolve_name(target) for name, target in scripts.items()} == {"dist-tune": main}


def test_help_and_version():
    """Each command has help and --json: the documents say "as everywhere"."""
    for words, text in {
        "--help": "dist-tune cache explain gemm",
        "--version": f"dist_tune {__version__}",
        "cache -h": "explain",
    }.items():
        assert text in run(*words.split()).stdout
    for words, named in {"": "doctor", "cache": "explain"}.items():  # nothing was done
        assert named in run(*words.split(), code=2).stderr
    commands = [("", each) for each in app.registered_commands] + [
        ("cache ", each) for each in on_cache.registered_commands
    ]
    for group, each in commands:
        assert each.callback is not None
        if (name := each.callback.__name__) != "launch":
            assert run(*group.split(), name, "--help").stdout.startswith(
                f"Usage: dist-tune {group}{name} [OPTIONS]"
            )
            assert "as_json" in each.callback.__annotations__


# -- exit codes and streams ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "cache show",
        "cache merge",
        "cache ls --jsn",
        "doktor",
        "cache ls --since soon",
        "cache ls --sort size",
    ],
)
def test_what_is_not_understood_is_code_2(words: str):
    """With the usage on stderr; for programs the reason as JSON."""
    done = run(*words.split(), code=2)
    assert (done.stdout, "Usage: dist-tune" in done.stderr) == ("", True)
    assert json.loads(run(*words.split(), "--json", code=2).stdout).keys() == {"error"}


def test_a_moment_has_many_spellings():
    """Seconds to weeks before now, a date of this machine's zone, a date with a zone."""
    for text, ago in {
        "90s": 90,
        "30min": 1800,
        "30m": 1800,
        "2h": 7200,
        "2 h": 7200,
        "3d": 259200,
        "1w": 604800,
    }.items():
        assert abs((datetime.now(UTC) - since(text)).total_seconds() - ago) < 60
    assert since("2026-03-01") == datetime(2026, 3, 1).astimezone()
    assert since("2026-03-01T12:00+02:00") == datetime(2026, 3, 1, 10, tzinfo=UTC)
    for text in ("", "h", "-2h", "2y", "999999999w", "0001-01-01", "yesterday"):
        with pytest.raises(typer.BadParameter, match="neither a time like 30min"):
            since(text)


def test_what_the_system_refuses_is_no_traceback(ask: Answers, monkeypatch: pytest.MonkeyPatch):
    """Nor is Ctrl-C."""

    def fails(error: BaseException) -> None:
        def call(_self: Cache) -> None:
            raise error

        monkeypatch.setattr(Cache, "entries", call)

    fails(PermissionError(13, "Permission denied", "/home/other"))
    assert ask.json("ls", code=1)["error"] == "/home/other: Permission denied"
    fails(KeyboardInterrupt())
    assert ask("ls", code=130) == ""
    monkeypatch.setenv("DIST_TUNE_DEADLINE_S", "soon")
    assert ask.json("ls", code=2)["error"].startswith("DIST_TUNE_DEADLINE_S='soon'")


@pytest.mark.parametrize(
    "words",
    [["--help"], ["cache", "path"], ["cache", "ls", "--json"], ["report", "--text"], ["diff"]],
)
def test_an_answer_that_finds_a_full_disk_is_one_line(
    export: Path,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """And not half a table with exit code 0, nor a traceback, nor a second complaint when Python
    ends. Of diff 1 would say slower.
    """
    sources = {"diff": [str(export)] * 2, "report": [str(export)]}.get(words[0], [])
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main([*words, *sources]) == (2 if words == ["diff"] else 1)
        full.write("more")
    assert capsys.readouterr().err == "dist-tune: stdout: No space left on device\n"


def test_a_reader_may_go(
    cache: Cache, export: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """`dist-tune cache ls | head -1`, and of a long text."""
    keep(cache, record())
    for words in (["cache", "ls"], ["report", str(export), "--text"]):
        reading, writing = os.pipe()
        os.close(reading)
        with suppress(BrokenPipeError, SystemExit), os.fdopen(writing, "w") as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            assert main(words) == 0
    assert capsys.readouterr().err == ""


# -- texts of tables, hostile ones, folders that cannot be read ------------------------------------


HOSTILE = "[bold]\x1b[2Jx\x07\r\n\u202e" + "y" * 10_000


@pytest.mark.parametrize("words", [("ls",), ("show", "y"), ("explain",), ("clear", "--yes")])
def test_hostile_texts_are_texts(cache: Cache, ask: Answers, words: tuple[str, ...]):
    """Neither markup nor control characters of a record reach the terminal, and a text of 10,000
    characters is cut.
    """
    row = candidate(0, config=HOSTILE, fields={HOSTILE: HOSTILE}, failure=None, left=HOSTILE)
    texts: dict[str, Any] = {
        "kernel": f"{HOSTILE}.y",
        "key": HOSTILE,
        "closure": HOSTILE,
        "environment": environment(device=HOSTILE),
    }
    keep(cache, record(candidates=[row, candidate(1, failure=HOSTILE)], winner=0, **texts))
    out = ask(*words)
    assert not set("\x1b\x07\r\u202e") & set(out + ask.err)
    assert max(map(len, out.splitlines())) < 3000
    assert words[0] == "clear" or "[bold]" in out


def test_a_folder_that_may_not_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And no lecture on the usage, which was right."""
    listdir, folder = os.listdir, tmp_path / "records"
    folder.mkdir()

    def refused(path: Any = ".") -> list[str]:
        if str(path).startswith(str(folder)):
            raise PermissionError(13, "Permission denied", str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refused)
    for words in (("report", folder, "--text"), ("diff", folder, tmp_path)):
        assert refusal(*words) == f"dist-tune: {folder}: Permission denied"
