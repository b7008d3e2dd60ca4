"""What ranks tell each other at a roll call and at a vote, and what follows from the ballots of all.

Pure: a ballot is plain values and travels as JSON. What follows is computed once, from the ballots of all, and read by all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dist_tune.shares import Bench, Keyset
from dist_tune.space import digest


@dataclass(frozen=True, slots=True)
class RollCall:
    """What a rank brings before anything is compiled for others or measured."""

    bench: Bench
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


@dataclass(frozen=True, slots=True)
class Roll:
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
    keysets: dict[str, list[Keyset]]


def roll(calls: Mapping[int, RollCall]) -> Roll:
    """Reduce the roll calls of all ranks: rank -> call."""
    lists: dict[str, list[str]] = {}
    mismatch = ""
    for rank, call in calls.items():
        for label, texts in call.lists.items():
            known = lists.setdefault(label, texts)
            if texts != known:
                mismatch = mismatch or _difference(label, rank, texts, known)
    unlisted = {label for call in calls.values() for label, each in call.sites.items() if digest(lists.get(label, [])) != each}
    keysets: dict[str, dict[tuple[str, str, int], Keyset]] = {}
    for rank, call in calls.items():
        bench = call.bench
        for label, keys in call.keys.items():
            found = keysets.setdefault(label, {}).setdefault(
                (bench.host, keys, bench.n_ranks), Keyset(bench.host, keys, [], [], bench.n_ranks)
            )
            found.ranks.append(rank)
            found.positions.append(bench.position)
    sites = sorted({label for call in calls.values() for label in call.sites})
    return Roll(
        sites,
        {label: texts for label, texts in lists.items() if any(label not in call.sites for call in calls.values())},
        sorted(unlisted),
        mismatch,
        sorted(_contested(calls)),
        all(call.is_watched for call in calls.values()),
        {label: _short(list(each.values())) for label, each in keysets.items()},
    )


def _short(keysets: list[Keyset]) -> list[Keyset]:
    """Without the keys where all ranks of a host have the same."""
    by_host: dict[str, set[str]] = {}
    for each in keysets:
        by_host.setdefault(each.host, set()).add(each.keys)
    return [replace(each, keys="") if len(by_host[each.host]) == 1 else each for each in keysets]


def _contested(calls: Mapping[int, RollCall]) -> set[str]:
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
