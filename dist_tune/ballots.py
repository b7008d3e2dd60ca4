"""What ranks tell each other at a meeting, and what follows from the ballots of all.

Pure: a ballot is plain values and travels as JSON. Every rank computes the same from the same ballots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from dist_tune.engine import Report
from dist_tune.errors import RankMismatchError


@dataclass(frozen=True, slots=True)
class Ballot:
    """What a rank brings to a meeting."""

    sites: dict[str, list[str]] = field(default_factory=dict)
    """Sites not told before -> their candidates, described."""
    hits: dict[str, str] = field(default_factory=dict)
    """Sites that Triton already has a config for on this rank -> that config."""
    is_watched: bool = True
    """Whether the launches of the run before were heard from its beginning, so that ``hits`` is all there is."""
    report: Report = field(default_factory=Report)


BALLOT = TypeAdapter(Ballot)
"""Reads and writes ballots as JSON."""


def check_lists(known: dict[str, list[str]], ballots: Mapping[int, Ballot]) -> None:
    """Add the ballots' sites to ``known``: site -> candidates.

    Raises:
        RankMismatchError: two ranks have different candidates for one site, or in another order.
    """
    for rank, ballot in ballots.items():
        for label, texts in ballot.sites.items():
            if texts != known.setdefault(label, texts):
                raise RankMismatchError(_difference(label, rank, texts, known[label]))


def contested(ballots: Mapping[int, Ballot], missed: Mapping[str, list[str]]) -> set[str]:
    """Sites that some rank has a config for while another lacks it or has a different one."""
    hits: dict[str, set[str]] = {}
    for ballot in ballots.values():
        for label, config in ballot.hits.items():
            hits.setdefault(label, set()).add(config)
    return {label for label, configs in hits.items() if label in missed or len(configs) > 1}


def votes(label: str, ballots: Mapping[int, Ballot]) -> dict[int, str]:
    """Candidates of a site that cannot run on some rank -> "rank r: why", of the first such rank."""
    against: dict[int, str] = {}
    for rank, ballot in ballots.items():
        for index, reason in ballot.report.failures.get(label, {}).items():
            against.setdefault(index, f"rank {rank}: {reason}")
    return against


def _difference(label: str, rank: int, texts: list[str], others: list[str]) -> str:
    index = next((i for i, (a, b) in enumerate(zip(texts, others, strict=False)) if a != b), min(len(texts), len(others)))
    mine, theirs = (f'"{each[index]}"' if index < len(each) else "nothing" for each in (texts, others))
    return (
        f"site {label}: rank {rank} has {len(texts)} candidates, ranks before it have {len(others)}; first difference at index {index}: "
        f"{mine} on rank {rank}, {theirs} before. Build and prune the config list from values that are equal on all ranks."
    )
