"""New sites, from source to the device, on all ranks: compiled once per host, then loaded by all who have them.

Knows the order of things and the meetings between; a candidate that any rank cannot run is out before anything is launched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dist_tune.agreement import Agreement, Failures
from dist_tune.compiler import Compiler
from dist_tune.efforts import deal_configs
from dist_tune.ranks import Ranks
from dist_tune.shares import Keyset, share
from dist_tune.sites import Site, Sites


class Loader:
    """Compiles and loads what is new in one tuning."""

    def __init__(self, ranks: Ranks, agreement: Agreement, sites: Sites, compiler: Compiler) -> None:
        self._ranks = ranks
        self._agreement = agreement
        self._sites = sites
        self._compiler = compiler

    def load(self, keysets: Mapping[str, Sequence[Keyset]]) -> Failures:
        """Compile, share and load all candidates of new sites; returns those that cannot run on some rank. Collective."""
        new = [site for site in self._sites.met.values() if site.is_new]
        # Each kernel once per host. The others find it in Triton's disk cache once this meeting is over.
        self._compile({site.label: self._share(site, keysets.get(site.label, [])) for site in new})
        failed = self._agreement.vote("compiled", self._sites.take_failures())
        self._compile({site.label: set(range(len(site.configs))) - failed.get(site.label, {}).keys() for site in new})
        for site in new:
            self._load_site(site, failed.get(site.label, {}))
        self._compiler.close()
        for label, failures in self._agreement.vote("loaded", self._sites.take_failures()).items():
            failed[label] = {**failures, **failed.get(label, {})}
        return failed

    def _share(self, site: Site, keysets: Sequence[Keyset]) -> set[int]:
        deals = {n_ranks: deal_configs(site.configs, n_ranks) for n_ranks in {each.n_ranks for each in keysets}}
        return share(self._ranks.rank, keysets, deals)

    def _compile(self, shares: Mapping[str, set[int]]) -> None:
        for label, indices in shares.items():
            self._compiler.queue(label, indices)
        for label, indices in shares.items():
            for n_pending in self._compiler.wait(label, indices):
                self._ranks.beat(f"compiling {label}, {n_pending} candidates to go")
            for index, failure in self._compiler.failures(label).items():
                self._sites.reject(self._sites.met[label], index, failure)

    def _load_site(self, site: Site, failed: Mapping[int, str]) -> None:
        for index in range(len(site.configs)):
            self._ranks.beat(f"loading candidate {index} of {site.label}")
            if index in failed:
                self._sites.note_need(site, index)
            elif index not in site.failures:
                self._sites.load(site, index)
        site.is_new = False
