"""``dist-tune cache`` as a command: arguments, exit codes and streams, and hostile texts and broken files."""

import json
import os
import subprocess
import sys
import tomllib
from io import BytesIO, TextIOWrapper
from pathlib import Path
from pkgutil import resolve_name

import pytest

from dist_tune import __version__
from dist_tune.cache.store import Cache
from dist_tune.cli.main import main
from tests.cached_records import candidate, environment, record
from tests.cli_answers import Answers, keep

pytestmark = pytest.mark.once


# -- hostile texts, broken files -------------------------------------------------------------------------------------

HOSTILE = "[bold]\x1b[2Jx\x07\r\n\u202e\udc80" + "y" * 10_000


@pytest.mark.parametrize("words", [("ls",), ("show", "y"), ("explain",), ("clear", "--yes")])
def test_hostile_texts_are_texts(cache: Cache, ask: Answers, words: tuple[str, ...]):
    """Neither markup nor control characters of a record reach the terminal, and a text of 10,000 characters is cut."""
    text = HOSTILE.replace("\udc80", "")
    row = candidate(0, config=text, fields={text: text}, failure=None, left=text)
    hostile = record(
        kernel=f"{text}.y",
        key=text,
        closure=text,
        candidates=[row, candidate(1, failure=text)],
        winner=0,
        environment=environment(device=text),
    )
    keep(cache, hostile)
    out = ask(*words)
    assert not set("\x1b\x07\r\u202e") & set(out + ask.err)
    assert max(map(len, out.splitlines())) < 3000
    if words[0] != "clear":
        assert "[bold]" in out


def test_hostile_texts_of_warnings_are_texts(cache: Cache, ask: Answers):
    """A warning quotes what a file says of itself."""
    path = cache.store(record(kernel="\x1b[2J"))
    assert path is not None
    path.rename(path.with_name(f"{'0' * 12}-{'0' * 12}.json"))
    ask("ls", code=1)
    assert r"another key, '\x1b[2J" in ask.err
    assert "\x1b" not in ask.err


@pytest.mark.parametrize(
    ("words", "code"),
    [("ls", 1), ("show gemm", 0), ("explain gemm", 0), ("explain", 1), ("export e.json --name gemm", 0), ("export e.json", 1)],
)
def test_a_broken_file_is_a_line_on_stderr(
    cache: Cache, ask: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, code: int
):
    """The other records are shown; the warning is its text without the library's source line. Exit code 1 where it was asked for."""
    monkeypatch.chdir(tmp_path)
    keep(cache, record(), record(key="[1]"))
    broken = cache.path_of(record(key="[1]").cache_key)
    broken.write_bytes(broken.read_bytes().replace(b"model", b"modal"))
    ask(*words.split(), code=code)
    assert ask.err.startswith(f"dist-tune: cache file {broken} is not used: it is the record of another key")
    assert "UserWarning" not in ask.err
    json.loads(ask(*words.split(), "--json", code=code))


def test_settings_that_cannot_be_read_are_named(ask: Answers, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DIST_TUNE_DEADLINE_S", "soon")
    assert ask.json("ls", code=2)["error"].startswith("DIST_TUNE_DEADLINE_S='soon'")


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["cache", "show"], ["cache", "merge"], ["cache", "ls", "--jsn"], ["doktor"]])
def test_what_is_not_understood_is_code_2(capsys: pytest.CaptureFixture[str], words: list[str]):
    """With the usage on stderr; for programs the reason as JSON."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Usage: dist-tune" in err
    assert main([*words, "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["error"] in " ".join(err.split())


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_a_package_that_is_not_installed_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, package: str):
    """The doctor is run where something is amiss, and shows no traceback."""
    for name in [each for each in sys.modules if each.startswith("dist_tune.cli.doctor")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err.startswith(f"dist-tune: {package} is not installed for {sys.executable}: pip install {package} there")
    assert main(["doctor", "--json"]) == 1
    assert "not installed" in json.loads(capsys.readouterr().out)["error"]


USAGES = {"watch": "[OPTIONS] [DIR]", "report": "[OPTIONS] [DIR|RECORD]...", "cache clear": "[OPTIONS] [KEY]"}


@pytest.mark.parametrize(("words", "usage"), USAGES.items())
def test_usage_has_one_pair_of_brackets(capsys: pytest.CaptureFixture[str], words: str, usage: str):
    assert main([*words.split(), "--help"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"Usage: dist-tune {words} {usage}"


@pytest.mark.parametrize(("words", "named"), [([], "doctor"), (["cache"], "explain")])
def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str], words: list[str], named: str):
    """The commands are listed; code 2, as ruff and uv have it, because nothing was done."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert "Usage: dist-tune" in out
    assert named in out
    assert err == ""


def test_a_terminal_gets_help_in_frames(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """A pipe gets the text alone."""
    assert main(["cache", "--help"]) == 0
    assert "\N{BOX DRAWINGS LIGHT HORIZONTAL}" not in capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["cache", "--help"]) == 0
    assert "\N{BOX DRAWINGS LIGHT HORIZONTAL}" in capsys.readouterr().out


def test_help_and_version(capsys: pytest.CaptureFixture[str]):
    expected = {"--help": "dist-tune cache explain gemm", "--version": f"dist_tune {__version__}", "cache -h": "explain"}
    for words, text in expected.items():
        assert main(words.split()) == 0
        assert text in capsys.readouterr().out


@pytest.mark.processes
def test_it_is_a_module(cache: Cache):
    """In a process of its own: one JSON document on stdout, nothing on stderr."""
    keep(cache, record())
    command = [sys.executable, "-m", "dist_tune", "cache", "ls", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["records"][0]["kernel"] == "model.gemm"


def test_a_reader_that_goes_away_is_no_error(cache: Cache, monkeypatch: pytest.MonkeyPatch):
    """``dist-tune cache ls | head -1`` ends without a traceback."""
    keep(cache, record())
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["cache", "ls"]) == 0


def test_a_terminal_may_know_ascii_alone(cache: Cache, monkeypatch: pytest.MonkeyPatch):
    """As in a container without a locale."""
    keep(cache, record(kernel="größe"))
    stdout = TextIOWrapper(BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert main(["cache", "ls"]) == 0
    stdout.seek(0)
    assert "gr\\xf6\\xdfe" in stdout.read()


def test_what_the_system_refuses_is_no_traceback(ask: Answers, monkeypatch: pytest.MonkeyPatch):
    def refused(_self: Cache) -> None:
        raise PermissionError(13, "Permission denied", "/home/other")

    monkeypatch.setattr(Cache, "entries", refused)
    assert ask.json("ls", code=1)["error"] == "/home/other: Permission denied"


def test_an_interrupt_is_no_traceback(ask: Answers, monkeypatch: pytest.MonkeyPatch):
    def interrupted(_self: Cache) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Cache, "entries", interrupted)
    assert ask("ls", code=130) == ""


def test_the_installed_command_is_this_one():
    """The script that pip puts on the PATH is this function."""
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    assert {name: resolve_name(target) for name, target in scripts.items()} == {"dist-tune": main}
