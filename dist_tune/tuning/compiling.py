"""Second phase: new sites from source to the device, on all ranks.

Each distinct kernel is compiled once per host: every rank begins with another part of the
candidates, passes over what another process compiles, and comes back to it. A candidate that any
rank cannot run is out before anything is launched. Collective throughout.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dist_tune.launches import LaunchRecorder, RecordedLaunch, predict
from dist_tune.search import Report
from dist_tune.sites import Site, Variant, mark_progress
from dist_tune.tuning.context import TuningContext

Waves = Mapping[str, Collection[int]]
"""Site -> candidates to compile."""


_LOAD_S = 0.05
"""Longest time of loading between two looks at the compilations."""


def equals(configs: Sequence[Any], kernels: Sequence[str]) -> dict[int, int]:
    """Candidate -> the first one with the same kernel and launch.

    ``kernels``: digests, empty if unknown.

    Their configs are equal but for ``num_stages``: a grid or another library may read what the
    kernel's code does not. A config's hook is handed all of the config and may do anything with it.
    """
    first: dict[tuple[str, str], int] = {}
    found = {}
    for i, (config, kernel) in enumerate(zip(configs, kernels, strict=True)):
        if kernel and config.pre_hook is None:
            rest = sorted(
                (name, value) for name, value in config.all_kwargs().items() if name != "num_stages"
            )
            found[i] = first.setdefault((kernel, repr(rest)), i)
    return {i: k for i, k in found.items() if i != k}


def _equals(context: TuningContext, site: Site) -> dict[int, int]:
    """Equal in all variants so far."""
    by_variant = zip(
        *(context.compiler.kernels(variant.label) for variant in site.variants), strict=True
    )
    kernels = [" ".join(each) if all(each) else "" for each in by_variant]
    return equals(
        site.configs,
        [
            "" if i in site.failures or i in site.untried else kernel
            for i, kernel in enumerate(kernels)
        ],
    )


def compile_ahead(context: TuningContext, wanted: Waves) -> Report:
    """Compile and load candidates of new sites, or those that guided searches ask for later; not of
    functions, which run instead.
    """
    known = context.sites.met
    sites = [
        known[label]
        for label in wanted
        if label in known and known[label].is_compiled and not known[label].is_given_up
    ]
    is_any_compiled = any(not context.entries[label].n_warm_ups for label in wanted)
    loaded = load_all(context, sites, wanted) if is_any_compiled else Report()
    for site in known.values():
        if site.is_new and (mine := loaded.equal.get(site.label)):
            site.equal.update(mine)
            told = f"{len(mine)} of {len(site.configs)} candidates are the same kernel as another"
            context.story.debug(
                f"site={site.label} {told} and do not race:"
                f" {', '.join(f'{i}={first}' for i, first in mine.items())}"
            )
        site.is_new = False
    return loaded


def lacking(context: TuningContext) -> dict[str, set[int]]:
    """Site -> candidates in the race that are not loaded here for all variants that launches have
    asked for.
    """
    found = {}
    for label, site in context.sites.met.items():
        if label in context.race and site.is_compiled and not site.is_new and not site.is_given_up:
            wanted = set(context.race[label].alive()) - site.failures.keys()
            if any(wanted - variant.loaded for variant in site.variants):
                found[label] = wanted
    return found


def compile_variants(context: TuningContext) -> None:
    """Compile and load what launches have asked for since the sites were entered, for the
    candidates in the race.

    A candidate that fails for some variant on some rank is dropped on all. Variants without an end
    are noted in ``variants.endless``.

    Raises:
        NoValidConfigError: on all ranks.
    """
    wanted = lacking(context)
    load_all(context, [context.sites.met[label] for label in wanted], wanted)
    context.check_alive()


def precompile(context: TuningContext, recorder: LaunchRecorder, waves: Waves) -> None:
    """Compile and load what functions will launch with these candidates, predicted from the runs
    that were recorded.

    A launch that some rank cannot make will fail on all ranks that come to it with the same
    alignments and sizes that are compiled in.
    """
    inner: list[tuple[Site, Site]] = []
    """Functions, each with a launch of theirs whose predictions are the candidates."""
    known: set[tuple[str, str]] = set()
    for function in [context.sites.met[label] for label in waves if label in context.sites.met]:
        ran = {
            i: launches
            for (label, i), launches in recorder.launches.items()
            if label == function.label
        }
        found: defaultdict[str, dict[int, RecordedLaunch]] = defaultdict(dict)
        for i, launches in predict(
            function.configs, function.texts, ran, waves[function.label]
        ).items():
            n_of = Counter[str]()
            for launch in launches:
                name = launch.kernel.fn.__qualname__.rpartition("<locals>.")[2]
                n_of[name] += 1
                found[f"{function.label} > {name} #{n_of[name]}"][i] = (
                    launch  # the same on a rank that launches further kernels
                )
        for label, predicted in found.items():
            context.compiler.begin(label, RecordedLaunch, predicted, [])
            keys = function.label, context.compiler.keys(label)
            if keys not in known:  # else the same kernel once more, as in the next layer
                known.add(keys)
                configs = [predicted.get(i) for i in range(len(function.configs))]
                inner.append(
                    (
                        function,
                        Site(
                            label,
                            label,
                            function.key,
                            configs,
                            function.texts,
                            variants=[Variant(label, {})],
                        ),
                    )
                )
    wanted = {
        kernel.label: [i for i, launch in enumerate(kernel.configs) if launch is not None]
        for _, kernel in inner
    }
    failed = load_all(context, [kernel for _, kernel in inner], wanted).failures
    for function, kernel in inner:
        for i, need in kernel.resources.items():
            most = function.resources.setdefault(i, need)
            if need.shared_bytes > most.shared_bytes:  # of several kernels the neediest
                function.resources[i] = need
        told = failed.get(kernel.label, {}).items()
        recorder.failures += [
            (launch, failure.reason)
            for i, failure in told
            if (launch := kernel.configs[i]) is not None
        ]


_Unit = tuple[Site, Variant, set[int]]
"""A variant of a site, and the candidates to compile and load for it."""


def load_all(context: TuningContext, sites: Sequence[Site], wanted: Waves) -> Report:
    """Compile and load the ``wanted`` candidates of some sites, for all of their variants."""
    variants = context.replays.trials.variants
    known = (
        [(site, each) for site in sites for each in site.variants] if not variants.endless else []
    )
    units = [(site, each, set(wanted[site.label]) - each.loaded) for site, each in known]
    _compile(context, units)
    for site, variant, indices in units:
        for index in sorted(indices - site.failures.keys()):
            _load_one(context, site, variant, index)
    context.compiler.close()
    # A function may do anything with its config, so equal kernels inside mean nothing.
    equal = {
        each.label: _equals(context, each) for each in sites if each.label in context.sites.met
    }
    n_variants = {each.label: len(each.variants) for each in sites if len(each.variants) > 1}
    report = Report(failures=context.sites.take_failures(sites), equal=equal, n_variants=n_variants)
    loaded = context.reduce_reports("loaded", report)
    variants.counts.update(loaded.n_variants)
    return loaded


def _compile(context: TuningContext, units: Sequence[_Unit]) -> None:
    compiler, n_all, n_seen = context.compiler, sum(len(indices) for _, _, indices in units), -1
    for _, variant, indices in units:
        compiler.queue(variant.label, indices)
    for site, variant, indices in units:
        for n_pending in compiler.wait(variant.label, indices):
            mark_progress()
            context.replays.watchdog.at(f"compiling {variant.label}")
            context.ranks.beat(
                f"compiling {variant.label}, {n_pending} candidates to go", may_last=True
            )
            if compiler.n_ended != n_seen:  # else there is nothing to tell of, or to load
                n_seen = compiler.n_ended
                context.story.terminal.step(
                    n_all - sum(len(compiler.pending(v.label) & each) for _, v, each in units),
                    n_all,
                )
                _load_ready(context, units)
            context.replays.breathe(compiler)
        for index, failure in compiler.failures(variant.label).items():
            context.sites.reject(site, index, failure)


def _load_ready(context: TuningContext, units: Sequence[_Unit]) -> None:
    """Load what is compiled of these, for a moment: this thread has nothing else to do meanwhile.

    All ranks have ended their first run, so no kernel of it waits for a launch that a peer has yet
    to make.
    """
    until = time.monotonic() + _LOAD_S
    for site, variant, indices in units:
        for index in sorted(context.compiler.ready(variant.label) & indices):
            if time.monotonic() > until:
                return
            if index not in site.failures:
                _load_one(context, site, variant, index)


def _load_one(context: TuningContext, site: Site, variant: Variant, index: int) -> None:
    mark_progress()
    context.replays.watchdog.at(f"loading candidate {index} of {variant.label}")
    context.ranks.beat(f"loading candidate {index} of {variant.label}", may_last=True)
    context.sites.load(site, index, variant)


def tell_of_work(context: TuningContext) -> None:
    """A line on the compilations since the last call of this; none if nothing was compiled."""
    work = context.compiler.take_work()
    fates = {name: work.pop(name, 0) for name in ("compiled", "equal", "on_disk", "failed")}
    if not any(fates.values()):
        return
    context.expenses.seconds.compile_cpu += sum(work.values())
    # Of ptxas, a child process, the wall time.
    units = {"cubin": " (wall)"}
    stages = " ".join(f"{name}={s:.3f}{units.get(name, '')}" for name, s in work.items())
    context.story.debug(
        f"kernels: {' '.join(f'{name}={n}' for name, n in fates.items())} cpu_seconds: {stages}"
    )
