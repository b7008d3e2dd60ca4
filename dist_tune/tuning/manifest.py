"""What ranks tell each other at a roll call and at a vote, and what follows from the ballots of all.

Pure: a ballot is plain values and travels as JSON. What follows is computed once, from the ballots of all, and read by all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dist_tune.cache import LookupResult
from dist_tune.compiler import CompileKeys, Placement
from dist_tune.configs import digest
from dist_tune.search import PriorTimes


@dataclass(frozen=True, slots=True)
class RankManifest:
    """What a rank brings before anything is compiled for others or measured."""

    placement: Placement
    sites: dict[str, str] = field(default_factory=dict)
    """Sites not told before -> digest of their candidates."""
    lists: dict[str, list[str]] = field(default_factory=dict)
    """The candidates of some of them, described. The first rank spells all of its lists out, the others those that are asked for."""
    keys: dict[str, str] = field(default_factory=dict)
    """Site -> compile keys of its candidates in a row."""
    hits: dict[str, str] = field(default_factory=dict)
    """Sites that Triton already has a config for on this rank -> that config."""
    is_watched: bool = True
    """Whether the launches of the run before were heard from its beginning, so that ``hits`` is all there is."""
    folder: str = ""
    """Where this rank's cache lies; empty without one."""
    tickets: dict[str, LookupResult] = field(default_factory=dict)
    """Site -> what this rank's cache has of it; of all of ``sites``."""
    known: dict[str, PriorTimes] = field(default_factory=dict)
    """What earlier tunings found. The first rank brings it."""
    warmed_up: dict[str, int] = field(default_factory=dict)
    """Sites whose candidates cannot be compiled ahead -> how often each is to run untimed."""


@dataclass(frozen=True, slots=True)
class SharedRecord:
    """A site that all ranks take from the cache."""

    winner: str
    """Described."""
    provider: int
    """The rank whose record is used."""
    lacking: list[int]
    """Ranks that have no such record, or one of another config."""


@dataclass(frozen=True, slots=True)
class SiteManifest:
    """What follows from a roll call."""

    sites: list[str]
    """All sites that are new on some rank."""
    lists: dict[str, list[str]]
    """Of those that are not new on all ranks -> their candidates, described: some rank does not know them."""
    unlisted: list[str]
    """Sites whose lists differ or are not spelled out yet: the next roll call brings them."""
    mismatch: str
    """Two ranks have different candidates for one site, or in another order: the first difference. Empty if not."""
    disputed: list[str]
    """Sites that some rank has a config for while another lacks it or has a different one."""
    is_watched: bool
    """Whether the hits of all ranks are known. Where all have missed the same sites in the midst of a call, they do not matter."""
    compile_keys: dict[str, list[CompileKeys]]
    recalled: dict[str, SharedRecord] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    """Sites that some rank has a record of which not all can use."""
    missed: str = ""
    """Why there is no record of a site that must have one; empty if all is well."""
    keepers: dict[str, list[int]] = field(default_factory=dict)
    """Site -> ranks that keep its record: one for each place and key."""
    known: dict[str, PriorTimes] = field(default_factory=dict)
    warmed_up: dict[str, int] = field(default_factory=dict)


