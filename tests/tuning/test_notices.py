"""Notices about many sites at once: a few on the terminal, all in the log."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from dist_tune.cache.lookup import Miss
from dist_tune.output import Logger
from dist_tune.tuning.notices import Notices, tell_of_sites

pytestmark = pytest.mark.once


def test_of_twenty_sites_three_are_told_on_the_terminal():
    """And how many more there are; the log has a line for each, and a second tuning shows nothing."""
    shown: list[str] = []
    lines: list[str] = []

    def write(level: int, line: str, progress: bool | str) -> None:
        lines.append(line)
        if progress:
            shown.append(line)

    notices, told = Notices(), {f"missed {k}": f"site {k} is tuned" for k in range(20)}
    notices.say_each(Logger(write, 0), told, "sites more are tuned for such reasons: {rank-0}.log")
    notices.say_each(Logger(write, 0), told, "")
    assert shown == ["site 0 is tuned", "site 1 is tuned", "site 2 is tuned", "17 sites more are tuned for such reasons: {rank-0}.log"]
    assert len(lines) == 41


def test_a_new_shape_is_no_warning():
    """A line of the log alone; a record that another code or version puts out of use is told on the terminal, too."""
    told: dict[str, tuple[str, bool]] = {}
    misses = {"gemm[8]": Miss("differs in key", is_near=True, is_new_shape=True), "gemm[4]": Miss("differs in source", is_near=True)}
    misses["new[1]"] = Miss("the cache has no record of this kernel")

    def write(level: int, line: str, progress: bool | str) -> None:
        text = line.partition("site=")[2]
        told[text.split()[0]] = logging.getLevelName(level), bool(progress)

    site = SimpleNamespace(kernel="gemm", key="[8]", texts=[], n_removed=0)
    context: Any = SimpleNamespace(
        log=Logger(write, 0),
        notices=Notices(),
        lookup=SimpleNamespace(reason_of_miss=misses.__getitem__),
        story=SimpleNamespace(numbers={}, path="", site=lambda *values: None),
        sites=SimpleNamespace(met=dict.fromkeys(misses, site)),
    )
    tell_of_sites(context, misses)
    assert told == {"gemm[8]": ("INFO", False), "gemm[4]": ("WARNING", True), "new[1]": ("INFO", False)}


@pytest.mark.parametrize(
    ("n_sites", "told"),
    [
        (1, "prune rules removed 4 of 23 configs of site=gemm[0]"),
        (3, "prune rules removed 12 of 69 configs at 3 sites, each in logs/rank-0.log"),
    ],
)
def test_prune_rules_are_told_of_in_one_line(n_sites: int, told: str):
    """However many sites have them, once; the log numbers each site where it names it."""
    shown: list[str] = []

    def write(level: int, line: str, progress: bool | str) -> None:
        if progress:
            shown.append(line)

    labels = [f"gemm[{k}]" for k in range(n_sites)]
    site = SimpleNamespace(kernel="gemm", key="[0]", texts=[], configs=[None] * 19, n_removed=4)
    lookup = SimpleNamespace(reason_of_miss=lambda label: Miss("the cache has no record"))
    story = SimpleNamespace(numbers=dict(zip(labels, range(n_sites), strict=True)), path="logs/rank-0.log", site=lambda *values: None)
    sites = SimpleNamespace(met=dict.fromkeys(labels, site))
    context: Any = SimpleNamespace(log=Logger(write, 0), notices=Notices(), lookup=lookup, story=story, sites=sites)
    for _ in range(2):
        tell_of_sites(context, labels)
    assert shown == [told]
