"""Manifests of sites: what each rank has met, and what follows for all of them before anything is
compiled or measured.

Pure: plain values that travel as JSON. The reduction is computed once, from the manifests of all
ranks, and read by all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dist_tune.errors import Failures
from dist_tune.records import LookupResult, digest
from dist_tune.search import PriorTimes
from dist_tune.settings import NEAREST

LEFT = "is left alone in a collective"
"""How the reason of a rank begins that is the consequence of what another one did."""


@dataclass(frozen=True, slots=True)
class RankManifest:
    """The sites of one rank."""

    sites: dict[str, str] = field(default_factory=dict)
    """Sites not reported before -> digest of their candidates."""
    lists: dict[str, list[str]] = field(default_factory=dict)
    """The candidates of some of them, described.

    The first rank spells all of its lists out, the others those that are asked for.
    """
    hits: dict[str, str] = field(default_factory=dict)
    """Sites that Triton already has a config for on this rank -> that config."""
    is_watched: bool = True
    """True if the launches of the run before were heard from its beginning, so that ``hits`` has
    them all.
    """
    folder: str = ""
    """Identity of this rank's cache directory; empty without one."""
    lookups: dict[str, LookupResult] = field(default_factory=dict)
    """Site -> result of this rank's look-up; of all of ``sites``."""
    prior: dict[str, PriorTimes] = field(default_factory=dict)
    """Site -> times of earlier tunings. The first rank brings it."""
    warm_ups: dict[str, int] = field(default_factory=dict)
    """Sites whose candidates cannot be compiled ahead -> untimed runs of each."""
    is_elsewhere: bool = False
    """True on the first rank if another job is tuning the same."""
    run_s: float = 0.0
    """Host seconds of this rank's latest run of the closure."""
    captured: dict[str, dict[str, str]] = field(default_factory=dict)
    """Label -> the code of its kernel and the values that it has captured, by name."""
    wrong: dict[str, str] = field(default_factory=dict)
    """Sites whose config from the cache has answered wrongly here -> how."""
    settings: dict[str, float | bool | str] = field(default_factory=dict)
    """Environment variables that ranks should have in common."""
    n_threads: int = 1
    """That compile on this rank's host."""
    why_not: str = ""
    """Why nothing may be replayed, as this rank has found, and what follows: replays, or endless
    arguments or keys.
    """
    may_go_online: bool = False
    """True if the call may be tuned online for that reason."""
    deaths: dict[str, dict[int, int]] = field(default_factory=dict)
    """Site -> candidate -> earlier processes of this rank that died while it was under way."""
    barred: Failures = field(default_factory=dict)
    """Candidates that did not run on this rank in an earlier attempt, or are in quarantine."""


@dataclass(frozen=True, slots=True)
class SharedRecord:
    """A site that all ranks take from the cache."""

    winner: str
    """Described."""
    provider: int
    """The rank whose record is used."""
    lacking: list[int]
    """Ranks without such a record, or with one of another config."""


@dataclass(frozen=True, slots=True)
class SiteManifest:
    """The sites of all ranks."""

    sites: list[str]
    """All sites that are new on some rank."""
    lists: dict[str, list[str]]
    """Sites that are not new on all ranks -> their candidates, described, for the ranks that do not
    know them.
    """
    unlisted: list[str]
    """Sites whose lists differ or are not spelled out yet: the next meeting brings them."""
    shared: dict[str, list[str]]
    """Sites whose lists differ -> the candidates that all ranks have, in the order of the first
    one.
    """
    disputed: list[str]
    """Sites that some rank has a config for while another lacks it or has a different one."""
    is_watched: bool
    """True if the hits of all ranks are known, or do not matter: all ranks have missed the same
    sites in the midst of a call.
    """
    cached: dict[str, SharedRecord] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    """Sites with a record on some rank that not all ranks can use."""
    missed: str = ""
    """Reason why a site that must have a record has none; empty if all is well."""
    writers: dict[str, list[int]] = field(default_factory=dict)
    """Site -> ranks that write its record: one for each folder and key."""
    prior: dict[str, PriorTimes] = field(default_factory=dict)
    warm_ups: dict[str, int] = field(default_factory=dict)
    """On some rank: all take part in the compilation."""
    run_s: float = 0.0
    """Of the slowest rank."""
    is_elsewhere: bool = False
    """True if another job is tuning the same."""
    wrong: dict[str, str] = field(default_factory=dict)
    """Sites whose config from the cache has answered wrongly on some rank -> "rank r: how"."""
    differing: str = ""
    """Settings that differ between ranks, with the values; empty if there are none."""
    n_threads: int = 1
    """That compile on the host with the most."""
    why_not: str = ""
    """Reason why the call is not tuned, and what to do: of the first rank that has one; empty if
    nothing asks for a replay.
    """
    mode: str = ""
    """DIST_TUNE_MODE, if nothing is tuned for it: "first" if any rank has that, else "cached" if
    any has that.
    """
    left_s: dict[int, float] = field(default_factory=dict)
    """Rank -> seconds of its second run, if the only reason of all that say no is that they were
    left alone in a collective of it.
    """
    goes_online: bool = False
    """True if ``why_not`` is no reason against tuning online, on any rank."""
    deaths: dict[str, dict[int, int]] = field(default_factory=dict)
    """On the rank with the most."""
    barred: dict[str, dict[int, str]] = field(default_factory=dict)
    """Site -> candidate -> "rank r: reason" of the first rank."""

    @property
    def to_tune(self) -> list[str]:
        """New sites that are not taken from the cache."""
        return [label for label in self.sites if label not in self.cached]


