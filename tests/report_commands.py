"""The commands report, watch, diff and trace for tests: their exit code and streams."""

from __future__ import annotations

from pathlib import Path

import typer
from typer.testing import CliRunner, Result

from dist_tune.cli import report as commands

app = typer.Typer()
for command in (commands.report, commands.watch, commands.diff, commands.trace):
    app.command()(command)


def run(*words: str | Path, code: int = 0) -> Result:
    done = CliRunner().invoke(app, [str(word) for word in words], standalone_mode=False)  # as the whole parser is run
    assert done.return_value == code, (done.output, done.exception)
    return done


def refusal(*words: str | Path) -> str:
    """The one line on stderr of a command that cannot do what was asked."""
    done = run(*words, code=2 if words[0] == "diff" else 1)  # as of diff(1): 1 says that there is a difference
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line
