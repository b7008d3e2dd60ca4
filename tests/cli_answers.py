"""``dist-tune`` for tests: its exit code and streams, records for it to find, and the files in a
folder.
"""

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from dist_tune.cli import main
from dist_tune.records import Cache, TuningRecord

FILE = "is not ours"


class Done(NamedTuple):
    stdout: str
    stderr: str


def run(*words: str | Path, code: int = 0) -> Done:
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        assert main([str(word) for word in words]) == code, (out.getvalue(), err.getvalue())
    return Done(out.getvalue(), err.getvalue())


def refusal(*words: str | Path) -> str:
    """The one line on stderr of a command that cannot do what was asked."""
    # As of diff(1): 1 says that there is a difference.
    done = run(*words, code=2 if words[0] == "diff" else 1)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


class Answers:
    """Output of ``dist-tune cache``."""

    out = err = ""

    def __call__(self, *words: str | Path, code: int = 0) -> str:
        self.out, self.err = run("cache", *words, code=code)
        return self.out

    def json(self, *words: str | Path, code: int = 0) -> Any:
        return json.loads(self(*words, "--json", code=code))


def keep(cache: Cache, *kept: TuningRecord) -> list[str]:
    """Store them; the names of their files."""
    paths = [cache.store(each) for each in kept]
    return [path.stem for path in paths if path is not None]


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
