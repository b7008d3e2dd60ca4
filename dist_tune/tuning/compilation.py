"""Second phase: new sites from source to the device, on all ranks.

Each distinct kernel is compiled once per host, then loaded by all ranks that have it; a candidate that any rank cannot run is out
before anything is launched. Collective throughout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dist_tune.compiler import CompileKeys, Resources, own_share, partition_configs
from dist_tune.errors import CandidateFailure, Failures
from dist_tune.runtime import LaunchRecorder, Precompile, PredictedFailure, RecordedKernel, precompiles
from dist_tune.tuning.context import TuningContext
from dist_tune.tuning.discover import MANIFESTS
from dist_tune.tuning.equals import EqualCandidates, loaded_on_all
from dist_tune.tuning.exclusive import note_progress
from dist_tune.tuning.manifest import RankManifest
from dist_tune.tuning.site import Site, take_failures

Waves = Mapping[str, Collection[int]]
"""Site -> candidates to compile."""


def compile_new(context: TuningContext, compile_keys: Mapping[str, Sequence[CompileKeys]]) -> tuple[Failures, EqualCandidates]:
    """Compile, share and load all candidates of new sites; returns those that cannot run on some rank, and those with equal kernels."""
    new = [site for site in context.sites.met.values() if site.is_new and site.is_compiled and not site.is_given_up]
    failed, equal = load_all(context, new, compile_keys, {site.label: site.tried for site in new})
    for site in context.sites.met.values():
        site.is_new = False
    for site in new:
        if mine := equal.get(site.label):
            site.equal.update(mine)
            told = f"{len(mine)} of {len(site.configs)} candidates are the same kernel as another"
            context.log.info(f"site={site.label} {told} and do not race: {', '.join(f'{i}={first}' for i, first in mine.items())}")
    return failed, equal


def compile_waves(context: TuningContext, waves: Waves) -> Failures:
    """The same for candidates that guided searches ask for later."""
    known = context.sites.met
    sites = [known[label] for label in waves if label in known and known[label].is_compiled and not known[label].is_given_up]
    compile_keys = {label: keys for label in waves if (keys := context.entries[label].compile_keys)}
    return load_all(context, sites, compile_keys, waves)[0]


def precompile(context: TuningContext, recorder: LaunchRecorder, waves: Waves | None = None) -> None:
    """Compile and load the launches of functions with their other configs, derived from recorded launches.

    A launch that some rank cannot make will fail on all ranks that come to it. ``waves``: only of these candidates.
    """
    met, compiler = context.sites.met, context.compiler
    found = {each.label: each for site in met.values() for each in precompiles(site.label, site.configs, recorder.launches)}
    known: set[str] = set()
    for label, each in list(found.items()):
        compiler.begin(label, RecordedKernel(), each.configs, [])
        if compiler.keys(label) in known:  # the same kernel once more, as in the next layer
            del found[label]
        else:
            known.add(compiler.keys(label))
    mine = RankManifest(context.placement, keys={label: compiler.keys(label) for label in found})
    manifest = context.reduce("manifest", mine, MANIFESTS)
    kernels = {label: _site_of(each, met[each.function]) for label, each in found.items()}
    wanted = {label: (waves or {}).get(each.function, met[each.function].tried) for label, each in found.items()}
    failed, _ = load_all(context, list(kernels.values()), manifest.compile_keys, wanted)  # a function may do anything with its config
    for label, each in found.items():
        _note_resources(met[each.function], kernels[label])
        for index, failure in failed.get(label, {}).items():
            launch = each.configs[index]
            predicted = PredictedFailure(launch.kernel, launch.given, failure.reason)
            recorder.failures.setdefault((each.function, index), []).append(predicted)


def load_all(
    context: TuningContext, new: Sequence[Site], compile_keys: Mapping[str, Sequence[CompileKeys]], wanted: Waves
) -> tuple[Failures, EqualCandidates]:
    """Compile, share and load the ``wanted`` candidates of some sites.

    Returns those that cannot run on some rank, and those with equal kernels.
    """
    if not compile_keys:  # on no rank
        return {}, {}
    # Each kernel once per host. The others find it in Triton's disk cache once this meeting is over.
    _compile(context, new, {each.label: _share_of(context, each, compile_keys.get(each.label, []), wanted[each.label]) for each in new})
    failed = context.vote("compiled", take_failures(new))
    _compile(context, new, {site.label: set(wanted[site.label]) - failed.get(site.label, {}).keys() for site in new})
    for site in new:
        _load(context, site, sorted(wanted[site.label]), failed.get(site.label, {}))
    context.compiler.close()
    late, equal = loaded_on_all(context, new)
    for label, failures in late.items():
        failed[label] = {**failures, **failed.get(label, {})}
    return failed, equal


def _share_of(context: TuningContext, site: Site, compile_keys: Sequence[CompileKeys], wanted: Collection[int]) -> set[int]:
    partitions = {n_ranks: partition_configs(site.configs, n_ranks, wanted) for n_ranks in {each.n_ranks for each in compile_keys}}
    return own_share(context.ranks.rank, compile_keys, partitions) & set(wanted)


def _compile(context: TuningContext, sites: Sequence[Site], shares: Mapping[str, set[int]]) -> None:
    compiler = context.compiler
    for label, indices in shares.items():
        compiler.queue(label, indices)
    for site in sites:
        for n_pending in compiler.wait(site.label, shares[site.label]):
            note_progress()
            context.ranks.beat(f"compiling {site.label}, {n_pending} candidates to go")
        for index, failure in compiler.failures(site.label).items():
            context.sites.reject(site, index, failure)


def _load(context: TuningContext, site: Site, wanted: Sequence[int], failed: Mapping[int, CandidateFailure]) -> None:
    for index in wanted:
        note_progress()
        context.ranks.beat(f"loading candidate {index} of {site.label}")
        if index in failed:
            # Another rank found that it needs too much; so does this one, without having tried.
            if (needed := context.compiler.known_need(site.label, index)) is not None:
                site.resources.setdefault(index, Resources(needed, None, None))
        elif index not in site.failures:
            context.sites.load(site, index)


def _site_of(launch: Precompile, function: Site) -> Site:
    """A kernel inside a function, with the function's candidates in the same order."""
    return Site(launch.label, launch.kernel, function.key, launch.configs, function.texts)


def _note_resources(function: Site, kernel: Site) -> None:
    mine = function.resources
    for index, resources in kernel.resources.items():
        if index not in mine or resources.shared_bytes > mine[index].shared_bytes:  # of several kernels the neediest
            mine[index] = resources