def reduce_manifests(manifests: Mapping[int, RankManifest]) -> SiteManifest:
    """Reduce the manifests of all ranks: rank -> manifest."""
    lists = {
        label: texts
        for mine in reversed([*manifests.values()])
        for label, texts in mine.lists.items()
    }
    shared, unshared = _shared_candidates(lists, manifests)
    everyone = manifests.values()
    sites = sorted({label for mine in everyone for label in mine.sites})
    cached, refused = _share_records(sites, manifests)
    missed = (
        f"site {label}, rank {rank}: {mine.lookups[label].miss}"
        for label in sites
        for rank, mine in manifests.items()
        if label not in cached and label in mine.lookups and mine.lookups[label].miss
    )
    mixed = _mixed(manifests)
    prior = {label: each for mine in reversed(list(everyone)) for label, each in mine.prior.items()}
    deaths: dict[str, dict[int, int]] = {}
    barred: dict[str, dict[int, str]] = {}
    for rank, mine in manifests.items():
        for label, death in mine.deaths.items():
            of = deaths.setdefault(label, {})
            of.update({i: max(n, of.get(i, 0)) for i, n in death.items()})
        for label, failures in mine.barred.items():
            for i, (_, reason) in failures.items():
                barred.setdefault(label, {}).setdefault(
                    i, reason if reason.startswith("rank ") else f"rank {rank}: {reason}"
                )
    disputed = sorted(_disputed(manifests) - mixed.keys())
    is_asking = disputed or refused or any(label not in cached for label in sites)
    against = [
        (rank, mine.why_not) for rank, mine in manifests.items() if mine.why_not and is_asking
    ]
    # First what rules all out; last a consequence of another rank's reason.
    against.sort(key=lambda each: (manifests[each[0]].may_go_online, each[1].startswith(LEFT)))
    namesakes = [
        f"launches {label}, which by the order of launches is another kernel on another rank"
        f" ({mixed[label]}): not tuned; pass these values as arguments"
        for label in sites
        if label in mixed and label not in cached
    ]
    namesakes += [why for label, why in unshared.items() if label not in cached]
    modes = [mine.settings.get("DIST_TUNE_MODE") for mine in everyone]
    mode = next((each for each in ("first", "cached", NEAREST) if each in modes), "")
    all_left = bool(against) and all(why.startswith(LEFT) for _, why in against)
    goes_online = bool(against) and all(manifests[rank].may_go_online for rank, _ in against)
    untuned = [why for _, why in against]
    if len(manifests) > 1:
        untuned = [f"{why} (on rank {rank})" for rank, why in against]
    is_equal = bool(sites) and all(
        len(mine.sites) == len(sites) and not mine.is_watched for mine in everyone
    )
    return SiteManifest(
        sites=sites,
        lists={
            label: texts
            for label, texts in lists.items()
            if any(label not in mine.sites for mine in everyone)
        },
        unlisted=sorted(
            {
                label
                for mine in everyone
                for label, site in mine.sites.items()
                if digest(lists.get(label, [])) != site
            }
        ),
        shared=shared,
        disputed=disputed,
        is_watched=is_equal or all(mine.is_watched for mine in everyone),
        cached=cached,
        refused=refused,
        missed=next(missed, ""),
        writers={label: _writers(label, manifests) for label in sites},
        prior={
            **prior,
            **{
                label: replace(prior.get(label, PriorTimes()), suspects=sorted(death))
                for label, death in deaths.items()
            },
        },
        deaths=deaths,
        barred=barred,
        warm_ups={
            label: n_runs
            for mine in everyone
            for label, n_runs in mine.warm_ups.items()
            if label not in cached
        },
        is_elsewhere=any(mine.is_elsewhere for mine in everyone),
        run_s=max((mine.run_s for mine in everyone), default=0.0),
        wrong={
            label: f"rank {rank}: {how}"
            for rank, mine in reversed(list(manifests.items()))
            for label, how in mine.wrong.items()
        },
        differing=_differing_settings(manifests),
        why_not=next(iter([*namesakes, *untuned] if goes_online else [*untuned, *namesakes]), ""),
        left_s=(
            {rank: mine.run_s for rank, mine in manifests.items()}
            if all_left and not namesakes
            else {}
        ),
        goes_online=goes_online and not namesakes and not mode,
        mode=mode,
        n_threads=max((mine.n_threads for mine in everyone), default=1),
    )


