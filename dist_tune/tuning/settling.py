"""Variants of sites that replays have met, compiled on all ranks before replays go on. Collective throughout.

Each rank has its own variants; those with equal arguments have equal labels.
"""

from __future__ import annotations

from collections.abc import Sequence

from dist_tune.compiler import compile_cost
from dist_tune.errors import reasons
from dist_tune.replays import MAX_VARIANTS, WARM_UP
from dist_tune.search import Report, Trial
from dist_tune.sites import RankManifest, Site
from dist_tune.tuning.compilation import load_all
from dist_tune.tuning.context import Closure, TuningContext
from dist_tune.tuning.discover import MANIFESTS, note_variants

_MAX_SETTLED = 2 * MAX_VARIANTS
_FEW = 16
"""Candidates up to which each variant is compiled for all of them at once; of more, the rare ones for a stand-in until the finals."""


def settle(context: TuningContext, closure: Closure) -> None:
    """Compile the variants that were met, and replay untimed until there are no new ones."""
    for _ in range(_MAX_SETTLED):
        compile_variants(context)
        _replay(context, closure)
        report = Report(has_new_variants=context.replays.trials.variants.has_news)
        if not context.reduce_reports("settled", report).has_new_variants:
            return


def compile_variants(context: TuningContext, *, is_last: bool = False) -> None:
    """Compile and load variants for the candidates in the race, rare ones for a stand-in; ``is_last``: all of them for all candidates.

    A candidate that fails for some variant on some rank is dropped on all.

    Raises:
        EndlessVariantsError: on all ranks.
        NoValidConfigError: on all ranks.
    """
    race, variants = context.race, context.replays.trials.variants
    mine = {label: each for label, each in variants.labels().items() if each[0].label in race}
    in_full = [label for label, (_, each) in mine.items() if is_last or each.is_full or variants.is_frequent(each)]
    part = RankManifest(in_full=in_full, variants=variants.n_by_site(), endless=variants.endless)
    manifest = context.reduce("variants", part, MANIFESTS)
    note_variants(context, manifest)
    new, wanted = [], dict[str, set[int]]()
    for label, (site, variant) in mine.items():
        alive = race[site.label].alive()
        variant.is_known = True
        variant.is_full = label in manifest.in_full or len(alive) <= _FEW
        wanted[label] = set(alive if variant.is_full else _stand_in(site, alive))
        new.append(Site(label, site.kernel, site.key, site.configs, site.texts))
    failed = load_all(context, new, wanted).failures  # those that are equal in another variant do not race
    for label, (_, variant) in mine.items():
        variant.loaded |= wanted[label] - failed.get(label, {}).keys()
    for label, failures in failed.items():
        own_label = label.rpartition(" > ")[0]
        if own_label in race:
            race[own_label].drop(reasons(failures))
        if (own := context.sites.met.get(own_label)) is not None:
            own.failures.update({i: each for i, each in failures.items() if i not in own.failures})
            own.reported |= failures.keys()
    variants.begin_interval()
    context.check_alive()


def _stand_in(site: Site, alive: Sequence[int]) -> list[int]:
    """The candidate that compiles fastest; the same on all ranks."""
    return sorted(alive, key=lambda i: (compile_cost(site.configs[i]), i))[:1]


def _replay(context: TuningContext, closure: Closure) -> None:
    """One untimed replay, with what runs best so far."""
    race = context.race
    best = {label: race[label].best for label in context.entries if label in race}
    schedule = {label: Trial(i, is_timed=False) for label, i in best.items() if i is not None}
    for label, site in context.sites.met.items():
        schedule.setdefault(label, Trial(site.stand_in or 0, is_timed=False))
    context.replays.run_batch(closure, [schedule], WARM_UP)
