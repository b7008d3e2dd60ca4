"""The parser of ``dist-tune``: quick help, completion of shells, and the table of commands."""

import json
import subprocess
import sys
from pkgutil import resolve_name

import pytest

from dist_tune.cache.store import Cache
from dist_tune.cli.main import COMMANDS, main
from tests.cached_records import record
from tests.cli_answers import keep

pytestmark = pytest.mark.once

QUICK = """
import sys
from dist_tune.cli import main
for words in (["--help"], ["--version"], ["cache", "--help"], ["cache", "ls", "--help"], ["cache"], [], ["nonsense"]):
    main(words)
print(sorted({"torch", "triton", "numpy", "pydantic_settings", "dist_tune.cache"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.processes
def test_help_and_version_import_nothing_heavy():
    """What takes seconds is imported by the commands that use it."""
    done = subprocess.run([sys.executable, "-c", QUICK], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "[]"), done.stderr


def test_show_is_a_short_form(cache: Cache, capsys: pytest.CaptureFixture[str]):
    """``dist-tune show ID``, as the lines of a tuning name it."""
    (stem,) = keep(cache, record())
    answers = []
    for words in (["show", stem[:6]], ["cache", "show", stem[:6]], ["show", stem[:6], "--json"]):
        assert main(words) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != ""
    assert json.loads(answers[2])["records"][0]["stem"] == stem


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "launch"])
def test_each_command_has_json(name: str):
    """And one line of help of its own; the tables of --help and of this module are one."""
    command = resolve_name(COMMANDS[name])
    assert "as_json" in command.__annotations__
    assert command.__doc__


def test_a_shell_completes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The script for a shell asks the command itself, which answers with what may come next."""
    with pytest.raises(SystemExit) as caught:
        _ = main(["--show-completion", "bash"]), sys.exit(0)
    assert caught.value.code == 0
    assert "_DIST_TUNE_COMPLETE" in capsys.readouterr().out
    monkeypatch.setenv("_DIST_TUNE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "dist-tune cache ex")
    monkeypatch.setenv("COMP_CWORD", "2")
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out.split() == ["explain", "export"]