def reduce_manifests(calls: Mapping[int, RankManifest]) -> SiteManifest:
    """Reduce the roll calls of all ranks: rank -> call."""
    lists: dict[str, list[str]] = {}
    mismatch = ""
    for rank, call in calls.items():
        for label, texts in call.lists.items():
            known = lists.setdefault(label, texts)
            if texts != known:
                mismatch = mismatch or _difference(label, rank, texts, known)
    unlisted = {label for call in calls.values() for label, each in call.sites.items() if digest(lists.get(label, [])) != each}
    compile_keys: dict[str, dict[tuple[str, str, int], CompileKeys]] = {}
    for rank, call in calls.items():
        placement = call.placement
        for label, keys in call.keys.items():
            found = compile_keys.setdefault(label, {}).setdefault(
                (placement.host, keys, placement.n_ranks), CompileKeys(placement.host, keys, [], [], placement.n_ranks)
            )
            found.ranks.append(rank)
            found.positions.append(placement.position)
    sites = sorted({label for call in calls.values() for label in call.sites})
    recalled, refused = _lookup(sites, calls)
    missed = [
        f"site {label}, rank {rank}: {ticket.miss}"
        for label in sites
        for rank, call in calls.items()
        if label not in recalled and (ticket := call.tickets.get(label)) is not None and ticket.miss
    ]
    is_equal = bool(sites) and all(len(call.sites) == len(sites) and not call.is_watched for call in calls.values())
    return SiteManifest(
        sites,
        {label: texts for label, texts in lists.items() if any(label not in call.sites for call in calls.values())},
        sorted(unlisted),
        mismatch,
        sorted(_contested(calls)),
        is_equal or all(call.is_watched for call in calls.values()),
        {label: _short(list(each.values())) for label, each in compile_keys.items()},
        recalled,
        refused,
        next(iter(missed), ""),
        {label: _keepers(label, calls) for label in sites},
        {label: each for call in reversed(list(calls.values())) for label, each in call.known.items()},
        {label: n_runs for call in calls.values() for label, n_runs in call.warmed_up.items() if label not in recalled},
    )


def _lookup(sites: Sequence[str], calls: Mapping[int, RankManifest]) -> tuple[dict[str, SharedRecord], list[str]]:
    """Hit on all ranks or on none: the record of the first rank that has one, if all can use it."""
    recalled, refused = {}, []
    for label in sites:
        tickets = {rank: call.tickets[label] for rank, call in calls.items() if label in call.tickets}
        having = [rank for rank, ticket in tickets.items() if ticket.winner]
        if not having:
            continue
        first = tickets[having[0]]
        # A rank of another key (another GPU, an integer that its code has captured) must have come to the same choice itself.
        if all(ticket.is_open and (ticket.winner == first.winner or ticket.key == first.key) for ticket in tickets.values()):
            lacking = [rank for rank in calls if rank not in tickets or tickets[rank].winner != first.winner]
            recalled[label] = SharedRecord(first.winner, having[0], lacking)
        else:
            refused.append(label)
    return recalled, refused


def _keepers(label: str, calls: Mapping[int, RankManifest]) -> list[int]:
    first: dict[tuple[str, str], int] = {}
    for rank, call in calls.items():
        if label in call.tickets and call.folder:
            first.setdefault((call.folder, call.tickets[label].key), rank)
    return sorted(first.values())


def _short(compile_keys: list[CompileKeys]) -> list[CompileKeys]:
    """Without the keys where all ranks of a host have the same."""
    by_host: dict[str, set[str]] = {}
    for each in compile_keys:
        by_host.setdefault(each.host, set()).add(each.keys)
    return [replace(each, keys="") if len(by_host[each.host]) == 1 else each for each in compile_keys]


def _contested(calls: Mapping[int, RankManifest]) -> set[str]:
    missed = {label for call in calls.values() for label in call.sites}
    hits: dict[str, set[str]] = {}
    for call in calls.values():
        for label, config in call.hits.items():
            hits.setdefault(label, set()).add(config)
    return {label for label, configs in hits.items() if label in missed or len(configs) > 1}


def _difference(label: str, rank: int, texts: list[str], others: list[str]) -> str:
    index = next((i for i, (a, b) in enumerate(zip(texts, others, strict=False)) if a != b), min(len(texts), len(others)))
    mine, theirs = (f'"{each[index]}"' if index < len(each) else "nothing" for each in (texts, others))
    return (
        f"site {label}: rank {rank} has {len(texts)} candidates, ranks before it have {len(others)}; first difference at index {index}: "
        f"{mine} on rank {rank}, {theirs} before. Build and prune the config list from values that are equal on all ranks."
    )
