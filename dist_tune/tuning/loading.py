"""New sites, from source to the device, on all ranks: compiled once per host, then loaded by all who have them.

Knows the order of things and the meetings between; a candidate that any rank cannot run is out before anything is launched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dist_tune.compiler import CompileKeys, Compiler, Placement, Resources, own_share, partition_configs
from dist_tune.distributed import Ranks
from dist_tune.errors import CandidateFailure, Failures
from dist_tune.runtime import ForeseenFailure, LaunchRecorder, Precompile, precompiles
from dist_tune.tuning.agreement import Agreement
from dist_tune.tuning.manifest import RankManifest
from dist_tune.tuning.site import Site, take_failures
from dist_tune.tuning.sites import Sites


class Loader:
    """Compiles and loads what is new in one tuning."""

    def __init__(self, ranks: Ranks, agreement: Agreement, sites: Sites, compiler: Compiler, placement: Placement) -> None:
        self._ranks = ranks
        self._agreement = agreement
        self._sites = sites
        self._compiler = compiler
        self._placement = placement

    def load(self, compile_keys: Mapping[str, Sequence[CompileKeys]]) -> Failures:
        """Compile, share and load all candidates of new sites; returns those that cannot run on some rank. Collective."""
        failed = self._load([site for site in self._sites.met.values() if site.is_new and site.is_compiled], compile_keys)
        for site in self._sites.met.values():
            site.is_new = False
        return failed

    def foresee(self, recorder: LaunchRecorder) -> None:
        """Compile and load what functions will launch with their other configs, as told from launches that were recorded. Collective.

        What some rank cannot launch will fail on all that come to it.
        """
        found = {each.label: each for site in self._sites.met.values() for each in precompiles(site.label, site.configs, recorder.seen)}
        known: set[str] = set()
        for label, each in list(found.items()):
            self._compiler.begin(label, each.launch, each.configs, [])
            if self._compiler.keys(label) in known:  # the same kernel once more, as in the next layer
                del found[label]
            else:
                known.add(self._compiler.keys(label))
        called = self._agreement.roll_call(RankManifest(self._placement, keys={label: self._compiler.keys(label) for label in found}))
        kernels = {label: self._site_of(each) for label, each in found.items()}
        failed = self._load(list(kernels.values()), called.compile_keys)
        for label, each in found.items():
            self._note_resources(each, kernels[label])
        for label, each in found.items():
            for index, failure in failed.get(label, {}).items():
                foreseen = ForeseenFailure(each.launch, each.configs[index], failure.reason)
                recorder.foreseen.setdefault((each.function, index), []).append(foreseen)

    def _load(self, new: Sequence[Site], compile_keys: Mapping[str, Sequence[CompileKeys]]) -> Failures:
        if not compile_keys:  # on no rank
            return {}
        # Each kernel once per host. The others find it in Triton's disk cache once this meeting is over.
        self._compile(new, {site.label: self._own_share(site, compile_keys.get(site.label, [])) for site in new})
        failed = self._agreement.vote("compiled", take_failures(new))
        self._compile(new, {site.label: set(range(len(site.configs))) - failed.get(site.label, {}).keys() for site in new})
        for site in new:
            self._load_site(site, failed.get(site.label, {}))
        self._compiler.close()
        for label, failures in self._agreement.vote("loaded", take_failures(new)).items():
            failed[label] = {**failures, **failed.get(label, {})}
        return failed

    def _own_share(self, site: Site, compile_keys: Sequence[CompileKeys]) -> set[int]:
        partitions = {n_ranks: partition_configs(site.configs, n_ranks) for n_ranks in {each.n_ranks for each in compile_keys}}
        return own_share(self._ranks.rank, compile_keys, partitions)

    def _compile(self, sites: Sequence[Site], shares: Mapping[str, set[int]]) -> None:
        for label, indices in shares.items():
            self._compiler.queue(label, indices)
        for site in sites:
            for n_pending in self._compiler.wait(site.label, shares[site.label]):
                self._ranks.beat(f"compiling {site.label}, {n_pending} candidates to go")
            for index, failure in self._compiler.failures(site.label).items():
                self._sites.reject(site, index, failure)

    def _load_site(self, site: Site, failed: Mapping[int, CandidateFailure]) -> None:
        for index in range(len(site.configs)):
            self._ranks.beat(f"loading candidate {index} of {site.label}")
            if index in failed:
                # Another rank found that it needs too much; so does this one, without having tried.
                if (needed := self._compiler.known_need(site.label, index)) is not None:
                    site.resources.setdefault(index, Resources(needed, None, None))
            elif index not in site.failures:
                self._sites.load(site, index)

    def _site_of(self, forecast: Precompile) -> Site:
        """The kernel of a function, with the function's candidates in the same order."""
        function = self._sites.met[forecast.function]
        return Site(forecast.label, forecast.kernel, function.key, forecast.configs, function.texts)

    def _note_resources(self, forecast: Precompile, kernel: Site) -> None:
        mine = self._sites.met[forecast.function].resources
        for index, resources in kernel.resources.items():
            if index not in mine or resources.shared_bytes > mine[index].shared_bytes:  # of several kernels the neediest
                mine[index] = resources
