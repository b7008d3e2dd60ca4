"""``dist-tune cache`` for tests: its output, records for it to find, and the files in a folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from dist_tune.cache.records import TuningRecord
from dist_tune.cache.store import Cache
from dist_tune.cli.main import main

FILE = "is not ours"


class Answers:
    """Output of the command."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *words: str | Path, code: int = 0) -> str:
        assert main(["cache", *map(str, words)]) == code, self._capsys.readouterr()
        self.out, self.err = self._capsys.readouterr()
        return self.out

    def json(self, *words: str | Path, code: int = 0) -> Any:
        return json.loads(self(*words, "--json", code=code))


def keep(cache: Cache, *kept: TuningRecord) -> list[str]:
    """Store them; the names of their files."""
    paths = [cache.store(each) for each in kept]
    return [path.stem for path in paths if path is not None]


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
