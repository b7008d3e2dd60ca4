"""A cache of its own for each test of the command line, answers of commands on it, and a folder of
logs.
"""

from pathlib import Path

import pytest

from dist_tune.records import Cache
from tests.cli_answers import Answers
from tests.report.stories import write_story


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cache:
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    return Cache(tmp_path / "cache")


@pytest.fixture
def ask(cache: Cache) -> Answers:
    return Answers()


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    write_story(tmp_path / "logs", 2, 24)
    return tmp_path / "logs"
