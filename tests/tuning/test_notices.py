"""Notices about many sites at once, about what was found, and about what is not kept: a few on the terminal, all in the log."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dist_tune import __version__, autotune
from dist_tune.cache.lookup import Miss
from dist_tune.tuning import notices
from dist_tune.tuning.notices import TESTED, Notices, _numbers, newer_than_tested, tell_of_sites
from tests.steps import BLOCKS


class _Story:
    """Of a tuning with these sites: what is written, and whether the terminal shows it."""

    path = "logs/rank-0.log"

    def __init__(self, *labels: str) -> None:
        self.numbers = {label: k for k, label in enumerate(labels)}
        self.told: list[tuple[str, str, bool | str]] = []

    def site(self, *values: Any, **more: Any) -> None:
        """Has an event, and no line of these tests."""

    def info(self, text: str, *, shown: bool | str = False) -> None:
        self.told.append((text, "INFO", shown))

    def debug(self, text: str) -> None:
        self.told.append((text, "DEBUG", False))

    def warning(self, text: str, *, shown: bool | str = False) -> None:
        self.told.append((text, "WARNING", shown))

    def shown(self) -> list[bool | str]:
        return [shown for *_, shown in self.told if shown]


def tuning(misses: dict[str, Miss], **fields: Any) -> Any:
    """The context of a tuning whose sites the cache misses so."""
    site = SimpleNamespace(**{"kernel": "gemm", "key": "[8]", "texts": [], "n_removed": 0, **fields})
    lookup, sites = SimpleNamespace(reason_of_miss=misses.__getitem__), SimpleNamespace(met=dict.fromkeys(misses, site))
    return SimpleNamespace(story=_Story(*misses), options=SimpleNamespace(notices=Notices()), lookup=lookup, sites=sites)


def test_of_twenty_sites_one_is_told_on_the_terminal():
    """And how many more there are; the log has a line for each. A second tuning shows nothing, and warns of nothing."""
    story: Any = _Story()
    notices, told = Notices(), {f"missed {k}": f"site {k} is tuned" for k in range(20)}
    for _ in range(2):
        notices.tell(story, told)
    assert story.shown() == ["site 0 is tuned (and so of 19 more: logs/rank-0.log)"]
    assert [(text, level) for text, level, _ in story.told] == [(text, level) for level in ("WARNING", "INFO") for text in told.values()]


def test_a_new_shape_is_no_warning():
    """A line of the log alone; a record that another code or version puts out of use is told on the terminal, too."""
    misses = {"gemm[8]": Miss("differs in key"), "gemm[4]": Miss("differs in source", is_stale=True), "new[1]": Miss("no record")}
    context = tuning(misses)
    tell_of_sites(context, misses)
    told = {text.partition("site=")[2].split()[0]: (level, bool(shown)) for text, level, shown in context.story.told}
    assert told == {"gemm[8]": ("DEBUG", False), "gemm[4]": ("WARNING", True), "new[1]": ("DEBUG", False)}


@pytest.mark.parametrize(
    ("n_sites", "told"),
    [(1, "4 of 23 configs of site=gemm[0]"), (3, "4 of 23 configs of site=gemm[0] (and so of 2 more: logs/rank-0.log)")],
)
def test_prune_rules_are_told_of_in_one_line(n_sites: int, told: str):
    """However many sites have them, once; the log numbers each site where it names it."""
    misses = {f"gemm[{k}]": Miss("the cache has no record") for k in range(n_sites)}
    context = tuning(misses, configs=[None] * 19, n_removed=4)
    for _ in range(2):
        tell_of_sites(context, misses)
    assert context.story.shown() == [f"prune rules removed {told}"]


# -- beside whole tunings of a function ------------------------------------------------------------------------------


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Logs and a cache of the test's own, and a terminal that shows lines."""
    for name, value in {"LOG_DIR": str(tmp_path / "logs"), "CACHE_DIR": str(tmp_path / "cache"), "VERBOSITY": "normal"}.items():
        monkeypatch.setenv(f"DIST_TUNE_{name}", value)
    monkeypatch.delenv("DIST_TUNE_PROGRESS", raising=False)
    return monkeypatch


def _work(x: int, block: int) -> int:
    return x


def _tuned(function: Any = _work, **options: Any) -> Any:
    """The function decorated anew, as in another process."""
    return autotune(BLOCKS, lambda x: x, n_warmup=0, n_repeat=1, **options)(function)


