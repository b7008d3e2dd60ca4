"""Earlier attempts at a tuning: what a rank's journal says of them, and what all ranks go on from. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from dist_tune.cache import JournalLine
from dist_tune.errors import CandidateFailure, FailureKind, Failures
from dist_tune.search import PriorTimes

Offer = dict[str, dict[int, list[int]]]
"""Site -> candidate -> samples of the race, and of the finals, in a rank's journal."""
MAX_STRIKES = 2
"""Deaths of the process with a candidate under way that put it into quarantine; one counts for all where it was isolated."""
_KEPT_KINDS = (FailureKind.LAUNCH, FailureKind.WRONG_RESULT, FailureKind.CLOCK, FailureKind.STUCK)
"""The compiler finds the others again without running anything."""


@dataclass
class Past:
    """What earlier attempts have left."""

    keys: dict[str, str] = field(default_factory=dict)
    """Site -> digest of its cache key."""
    samples: dict[tuple[str, int, bool], list[JournalLine]] = field(default_factory=lambda: defaultdict(list))
    """(Site, candidate, whether in the finals) -> replays."""
    failures: Failures = field(default_factory=dict)
    strikes: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(Site, candidate) -> deaths of the process while it was under way."""
    suspects: set[tuple[str, int]] = field(default_factory=set)
    """Those that were not timed since their last death."""

    def enter(self, label: str, key: str) -> None:
        """Note a site. Deaths under another name of it count: a kernel's name grows when a second one of that name is met."""
        if self.keys.get(label, key) != key:
            self.forget(label)
        self.keys[label] = key
        self.share(pair for pair in {*self.strikes, *self.suspects} if pair[0] in self.names(label))

    def share(self, pairs: Iterable[tuple[str, int]]) -> None:
        """Tell all names of the sites of these candidates of their deaths."""
        for label, i in pairs:
            for name in self.names(label):
                self.strikes[name, i] = max(self.strikes[name, i], self.strikes[label, i])
                if (label, i) in self.suspects:
                    self.suspects.add((name, i))

    def names(self, label: str) -> set[str]:
        """All names under which attempts have met this site."""
        return {label, *(name for name, key in self.keys.items() if key == self.keys.get(label))}

    def forget(self, label: str) -> None:
        """Forget a site whose key is another one now, so that its candidates may be others; and finals of sites beside it."""
        self.failures.pop(label, None)
        self.suspects = {pair for pair in self.suspects if pair[0] != label}
        for pair in [pair for pair in self.strikes if pair[0] == label]:
            del self.strikes[pair]
        for of, lines in list(self.samples.items()):
            lines[:] = [each for each in lines if of[0] != label and not (of[2] and label in each.on)]
            if not lines:
                del self.samples[of]


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


def past_of(lines: Sequence[JournalLine]) -> Past:
    """Read a journal. A candidate that was begun in an attempt and did not end has died with the process, unless that was stopped."""
    past = Past()
    under_way: dict[int, dict[str, int]] = {}
    alone: set[int] = set()
    attempt: list[JournalLine] = []
    for line in [*lines, JournalLine(t="open")]:
        if line.t == "begun":
            under_way[line.n[0]] = line.on
            alone |= set(line.n) if line.is_alone else set()
        elif line.t in ("ran", "measured"):
            under_way.pop(line.n[0], None)
            attempt += [line] if line.t == "measured" else []
        elif line.t == "struck":
            attempt = [each for each in attempt if each.n[0] not in line.n]
        elif line.t == "site":
            past.enter(line.label, line.key)
        elif line.t == "dropped" and line.kind in _KEPT_KINDS:
            past.failures.setdefault(line.label, {})[line.n[0]] = CandidateFailure(FailureKind(line.kind), line.reason)
        elif line.t == "suspected":
            for pair in ((line.label, i) for i in line.n):
                past.strikes[pair] = max(past.strikes[pair], 1)
                past.suspects.add(pair)
                past.share([pair])
        elif line.t == "quarantined":
            for name in past.names(line.label):
                del past.strikes[name, line.n[0]]
        elif line.t in ("open", "stop"):
            for each in attempt:
                for label in each.timed:
                    past.samples[label, each.on[label], each.is_final].append(each)
                    past.suspects -= {(name, each.on[label]) for name in past.names(label)}
            if line.t == "open":
                _strike(past, {pair for each in under_way.values() for pair in each.items()})
                past.strikes |= Counter({pair: MAX_STRIKES for n in under_way.keys() & alone for pair in under_way[n].items()})
                past.share([pair for each in under_way.values() for pair in each.items()])
            under_way, alone, attempt = {}, set(), []
    return past


def _strike(past: Past, under_way: set[tuple[str, int]]) -> None:
    """Count a death. One of several is the cause and the others are not: at most one that was there before gets a second strike.

    What suspects have measured is forgotten, because they are to run alone before anything else is done with them.
    """
    strikes = past.strikes
    repeated = [pair for pair in under_way if strikes[pair]]
    strikes.update(under_way if len(under_way) == 1 else [pair for pair in under_way if not strikes[pair] or len(repeated) == 1])
    past.suspects |= under_way
    for label, i in under_way:
        for name, is_final in product(past.names(label), (False, True)):
            past.samples.pop((name, i, is_final), None)
