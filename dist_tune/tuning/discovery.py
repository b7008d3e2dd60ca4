"""Which sites there are on any rank, and which of them need no tuning.

Knows what ranks tell each other about sites and records, and nothing of how candidates are measured. A config that some rank
has, in memory or out of the cache, is used on all ranks or on none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dist_tune.cache import CacheLookup, LookupResult, TuningRecord
from dist_tune.compiler import Compiler, Placement
from dist_tune.configs import digest
from dist_tune.distributed import Ranks
from dist_tune.errors import AbsentRanksError, CacheMissError, RankMismatchError, StoreGoneError
from dist_tune.runtime import Listener
from dist_tune.tuning.agreement import Agreement
from dist_tune.tuning.manifest import RankManifest, SiteManifest
from dist_tune.tuning.replays import Replayer
from dist_tune.tuning.site import Site
from dist_tune.tuning.sites import Sites

if TYPE_CHECKING:
    import loguru

_MAX_DISCOVERIES = 4


class Discovery:
    """The roll calls of one tuning."""

    def __init__(
        self, name: str, ranks: Ranks, agreement: Agreement, log: loguru.Logger, sites: Sites, lookup: CacheLookup, compiler: Compiler,
        placement: Placement, replayer: Replayer,
    ) -> None:  # fmt: skip
        self._name = name
        self._log = log
        self._replayer = replayer
        self._ranks = ranks
        self._agreement = agreement
        self._sites = sites
        self._lookup = lookup
        self._compiler = compiler
        self._placement = placement

    def discover(self, closure: Callable[[], Any], listener: Listener, *, is_watched: bool, is_under_way: bool) -> SiteManifest | None:
        """Learn which sites there are on any rank, and replay until no rank has a config that another one lacks. Collective.

        ``is_watched``: whether the run before was heard from its beginning. None if other ranks did not come and this one has nothing
        to tune, now or before (``is_under_way``).

        Raises:
            RankMismatchError: ranks have different candidates for one site, or different configs again and again.
            CacheMissError: there must be a record, and there is none.
        """
        for _ in range(_MAX_DISCOVERIES):
            is_optional = not self.new_sites() and not is_under_way
            try:
                called = self.roll_call(is_watched, is_optional=is_optional)
            except (AbsentRanksError, StoreGoneError) as error:
                if not is_optional:
                    raise
                # Ranks whose arguments were not new have made an ordinary call, and so does this one.
                self._log.warning(f"closure={self._name} goes on with the configs it has: {error}")
                return None
            if not called.disputed and not called.refused and called.is_watched:
                return called
            self._sites.evict(set(called.disputed))
            self._sites.refuse(set(called.refused))
            is_watched = True
            self._sites.end_replay()
            self._replayer.restart()
            self._replayer.run(closure, listener, {})
        raise RankMismatchError(
            f"{self._name}: ranks still have different configs for {[*called.disputed, *called.refused]} after {_MAX_DISCOVERIES} runs. "
            f"Does the closure change the cache of its kernels?"
        )

    def new_sites(self) -> list[str]:
        """Sites that this rank has yet to tell."""
        return [label for label, site in self._sites.met.items() if site.is_new]

    def roll_call(self, is_watched: bool, *, is_optional: bool = False) -> SiteManifest:
        """Tell the sites that are new here, and hear what is new anywhere, with the candidates of all that is new. Collective.

        Raises:
            RankMismatchError: ranks have different candidates for one site.
            CacheMissError: there must be a record, and there is none.
        """
        is_first = self._ranks.rank == self._ranks.members[0]
        spelled: set[str] = set(self.new_sites()) if is_first else set()
        while True:
            call = self._call({*self.new_sites(), *(spelled & self._sites.met.keys())}, spelled, is_watched, is_first=is_first)
            called = self._agreement.roll_call(call, is_optional=is_optional)
            if called.mismatch:
                raise RankMismatchError(called.mismatch)
            if called.missed:
                raise CacheMissError(f"{called.missed} DIST_TUNE_REQUIRE_CACHE is set: tune once without it, or merge a file that has it.")
            if called.refused and self._lookup.is_required:
                raise CacheMissError(
                    f"site {called.refused[0]}: ranks have records that not all of them can use. DIST_TUNE_REQUIRE_CACHE is set: tune once "
                    f"without it."
                )
            if not called.unlisted:
                return called
            spelled |= set(called.unlisted)

    def lookup(self, called: SiteManifest) -> dict[str, TuningRecord]:
        """The records of sites that all ranks take from the cache; those that lack one get it, and keep it. Collective."""
        mine = {label: self._sites.met[label].recalled for label in called.recalled if label in self._sites.met}
        records = {label: record for label, record in mine.items() if record is not None}
        if any(each.lacking for each in called.recalled.values()):
            asked = [label for label, each in called.recalled.items() if each.lacking and each.provider == self._ranks.rank]
            told = self._agreement.records({label: records[label].model_dump_json() for label in asked})
            for label, text in told.items():
                if self._ranks.rank in called.recalled[label].lacking:
                    records[label] = TuningRecord.model_validate_json(text)
                    self.keep(label, records[label], called.keepers)
        return {label: records[label] for label in called.recalled if label in records}  # in one order on all ranks

    def keep(self, label: str, record: TuningRecord, keepers: Mapping[str, Sequence[int]]) -> None:
        """Put a record into the cache, on one rank for each place."""
        if self._ranks.rank in keepers.get(label, ()):
            self._lookup.keep(record)

    def _call(self, labels: set[str], spelled: set[str], is_watched: bool, *, is_first: bool) -> RankManifest:
        sites = {label: self._sites.met[label] for label in labels}
        return RankManifest(
            self._placement,
            {label: digest(site.texts) for label, site in sites.items()},
            {label: site.texts for label, site in sites.items() if label in spelled},
            {
                label: self._compiler.keys(label)
                for label, site in sites.items()
                if site.is_new and site.is_compiled and site.recalled is None
            },
            dict(self._sites.hits),
            is_watched,
            self._lookup.folder,
            {label: self._ticket(site) for label, site in sites.items()},
            {label: self._lookup.known(label, site.texts) for label, site in sites.items() if is_first and site.recalled is None},
            {label: 1 if site.checker is None else site.checker.n_runs for label, site in sites.items() if not site.is_compiled},
        )

    def _ticket(self, site: Site) -> LookupResult:
        runs = site.recalled is None or site.recalled.winner not in site.failures
        return self._lookup.ticket(site.label, site.recalled, runs=runs)
