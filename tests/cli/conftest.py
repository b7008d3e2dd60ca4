"""For each test of the command line: a cache of its own, answers of commands, and an export."""

from pathlib import Path

import pytest

from dist_tune.records import Cache
from tests.cli_answers import Answers
from tests.report import stories


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cache:
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    return Cache(tmp_path / "cache")


@pytest.fixture
def ask(cache: Cache) -> Answers:
    return Answers()


@pytest.fixture
def export(tmp_path: Path) -> Path:
    return stories.export(tmp_path / "tuned.json", 2, 24)
