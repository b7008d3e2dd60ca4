"""The one way out: a closure that must not be replayed is not tuned. Its sites get a config that runs on all ranks. Collective."""

from __future__ import annotations

from dist_tune.errors import Failures
from dist_tune.output import closure_name
from dist_tune.search import PriorTimes
from dist_tune.sites import Outcome, SiteManifest
from dist_tune.tuning.context import TuningContext


def leave_untuned(context: TuningContext, manifest: SiteManifest) -> None:
    """Give each new site the config that is known, the nearest one, or the first, if it loads on all ranks; nothing is kept on disk."""
    text = f"{closure_name(context.name)} {manifest.why_not}: not tuned; split it, or give reset="
    if not context.notices.say(context.log, "not tuned", text):
        context.log.info(text)
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
        context.log.info(f'site={label} is not tuned: config="{config}"')
