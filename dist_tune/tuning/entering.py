"""From a manifest to the race: new sites are taken from the cache or compiled, and functions warmed up. Collective."""

from __future__ import annotations

from dist_tune.errors import Failures, reasons
from dist_tune.output import amount, closure_name
from dist_tune.search import PriorTimes, guide_of
from dist_tune.sites import Outcome, SiteManifest
from dist_tune.tuning.compilation import compile_new, tell_of_work
from dist_tune.tuning.context import Closure, Entry, TuningContext
from dist_tune.tuning.discover import discover, take_cached
from dist_tune.tuning.notices import tell_of_sites, tell_of_untuned
from dist_tune.tuning.warm_up import warm_up


def enter_sites(context: TuningContext, closure: Closure, manifest: SiteManifest) -> None:
    """Enter the new sites of a manifest, and then those that warm-ups of its functions meet inside them.

    Raises:
        NoValidConfigError: on all ranks, if no candidate of a site runs on all of them.
    """
    sites, race = context.sites, context.race
    context.story.phase("compile")
    race.expect(manifest.run_s)
    context.records.extend(take_cached(context, manifest))
    if manifest.why_not:
        leave_untuned(context, manifest)
        return
    if not manifest.to_tune:
        return
    while labels := manifest.to_tune:
        context.replays.undo()
        sites.go_on(labels, manifest.barred, manifest.deaths)
        for label in labels:
            entry = context.entries[label] = context.entries.get(label) or _entry(context, manifest, label)
            entry.writers.update(manifest.writers[label])
            if label in sites.met:
                sites.met[label].untried = entry.untried
        sites.distrust_records(set(labels))  # a rank that comes to one of them later shall not find a record of it
        n_candidates = sum(len(context.entries[label].texts) for label in labels)
        scope = f"{amount(len(labels), 'site')}, {amount(n_candidates, 'candidate')} on {amount(len(context.ranks.members), 'rank')}"
        context.story.info(f"tuning {context.name}: {scope}", shown=f"tuning {closure_name(context.name)}: {scope}")
        tell_of_sites(context, labels)
        loaded = compile_new(context, is_any_compiled=any(label not in manifest.warm_ups for label in labels))
        for label in labels:
            failures = reasons(loaded.failures.get(label, {})) | manifest.barred.get(label, {})
            if label in race:  # met later on this rank than on others
                race[label].drop(failures)
            else:
                entry, prior = context.entries[label], manifest.prior.get(label)
                race.add(label, len(entry.texts), failures, prior, loaded.equal.get(label), entry.guide)
        context.check_alive()
        if not manifest.warm_ups:
            break
        warm_up(context, closure, manifest.warm_ups)
        # Kernels inside functions were met there. They are compiled before anything is timed, and tuned where nothing else is.
        inner = discover(context, closure, is_watched=True, is_under_way=True)
        assert inner is not None  # None only where nothing is under way
        manifest = inner
        context.records.extend(take_cached(context, manifest))
        if manifest.why_not:
            leave_untuned(context, manifest)
            break
    repeats = f", and {race.spare_s:g} s of repeats where the clock cannot tell kernels apart" if race.spare_s else ""
    context.story.info(f"closure={context.name} searches in at most {race.bound} replays{repeats}")
    tell_of_work(context)
    context.expenses.end_phase("compile")


def _entry(context: TuningContext, manifest: SiteManifest, label: str) -> Entry:
    """A new site, with the candidates that are tried first."""
    texts = manifest.lists[label] if label in manifest.lists else context.sites.met[label].texts
    prior = manifest.prior.get(label, PriorTimes())
    n_warm_ups = manifest.warm_ups.get(label, 0)
    plan, n_threads = context.plan, 0 if n_warm_ups else manifest.n_threads
    n_tried, start = (plan.n_tried, plan.start) if n_warm_ups else (None, None)
    guide = guide_of(plan.search, texts, prior, n_threads, n_tried=n_tried, start=start)
    return Entry(texts, guide, n_warm_ups)


def leave_untuned(context: TuningContext, manifest: SiteManifest) -> None:
    """Give each new site the config that is known, the nearest one, or the first, if it loads on all ranks; nothing is kept on disk."""
    tell_of_untuned(context, manifest.why_not)
    met, failed = context.sites.met, Failures()
    chosen: dict[str, int] = {}
    todo = list(manifest.to_tune)
    while todo:
        for label in todo:
            texts = manifest.lists[label] if label in manifest.lists else met[label].texts
            prior, out = manifest.prior.get(label, PriorTimes()), failed.get(label, {})
            order = [i for i in (prior.winner, prior.near, *range(len(texts))) if i is not None and i not in out]
            if not order:
                del chosen[label]  # each rank goes on with what has run there
                continue
            chosen[label] = order[0]
            if label in met and met[label].is_compiled and met[label].is_new:
                context.sites.load(met[label], order[0])
        news = context.vote("not tuned", context.sites.take_failures())
        for label, failures in news.items():
            failed.setdefault(label, {}).update(failures)
        todo = [label for label in chosen if chosen[label] in failed.get(label, {})]
    for label in manifest.to_tune:
        site = met.get(label)
        index = chosen.get(label, site.stand_in if site is not None else None)
        if index is None:
            continue
        config = manifest.lists[label][index] if label in manifest.lists else met[label].texts[index]
        context.sites.apply(label, Outcome(config))
        context.story.info(f'site={label} is not tuned: config="{config}"')
