"""What ranks bring of earlier attempts at a tuning, reduced to what all of them go on from. Pure, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from dist_tune.errors import Failures
from dist_tune.search import PriorTimes

Offer = dict[str, dict[int, list[int]]]
"""Site -> candidate -> samples of the race, and of the finals, in a rank's journal."""


def all_suspects(by_rank: Iterable[Mapping[str, Iterable[int]]]) -> dict[str, set[int]]:
    """Site -> candidates that were under way on any rank when its process died."""
    found: dict[str, set[int]] = {}
    for mine in by_rank:
        for label, suspects in mine.items():
            found.setdefault(label, set()).update(suspects)
    return found


def shared_offer(by_rank: Sequence[tuple[Collection[str], Offer]], suspects: Mapping[str, set[int]]) -> Offer:
    """The samples that all ranks have: each rank brings the sites that it has met, and its offer.

    Without those of suspects, which run alone before anything else is done with them.
    """
    shared = Offer()
    for label in sorted({label for sites, _ in by_rank for label in sites}):
        offers = [offer.get(label, {}) for sites, offer in by_rank if label in sites]
        candidates = sorted(set.intersection(*map(set, offers)) - suspects.get(label, set()))
        if candidates:
            shared[label] = {i: [min(each[i][k] for each in offers) for k in (0, 1)] for i in candidates}
    return shared


def with_suspects(prior: Mapping[str, PriorTimes], suspects: Mapping[str, set[int]]) -> dict[str, PriorTimes]:
    """Prior times of sites, with the suspects."""
    told = {label: replace(prior.get(label, PriorTimes()), suspects=sorted(each)) for label, each in suspects.items()}
    return {**prior, **told}


def first_reasons(by_rank: Mapping[int, Failures]) -> dict[str, dict[int, str]]:
    """Site -> candidate -> "rank r: reason", of the first rank that has one."""
    found: dict[str, dict[int, str]] = {}
    for rank, failures in by_rank.items():
        for label, each in failures.items():
            for i, (_, reason) in each.items():
                found.setdefault(label, {}).setdefault(i, f"rank {rank}: {reason}")
    return found
