"""Notices about many sites at once: a few on the terminal, all in the log."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dist_tune.cache.lookup import Miss
from dist_tune.tuning.notices import Notices, tell_of_sites

pytestmark = pytest.mark.once


class _Story:
    """Of a tuning with these sites: what is written, and whether the terminal shows it."""

    path = "logs/rank-0.log"

    def __init__(self, *labels: str) -> None:
        self.numbers = {label: k for k, label in enumerate(labels)}
        self.told: list[tuple[str, str, bool]] = []

    def site(self, *values: Any, **more: Any) -> None:
        """Has an event, and no line of these tests."""

    def info(self, text: str, *, shown: bool = False) -> None:
        self.told.append((text, "INFO", shown))

    def warning(self, text: str, *, shown: bool = False) -> None:
        self.told.append((text, "WARNING", shown))


def tuning(misses: dict[str, Miss], **fields: Any) -> Any:
    """The context of a tuning whose sites the cache misses so."""
    site = SimpleNamespace(**{"kernel": "gemm", "key": "[8]", "texts": [], "n_removed": 0, **fields})
    lookup, sites = SimpleNamespace(reason_of_miss=misses.__getitem__), SimpleNamespace(met=dict.fromkeys(misses, site))
    return SimpleNamespace(story=_Story(*misses), notices=Notices(), lookup=lookup, sites=sites)


def test_of_twenty_sites_three_are_told_on_the_terminal():
    """And how many more there are; the log has a line for each, and a second tuning shows nothing."""
    story: Any = _Story()
    notices, told = Notices(), {f"missed {k}": f"site {k} is tuned" for k in range(20)}
    notices.say_each(story, told, "sites more are tuned for such reasons: {rank-0}.log")
    notices.say_each(story, told, "")
    shown = [text for text, _, is_shown in story.told if is_shown]
    assert shown == ["site 0 is tuned", "site 1 is tuned", "site 2 is tuned", "17 sites more are tuned for such reasons: {rank-0}.log"]
    assert len(story.told) == 41


def test_a_new_shape_is_no_warning():
    """A line of the log alone; a record that another code or version puts out of use is told on the terminal, too."""
    misses = {"gemm[8]": Miss("differs in key", is_near=True, is_new_shape=True), "gemm[4]": Miss("differs in source", is_near=True)}
    misses["new[1]"] = Miss("the cache has no record of this kernel")
    context = tuning(misses)
    tell_of_sites(context, misses)
    told = {text.partition("site=")[2].split()[0]: (level, is_shown) for text, level, is_shown in context.story.told}
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
    misses = {f"gemm[{k}]": Miss("the cache has no record") for k in range(n_sites)}
    context = tuning(misses, configs=[None] * 19, n_removed=4)
    for _ in range(2):
        tell_of_sites(context, misses)
    assert [text for text, _, is_shown in context.story.told if is_shown] == [told]
