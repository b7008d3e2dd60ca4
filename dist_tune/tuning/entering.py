"""From a manifest to the race: new sites are taken from the cache or compiled, and functions warmed
up; then what guided searches ask for.

A warm-up is an untimed run of a function's config, whose kernels cannot be compiled ahead of the
first run. Results are checked there, and candidates that fail or answer wrongly on any rank are
dropped. Collective throughout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dist_tune.configs import by_kind
from dist_tune.errors import CandidateFailure, FailureKind, reasons
from dist_tune.launches import LaunchRecorder, around_launches
from dist_tune.log import amount, kernel_and_key, kernels_told
from dist_tune.replays import WARM_UP
from dist_tune.search import PriorTimes, Replay, Report, guide_of
from dist_tune.settings import NEAREST
from dist_tune.sites import Site, SiteManifest, Variant
from dist_tune.tuning.compiling import Waves, compile_ahead, precompile, tell_of_work
from dist_tune.tuning.context import Closure, Entry, TuningContext
from dist_tune.tuning.discover import discover, take_cached
from dist_tune.tuning.notices import count_use, tell_of_sites, tell_of_untuned


def enter_sites(context: TuningContext, closure: Closure, manifest: SiteManifest) -> None:
    """Enter the new sites of a manifest, and then those that warm-ups of its functions meet inside
    them.

    Raises:
        NoValidConfigError: on all ranks, if no candidate of a site runs on all of them.
    """
    context.story.phase("compile")
    context.race.expect(manifest.run_s)
    context.records.extend(take_cached(context, manifest))
    if manifest.why_not or manifest.mode:
        leave_untuned(context, manifest)
    elif manifest.to_tune:
        _enter(context, manifest)
        if manifest.warm_ups:
            warm_up(context, closure, manifest.warm_ups)
            # Kernels inside functions are compiled before anything is timed.
            enter_met(context, closure)
        tell_of_work(context)
        context.expenses.end_phase("compile")


def enter_met(context: TuningContext, closure: Closure) -> None:
    """Enter the sites that some rank has met since the tuning began."""
    manifest = discover(context, closure, is_watched=True, is_under_way=True)
    assert manifest is not None  # None only where nothing is under way
    enter_sites(context, closure, manifest)


def _enter(context: TuningContext, manifest: SiteManifest) -> None:
    labels, sites, race = manifest.to_tune, context.sites, context.race
    context.replays.undo()
    sites.go_on(labels, manifest.barred, manifest.deaths)
    for label in labels:
        entry = context.entries[label] = context.entries.get(label) or _entry(
            context, manifest, label
        )
        entry.writers.update(manifest.writers[label])
        sites.racing[label] = entry.texts
        if label in sites.met:
            sites.met[label].untried = entry.untried
    sites.forget(labels)  # a rank that comes to one of them later shall not find a record of it
    n_candidates = sum(len(context.entries[label].texts) for label in labels)
    kernels = [kernel_and_key(label)[0] for label in labels]
    scope = filter(None, [kernels_told(kernels, context.name), amount(n_candidates, "config")])
    n_ranks = len(context.ranks.members)
    on_ranks = f" on {n_ranks} ranks" if n_ranks > 1 else ""
    context.story.info(f"tuning {context.name}{on_ranks}: {', '.join(scope)}", shown=True)
    tell_of_sites(context, labels)
    loaded = compile_ahead(context, {label: context.entries[label].tried for label in labels})
    for label in labels:
        failures = reasons(loaded.failures.get(label, {})) | manifest.barred.get(label, {})
        if label in race:  # met later on this rank than on others
            race[label].drop(failures)
        else:
            entry, prior = context.entries[label], manifest.prior.get(label)
            race.add(label, len(entry.texts), failures, prior, loaded.equal.get(label), entry.guide)
    context.check_alive()


def _entry(context: TuningContext, manifest: SiteManifest, label: str) -> Entry:
    """A new site, with the candidates that are tried first."""
    texts = _texts(context, manifest, label)
    prior = manifest.prior.get(label, PriorTimes())
    n_warm_ups = manifest.warm_ups.get(label, 0)
    plan, n_threads = context.options.plan, 0 if n_warm_ups else manifest.n_threads
    n_tried = plan.n_tried if n_warm_ups else None
    guide = guide_of(
        plan.search,
        texts,
        prior,
        n_threads,
        n_tried=n_tried,
        in_waves=plan.in_waves and n_warm_ups > 0,
    )
    return Entry(texts, guide, n_warm_ups)


def _texts(context: TuningContext, manifest: SiteManifest, label: str) -> list[str]:
    return context.sites.met[label].texts if label in context.sites.met else manifest.lists[label]


def leave_untuned(context: TuningContext, manifest: SiteManifest) -> None:
    """Give each new site the config that is known, the nearest one, or the first, if it loads on
    all ranks; nothing is kept on disk.

    If it does not, each rank goes on with what has run there.
    """
    if not manifest.mode:
        tell_of_untuned(context, manifest.why_not)
    chosen: dict[str, int] = {}
    needed: list[tuple[Site, Variant]] = []
    for label in manifest.to_tune:
        prior, site = manifest.prior.get(label, PriorTimes()), context.sites.met.get(label)
        fastest = min(prior.times, key=lambda i: (prior.times[i].kernel_ms, i), default=None)
        is_first_config = manifest.mode == "first" or label in manifest.shared
        chosen[label] = (
            0
            if is_first_config
            else next(i for i in (prior.winner, fastest, prior.near, 0) if i is not None)
        )
        if manifest.mode:
            count_use(
                manifest.mode,
                context.settings,
                "first" if is_first_config or prior == PriorTimes() else "nearest",
            )
        if site is not None and site.is_new:
            # None with a record that not all ranks can use.
            needed += [(site, variant) for variant in site.variants]
    # All but these: the job's next call launches them, for all arguments that it has met
    context.compiler.postpone()
    for site, variant in needed:
        context.compiler.queue(variant.label, [chosen[site.label]])
    for site, variant in needed:
        context.sites.load(site, chosen[site.label], variant)
    failed = context.reduce_reports(
        "not tuned", Report(failures=context.sites.take_failures())
    ).failures
    by_mode = ""
    if manifest.mode == NEAREST:
        by_mode = " (autotune=False)"
    elif manifest.mode:
        by_mode = f" (DIST_TUNE_MODE={manifest.mode})"
    for label, index in chosen.items():
        site = context.sites.met.get(label)
        used = site.stand_in if index in failed.get(label, {}) and site is not None else index
        if used is not None:
            config = _texts(context, manifest, label)[used]
            context.sites.apply(label, config)
            so_far = (
                "is tuned in later calls, and uses until then"
                if manifest.goes_online
                else f"is not tuned{by_mode}:"
            )
            context.story.info(f"site={label} {so_far} {config}")


# -- warm-ups --------------------------------------------------------------------------------------


def warm_up(
    context: TuningContext, closure: Closure, n_runs: Mapping[str, int], waves: Waves | None = None
) -> None:
    """Run each candidate of some sites (site -> runs of each) untimed, and drop those that fail on
    any rank.

    Launches inside, which the first run shows, are compiled ahead with the other candidates of its
    kind and with one of each other kind. Those run next, because a flag may choose other arguments
    or another kernel, and the rest is compiled ahead as they show. ``waves``: only these
    candidates.
    """
    met, race = context.sites.met, context.race
    mine = {label: set((waves or {}).get(label, context.entries[label].tried)) for label in n_runs}
    kinds: dict[str, list[list[int]]] = {}
    for label in n_runs:
        sound = mine[label] & set(race[label].alive()) - set(race[label].suspects)
        kinds[label] = by_kind({i: context.entries[label].texts[i] for i in sorted(sound)})
    replays = race.warm_up(
        n_runs, mine, {label: [alike[0] for alike in found] for label, found in kinds.items()}
    )
    n_early = max(n_runs[label] * len(kinds[label]) for label in n_runs)
    recorder = LaunchRecorder(context.replays.trials.functions)
    with around_launches(recorder.record):
        context.replays.run_batch(closure, replays[:1], WARM_UP)
        # Nothing is compiled ahead if that run has spent it.
        if context.options.plan.budget_s is not None:
            _tell(context, 1)
        if not race.is_enough(n_runs):
            if any(len(found) > 1 for found in kinds.values()) and n_early < len(replays):
                # One more, because an earlier winner may be the first.
                first, early = (replays[0], replays[1 : n_early + 1])
                soon = {
                    label: {each[label].candidate for each in early if label in each}
                    for label in kinds
                }
                for label, found in kinds.items():
                    soon[label] |= {
                        i for alike in found if first[label].candidate in alike for i in alike
                    }
                precompile(context, recorder, soon)
                _run(context, closure, early, n_runs)
                replays = [] if race.is_enough(n_runs) else replays[n_early:]
            if len(replays) > 1:
                precompile(
                    context,
                    recorder,
                    {label: each & set(race[label].alive()) for label, each in mine.items()},
                )
            _run(context, closure, replays[1:], n_runs)
    race.end_warm_up(n_runs)
    for label in n_runs:
        if label in met:  # the last one to run may be the slowest
            met[label].stand_in = race[label].best
    context.check_alive()


def _run(
    context: TuningContext, closure: Closure, replays: Sequence[Replay], sites: Collection[str]
) -> None:
    """Run untimed replays, in batches that a budget allows, and stop where it is spent."""
    is_told = False
    while not is_told or (replays and not context.race.is_enough(sites)):
        n_next = context.race.n_next(replays)
        if replays:  # else the first run alone is to be told of
            context.replays.run_batch(closure, list(replays[:n_next]), WARM_UP)
        _tell(context, n_next)
        replays, is_told = replays[n_next:], True


def _tell(context: TuningContext, n_replays: int) -> None:
    """Reduce what these replays took, and drop candidates that failed in them on some rank."""
    for site in context.sites.met.values():
        _drop_harmful(context, site)
    reduced = context.reduce_reports(
        "warmed up", context.replays.trials.samples.report_warm_ups(context.sites.take_failures())
    )
    context.race.tell_warm_up(n_replays, reduced)
    for label, failures in reduced.failures.items():
        # A config that computes something else is worth a look.
        for i, (kind, reason) in failures.items():
            told = f'site={label} candidate={i} {reason} config="{context.entries[label].texts[i]}"'
            context.story.warning(told, shown=kind is FailureKind.WRONG_RESULT)


def _drop_harmful(context: TuningContext, site: Site) -> None:
    """Drop candidates that change an argument which others, as right as they, leave as it was."""
    right = {i: names for i, names in site.changes.items() if i not in site.failures}
    for i, names in right.items():
        if harmed := sorted(
            name for name in names if any(name not in others for others in right.values())
        ):
            reason = (
                f"it changes its argument {' and '.join(harmed)}, which other configs leave as it"
                " is; memory that only some configs write to belongs into an object, not among the"
                " arguments"
            )
            context.sites.fail(site, i, CandidateFailure(FailureKind.WRONG_RESULT, reason))


# -- guided searches -------------------------------------------------------------------------------


def try_waves(context: TuningContext, closure: Closure) -> None:
    """Bring the candidates that guided searches ask for into the race, until there are some to time
    or all searches have ended.

    The race asks from reduced times alone, so all ranks compile the same candidates.

    Raises:
        NoValidConfigError: on all ranks, if no candidate of a site runs on all of them.
    """
    race, entries = context.race, context.entries
    while waves := race.waves():
        for label, wave in waves.items():
            n_left = len(entries[label].untried)
            context.story.debug(
                f"site={label} tries {len(wave)} more of {len(entries[label].texts)} candidates,"
                f" {n_left} are untried"
            )
        context.story.phase("compile")
        compile_ahead(context, waves)
        context.expenses.end_phase("compile")
        if n_runs := {
            label: entries[label].n_warm_ups for label in waves if entries[label].n_warm_ups
        }:
            context.replays.undo()
            warm_up(context, closure, n_runs, waves)
            context.replays.undo()
        race.join(waves)
    context.check_alive()