@pytest.mark.parametrize(("verbosity", "n_told"), [("normal", 1), ("quiet", 0)])
def test_a_hit_is_told_once(settings: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], verbosity: str, n_told: int):
    """Of two keys that the cache has, and of a factory that decorates in every call, the first, with the day; none leaves events."""

    def work(x: int, block: int) -> int:
        return x

    work.__qualname__ = f"work_{tmp_path.name}"  # none that this process has told of
    settings.setenv("DIST_TUNE_VERBOSITY", verbosity)
    first = _tuned(work)
    assert [first(1), first(2)] == [1, 2]
    events = (tmp_path / "logs" / "rank-0.jsonl").read_text()
    capsys.readouterr()
    again = _tuned(work)
    assert [again(1), again(2), again(1), _tuned(work)(2)] == [1, 2, 1, 2]
    assert [each.is_recalled for each in again.records] == [True, True]
    told = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(told) == n_told
    assert all(line.startswith(f"dist_tune: {work.__qualname__}: its config from the cache, tuned 20") for line in told)
    assert (tmp_path / "logs" / "rank-0.jsonl").read_text() == events


@pytest.mark.parametrize(("missing", "words"), [("LOG_DIR", "report: "), ("CACHE_DIR", "dist-tune show")])
def test_what_is_not_kept_is_not_named(settings: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str, words: str):
    """Neither a log nor a record that `dist-tune show ID` would not find: a warning has said that it is not kept."""
    _tuned()(3)
    assert words in capsys.readouterr().err
    (tmp_path / "file").touch()
    settings.setenv(f"DIST_TUNE_{missing}", str(tmp_path / "file"))
    settings.setenv("DIST_TUNE_ALWAYS_TUNE", "1")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        _tuned()(4)
    shown = capsys.readouterr().err
    assert "tuned in" in shown
    assert words not in shown
    assert warned
    if missing == "CACHE_DIR":
        assert any("not kept and will be repeated" in str(each.message) for each in warned)


@pytest.mark.parametrize(
    ("installed", "named"),
    [
        ({"torch": "2.13.0+cpu", "triton": "3.9.0"}, []),
        ({"torch": "2.11.0", "triton": "3.6.0"}, []),
        ({"torch": "2.13.9a0+git1", "triton": "3.9.1.post2"}, []),
        ({"torch": "2.14.0", "triton": "3.9.0"}, ["torch 2.14.0 (2.11 to 2.13)"]),
        ({"torch": "3.0.0a1", "triton": "3.10.0"}, ["torch 3.0.0a1 (2.11 to 2.13)", "triton 3.10.0 (3.6 to 3.9)"]),
        ({"torch": "unknown", "triton": ""}, []),
    ],
)
def test_newer_versions_are_named(installed: dict[str, str], named: list[str], monkeypatch: pytest.MonkeyPatch):
    """With what is tested; numbers behind the second do not count, and 3.10 is above 3.9."""
    monkeypatch.setattr(notices, "TESTED", {"torch": ("2.11", "2.13"), "triton": ("3.6", "3.9")})
    text = newer_than_tested(installed)
    assert [name in text for name in named] == [True] * len(named)
    assert bool(text) is (f"dist_tune {__version__}" in text) is bool(named)


def test_what_the_tests_install_is_what_is_tested():
    """The pinned torch and triton, and the second triton of the Makefile; a newer torch by hand (``logs/versions-cpu``)."""
    root = Path(__file__).parents[2]
    pins = dict(line.split("==") for line in (root / "launch/constraints.txt").read_text().splitlines() if "==" in line)
    (second,) = re.findall(r"triton==(\S+)", (root / "Makefile").read_text())
    assert _numbers(TESTED["torch"][0]) <= _numbers(pins["torch"]) <= _numbers(TESTED["torch"][1])
    assert f"torch {TESTED['torch'][1]}" in (root / "logs/versions-cpu/README.md").read_text()
    assert (pins["triton"].startswith(TESTED["triton"][0]), second.startswith(TESTED["triton"][1])) == (True, True)


def test_newer_versions_are_told_in_the_log_alone(settings: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What pip brings is new every month; ``doctor`` says so as well."""
    settings.setattr(notices, "TESTED", {"torch": ("1.0", "1.1"), "triton": ("3.6", "99.0")})
    assert _tuned()(1) == 1
    assert "newer than dist_tune" not in capsys.readouterr().err
    (line,) = [line for line in (tmp_path / "logs" / "rank-0.log").read_text().splitlines() if "newer than dist_tune" in line]
    assert line[13:20].strip() == "INFO"
    assert f"torch {torch.__version__} (1.0 to 1.1). If a tuning fails, try a tested version" in line
