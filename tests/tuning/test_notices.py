"""Notices about many sites at once, about what was found, and about what is not kept: a few on the
terminal, all in the log.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_tune import __version__, autotune, contextual_autotune
from dist_tune.tuning import newer_than_tested, notices
from dist_tune.tuning.notices import TESTED
from tests.steps import BLOCKS, named

Shown = Callable[[str], list[str]]
"""The lines with some words that the terminal has shown since the last call."""


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Logs and a cache of the test's own, and a terminal that shows lines."""
    for name, value in {
        "LOG_DIR": str(tmp_path / "logs"),
        "CACHE_DIR": str(tmp_path / "cache"),
        "VERBOSITY": "normal",
    }.items():
        monkeypatch.setenv(f"DIST_TUNE_{name}", value)
    return monkeypatch


@pytest.fixture
def shown(settings: Any, capfd: pytest.CaptureFixture[str]) -> Shown:
    return lambda words: [line for line in capfd.readouterr().err.splitlines() if words in line]


def logged(tmp_path: Path, words: str) -> list[str]:
    return [
        line
        for line in (tmp_path / "logs" / "rank-0.log").read_text().splitlines()
        if words in line
    ]


def decorated(*rules: Any, plus: int = 0, name: str = "work", **options: Any) -> Any:
    """A function decorated anew, as in another process; with another ``plus`` its code is another
    one.
    """

    def work(x: int, block: int) -> int:
        return x + plus

    return autotune(BLOCKS, lambda x: x, *rules, n_warmup=0, n_repeat=1, **options)(
        named(name, work)
    )


@pytest.mark.parametrize(
    ("n_sites", "more"), [(1, ""), (3, r" \(and so of 2 more: .*rank-0\.log\)")]
)
def test_of_many_sites_one_is_told_on_the_terminal(
    shown: Shown, tmp_path: Path, n_sites: int, more: str
):
    """And how many more there are; the log has a line for each."""
    work = decorated(lambda config, *_: config["block"] < 4)
    contextual_autotune(n_warmup=0, n_repeat=1)(lambda: [work(k) for k in range(n_sites)])()
    (line,) = shown("prune rules removed")
    assert re.search(rf"prune rules removed 1 of 3 configs of work \[0\]{more}$", line)
    assert len(logged(tmp_path, "prune rules removed")) == n_sites


def test_a_new_shape_is_no_warning(shown: Shown, tmp_path: Path):
    """A line of the log alone; a record that another code puts out of use is told on the terminal,
    too.
    """
    decorated()(8)
    shown("")
    changed = decorated(plus=1)
    assert (changed(8), changed(4)) == (9, 5)
    assert len(shown("is tuned: ")) == 1
    assert [
        re.search(r"\[\d\]", line)[0]  # type: ignore[index]
        for line in logged(tmp_path, "is tuned: ")
        if " WARNING " in line
    ] == ["[8]"]
    assert any("[4]" in line and " DEBUG " in line for line in logged(tmp_path, "is tuned: "))


@pytest.mark.parametrize(("verbosity", "n_told"), [("normal", 1), ("quiet", 0)])
def test_a_hit_is_told_once(
    settings: Any, shown: Shown, tmp_path: Path, verbosity: str, n_told: int
):
    """Of two keys that the cache has, and of a factory that decorates in every call, the first,
    with the day.
    """
    settings.setenv("DIST_TUNE_VERBOSITY", verbosity)
    name = f"work_{tmp_path.name}"  # none that this process has told of
    first = decorated(name=name)
    assert [first(1), first(2)] == [1, 2]
    shown("")
    again = decorated(name=name)
    assert [again(1), again(2), again(1), decorated(name=name)(2)] == [1, 2, 1, 2]
    assert [each.is_recalled for each in again.records] == [True, True]
    told = list(filter(None, shown("")))
    assert len(told) == n_told
    assert all(
        line.startswith(f"dist_tune: {name}: its config from the cache, tuned 20") for line in told
    )


@pytest.mark.parametrize(
    ("missing", "words"), [("LOG_DIR", "report: "), ("CACHE_DIR", "dist-tune show")]
)
def test_what_is_not_kept_is_not_named(
    settings: Any, shown: Shown, tmp_path: Path, missing: str, words: str
):
    """Neither a log nor a record that `dist-tune show ID` would not find: a warning has said that
    it is not kept.
    """
    decorated()(3)
    assert shown(words)
    (tmp_path / "file").touch()
    settings.setenv(f"DIST_TUNE_{missing}", str(tmp_path / "file"))
    settings.setenv("DIST_TUNE_ALWAYS_TUNE", "1")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        decorated()(4)
    lines = shown("")
    assert any("tuned in" in line for line in lines)
    assert not any(words in line for line in lines)
    assert any(
        "not kept and will be repeated" in str(each.message) or missing == "LOG_DIR"
        for each in warned
    )


VERSIONS: list[tuple[dict[str, str], list[str]]] = [
    ({"torch": "2.13.0+cpu", "triton": "3.9.0"}, []),
    ({"torch": "2.13.9a0+git1", "triton": "3.9.1.post2"}, []),
    ({"torch": "2.14.0", "triton": "3.9.0"}, ["torch 2.14.0 (2.11 to 2.13)"]),
    (
        {"torch": "3.0.0a1", "triton": "3.10.0"},
        ["torch 3.0.0a1 (2.11 to 2.13)", "triton 3.10.0 (3.6 to 3.9)"],
    ),
    ({"torch": "unknown", "triton": ""}, []),
]


@pytest.mark.parametrize(("installed", "told"), VERSIONS)
def test_newer_versions_are_named(
    installed: dict[str, str], told: list[str], monkeypatch: pytest.MonkeyPatch
):
    """With what is tested; numbers behind the second do not count, and 3.10 is above 3.9."""
    monkeypatch.setattr(notices, "TESTED", {"torch": ("2.11", "2.13"), "triton": ("3.6", "3.9")})
    text = newer_than_tested(installed)
    assert all(each in text for each in told)
    assert bool(text) is (f"dist_tune {__version__}" in text) is bool(told)


def test_what_the_tests_install_is_what_is_tested():
    """The pinned torch and triton, and the second triton of the Makefile; a newer torch by hand
    (``logs/versions-cpu``).
    """
    root = Path(__file__).parents[2]
    pins = dict(
        line.split("==")
        for line in (root / "launch/constraints.txt").read_text().splitlines()
        if "==" in line
    )
    (second,) = re.findall(r"triton==(\S+)", (root / "Makefile").read_text())
    assert newer_than_tested({"torch": pins["torch"], "triton": second}) == ""
    assert f"torch {TESTED['torch'][1]}" in (root / "logs/versions-cpu/README.md").read_text()
    assert (
        pins["triton"].startswith(TESTED["triton"][0]),
        second.startswith(TESTED["triton"][1]),
    ) == (True, True)


def test_newer_versions_are_told_in_the_log_alone(settings: Any, shown: Shown, tmp_path: Path):
    """What pip brings is new every month; ``doctor`` says so as well."""
    settings.setattr(notices, "TESTED", {"torch": ("1.0", "1.1"), "triton": ("3.6", "99.0")})
    assert decorated()(1) == 1
    assert shown("newer than dist_tune") == []
    (line,) = logged(tmp_path, "newer than dist_tune")
    assert line[13:20].strip() == "INFO"
    assert (
        f"torch {torch.__version__} (1.0 to 1.1). If a tuning fails, try a tested version" in line
    )