def _differing_settings(manifests: Mapping[int, RankManifest]) -> str:
    """Each variable with its values and the first rank of each: "NAME is 0 on rank 0, 1 on rank
    1".
    """
    told = []
    for name in next(iter(manifests.values())).settings:
        first = dict[float | bool | str, int]()
        for rank, mine in manifests.items():
            first.setdefault(mine.settings.get(name, 0), rank)
        if len(first) > 1:
            values = {
                value if isinstance(value, str) else f"{value:g}": rank
                for value, rank in first.items()
            }
            told.append(
                f"{name} is"
                f" {', '.join(f'{value} on rank {rank}' for value, rank in values.items())}"
            )
    return "; ".join(told)


def _share_records(
    sites: Sequence[str], manifests: Mapping[int, RankManifest]
) -> tuple[dict[str, SharedRecord], list[str]]:
    """Hit on all ranks or on none: the record of the first rank that has one, if all can use it."""
    shared, refused = {}, []
    for label in sites:
        found = {
            rank: mine.lookups[label] for rank, mine in manifests.items() if label in mine.lookups
        }
        having = [rank for rank, each in found.items() if each.winner]
        if not having:
            continue
        first = found[having[0]]
        # A rank of another key (another GPU, an integer that its code has captured) must have come
        # to the same choice itself.
        if all(
            each.is_open and (each.winner == first.winner or each.key == first.key)
            for each in found.values()
        ):
            lacking = [
                rank
                for rank in manifests
                if rank not in found or found[rank].winner != first.winner
            ]
            shared[label] = SharedRecord(first.winner, having[0], lacking)
        else:
            refused.append(label)
    return shared, refused


def _writers(label: str, manifests: Mapping[int, RankManifest]) -> list[int]:
    first: dict[tuple[str, str], int] = {}
    for rank, mine in manifests.items():
        if label in mine.lookups and mine.folder:
            first.setdefault((mine.folder, mine.lookups[label].key), rank)
    return sorted(first.values())


def _mixed(manifests: Mapping[int, RankManifest]) -> dict[str, str]:
    """Labels that are not one kernel on all ranks -> what tells two ranks' apart.

    Values that are each rank's own number do not.
    """
    first: dict[str, int] = {}
    mixed: dict[str, str] = {}
    order = list(manifests)
    for rank, mine in manifests.items():
        for label, values in mine.captured.items():
            other = first.setdefault(label, rank)
            known = manifests[other].captured[label]
            own = {(str(other), str(rank)), (str(order.index(other)), str(order.index(rank)))}
            pairs = {
                name: (known.get(name, "-"), values.get(name, "-")) for name in [*known, *values]
            }
            differing = {
                name: pair for name, pair in pairs.items() if pair[0] != pair[1] and pair not in own
            }
            if differing and label not in mixed:
                mixed[label] = ", ".join(
                    f"{name}={a} on rank {other}, {b} on rank {rank}"
                    for name, (a, b) in differing.items()
                )
    return mixed


def _disputed(manifests: Mapping[int, RankManifest]) -> set[str]:
    missed = {label for mine in manifests.values() for label in mine.sites}
    hits: dict[str, set[str]] = {}
    for mine in manifests.values():
        for label, config in mine.hits.items():
            hits.setdefault(label, set()).add(config)
    return {label for label, configs in hits.items() if label in missed or len(configs) > 1}


def _shared_candidates(
    lists: Mapping[str, list[str]], manifests: Mapping[int, RankManifest]
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Site whose lists differ -> the candidates that all ranks have; and site without any such
    candidate -> why it is not tuned.
    """
    shared: dict[str, list[str]] = {}
    unshared: dict[str, str] = {}
    for label, first in lists.items():
        theirs = {
            rank: mine.lists[label] for rank, mine in manifests.items() if label in mine.lists
        }
        for rank, texts in theirs.items():
            if texts != first:
                shared[label] = [text for text in shared.get(label, first) if text in texts]
            if label in shared and not shared[label]:
                told = (
                    f"{_quoted(first)} on rank {next(iter(theirs))}, {_quoted(texts)} on rank"
                    f" {rank}"
                )
                unshared[label] = (
                    f"launches {label}, and no config of it is on all ranks ({told}): not tuned;"
                    " build and prune its configs from what is equal on all ranks, or put what"
                    " differs into key="
                )
                break
    return shared, unshared


def _quoted(texts: Sequence[str]) -> str:
    """Candidates for a message: the first, and how many."""
    return f'{len(texts)}, the first "{texts[0]}"' if texts else "none"
