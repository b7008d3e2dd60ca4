"""First phase: the sites on any rank, and those of them that need no tuning.

A config that some rank has, in memory or in its cache, is used on all ranks or on none. Collective
throughout.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import replace

from dist_tune.errors import (
    AloneError,
    CacheMissError,
    PeerFailedError,
    RankMismatchError,
    StoreGoneError,
)
from dist_tune.log import amount, kernels_told
from dist_tune.ranks import MISSED_ADVICE, Reduction
from dist_tune.records import TuningRecord, digest
from dist_tune.search import PriorTimes, Trial
from dist_tune.settings import shared_settings
from dist_tune.sites import RankManifest, SiteManifest, reduce_manifests
from dist_tune.tuning.context import Closure, TuningContext
from dist_tune.tuning.notices import count_use, notice, of_process

_MAX_DISCOVERIES = 4
MAX_WAIT = 10
_WRONG = "the config from the cache answers wrongly"
MANIFESTS = Reduction(reduce_manifests)


def discover(
    context: TuningContext, closure: Closure, *, is_watched: bool, is_under_way: bool
) -> SiteManifest | None:
    """Exchange manifests, and replay until no rank has a config that another one lacks, and it is
    known that replays are allowed.

    ``is_watched``: whether the run before was heard from its beginning. ``is_under_way``: all ranks
    are in this tuning already. None if other ranks have passed this call: this rank is alone in it,
    or has nothing to report and goes on. With ``why_not`` in the manifest no other run of the
    closure may follow.

    Raises:
        AbsentRanksError: this rank has something to tune, and another one has gone or did not come.
        RankMismatchError: ranks have different configs again and again.
        CacheMissError: there must be a record, and there is none.
    """
    replays, n_disputes, may_wait = context.replays, 0, not is_under_way
    while n_disputes < _MAX_DISCOVERIES:
        try:
            manifest = _exchange(context, is_watched, gathers=not is_under_way)
        except (AloneError, StoreGoneError) as error:
            if isinstance(error, StoreGoneError) and is_under_way:
                raise
            # Ranks whose arguments were not new have made an ordinary call, and so does this one.
            waiting = (
                f"; until all ranks meet in one call untuned: {context.sites.new}"
                if context.sites.new
                else ""
            )
            context.story.warning(
                f"{context.name} goes on with the configs it has: {error}{waiting}"
            )
            return None
        if manifest.left_s:  # the group has broken, and no call could go on with it
            ran = context.sites.told(
                {
                    label: Trial(site.first_guess, is_timed=False)
                    for label, site in context.sites.met.items()
                    if site.is_new
                }
            )
            took = ", ".join(f"{s:.1f} s on rank {rank}" for rank, s in manifest.left_s.items())
            raise PeerFailedError(
                f"A collective in the second run of {context.name}{ran} did not find all its ranks;"
                f" that run took {took}. {MISSED_ADVICE} A process group that timed out has to be"
                " made anew"
            )
        is_under_way = True
        is_decided = (
            not manifest.disputed
            and not manifest.refused
            and not manifest.wrong
            and manifest.is_watched
        )
        is_open = bool(manifest.to_tune) and replays.first_run.is_undecided
        is_tuning = (
            manifest.to_tune and is_decided and not (is_open or manifest.mode or manifest.why_not)
        )
        if is_tuning and may_wait and manifest.is_elsewhere:
            may_wait = False
            _await_records(context, manifest.to_tune)
            continue
        if manifest.mode or manifest.why_not or (is_decided and not is_open):
            # Nothing is tuned, and no other run may follow.
            for label in manifest.wrong.keys() & context.sites.met.keys():
                context.story.warning(
                    f"site={label} {_WRONG}; later calls use the first config:"
                    f" {manifest.wrong[label]}",
                    shown=True,
                )
                context.sites.apply(label, context.sites.met[label].texts[0])
            return manifest
        if not is_decided:
            n_disputes += 1
            replays.trials.wrong.clear()
            _refute(context, manifest.wrong)
            context.sites.forget(manifest.disputed, uses_records=True)
            context.sites.forget(manifest.refused)
            context.sites.hits.clear()
            is_watched = True
        # Of a function: with the config that is known, or the nearest one.
        if replays.n_replays == 0:
            for label in set(manifest.to_tune) & context.sites.met.keys():
                known = manifest.prior.get(label, PriorTimes())
                context.sites.met[label].stand_in = (
                    known.winner if known.winner is not None else known.near
                )
        replays.again(closure)
    raise RankMismatchError(
        f"{context.name}: ranks still have different configs for"
        f" {[*manifest.disputed, *manifest.refused]} after {_MAX_DISCOVERIES} runs. Does the step"
        " change the cache of its kernels?"
    )


@Reduction
def _any(parts: Mapping[int, bool]) -> bool:
    return any(parts.values())


def _await_records(context: TuningContext, labels: Collection[str]) -> None:
    """Wait until the job that tunes the same is through, or has died, and look for its records.

    Not for ever: a job that was stopped holds its journal. After ``MAX_WAIT`` deadlines this one
    has lost as much as a tuning takes.
    """
    journal, limit_s = context.sites.journal, MAX_WAIT * context.settings.deadline_s
    told = (
        f"a job that shares {context.lookup.cache.folder} is tuning the same; this one waits for"
        f" its records, {limit_s:g} s at most"
    )
    context.story.info(f"{context.name}: {told}", shown=True)
    ends_at, step_s = time.monotonic() + limit_s, min(1.0, context.settings.deadline_s / 4)
    # In short steps, so that a rank which dies meanwhile is seen.
    while context.reduce(
        "other job",
        context.ranks.is_first and journal.is_taken(step_s) and time.monotonic() < ends_at,
        _any,
    ):
        pass
    context.sites.look_again(labels)


def take_cached(context: TuningContext, manifest: SiteManifest) -> list[TuningRecord]:
    """Use the records that all ranks take from the cache; ranks that lack one get it, and write it
    to their own.
    """
    records = _shared_records(context, manifest)
    for label, record in records.items():
        context.sites.apply(label, record.best.config, record)
        if (site := context.sites.met.get(label)) is not None:
            site.is_unchecked = site.is_whole and site.checker is not None
        context.story.debug(
            f"site={label}: {record.best.config}, from the cache, tuned {record.tuned_at:%Y-%m-%d}"
        )
        if manifest.mode:
            count_use(manifest.mode, context.settings, "exact")
    if records:
        days = sorted({f"{record.tuned_at:%Y-%m-%d}" for record in records.values()})
        kernels = (
            kernels_told((each.kernel for each in records.values()), context.name) or "its config"
        )
        tuned = " to ".join(dict.fromkeys([days[0], days[-1]]))
        text = f"{context.name}: {kernels} from the cache, tuned {tuned}"
        # Not of the object: a factory may decorate in every call. A call with nothing to tune opens
        # no log.
        notice(context, {f"hit {context.name}": text}, "debug", of_process)
    # Of other ranks: this one may come to it later.
    for label in manifest.cached.keys() - records.keys():
        context.sites.apply(label, manifest.cached[label].winner)
    return [record.model_copy(update={"is_recalled": True}) for record in records.values()]


def _refute(context: TuningContext, wrong: Mapping[str, str]) -> None:
    """Tune sites anew whose config from the cache has answered wrongly on some rank."""
    for label, how in wrong.items():
        context.story.warning(f"site={label} {_WRONG}, and it is tuned anew: {how}", shown=True)
    context.sites.forget(wrong)
    context.records[:] = [
        record
        for record in context.records
        if not (record.is_recalled and record.kernel + record.key in wrong)
    ]


def write_record(context: TuningContext, record: TuningRecord, writers: Collection[int]) -> bool:
    """Write a record into the cache, on one rank for each folder; false if this rank was to write
    it and could not.
    """
    return context.ranks.rank not in writers or context.lookup.keep(record)


@Reduction
def _merged(parts: Mapping[int, dict[str, str]]) -> dict[str, str]:
    """Site -> record as JSON, of all sites that any rank brings one of."""
    return {label: text for part in parts.values() for label, text in part.items()}


def _shared_records(context: TuningContext, manifest: SiteManifest) -> dict[str, TuningRecord]:
    rank, met = context.ranks.rank, context.sites.met
    records = {
        label: record
        for label in manifest.cached
        if label in met and (record := met[label].record) is not None
    }
    if any(each.lacking for each in manifest.cached.values()):
        mine = [
            label
            for label, each in manifest.cached.items()
            if each.lacking and each.provider == rank
        ]
        provided = context.reduce(
            "records", {label: records[label].model_dump_json() for label in mine}, _merged
        )
        for label, text in provided.items():
            if rank in manifest.cached[label].lacking:
                records[label] = TuningRecord.model_validate_json(text)
                write_record(context, records[label], manifest.writers.get(label, ()))
    # In one order on all ranks.
    return {label: records[label] for label in manifest.cached if label in records}


def _exchange(context: TuningContext, is_watched: bool, *, gathers: bool) -> SiteManifest:
    """Report the sites that are new here, and learn what is new anywhere, with the candidates of
    all that is new.
    """
    spelled = set(context.sites.new) if context.ranks.is_first else set()
    while True:
        mine = _manifest_of(context, spelled, is_watched)
        is_optional = gathers and not (context.sites.new or context.replays.trials.wrong)
        manifest = context.reduce(
            "manifest", mine, MANIFESTS, is_gathering=gathers, is_optional=is_optional
        )
        gathers = False
        differing = (
            f"settings differ between ranks: {manifest.differing}. Give all ranks the same"
            " environment"
        )
        if manifest.differing:
            notice(context, {differing: differing}, once=of_process)
        required = "DIST_TUNE_MODE is require: tune once without it"
        shared = {label: texts for label, texts in manifest.shared.items() if texts}
        # All ranks have the same candidates, or none.
        is_decided = not shared and (not manifest.unlisted or bool(manifest.shared))
        if manifest.missed and is_decided:
            more = f" And {differing}." if manifest.differing else ""
            raise CacheMissError(
                f"{manifest.missed} {required}, or merge a file that has it.{more}"
            )
        if manifest.refused and context.lookup.is_required and is_decided:
            # Where a rank's settings let it use no record, no tuning helps.
            why = differing if manifest.differing else required
            raise CacheMissError(
                f"site {manifest.refused[0]}: ranks have records that not all of them can use:"
                f" {why}."
            )
        for label, how in manifest.wrong.items():
            if context.lookup.is_required:
                raise CacheMissError(f"site {label}: {_WRONG}, {how}. {required}.")
        if is_decided:
            return manifest
        spelled |= set(manifest.unlisted)
        _share_candidates(context, shared)


def _share_candidates(context: TuningContext, shared: Mapping[str, list[str]]) -> None:
    """Tune of sites whose candidates differ between ranks those that all ranks have."""
    differ = "its configs after pruning differ between ranks, and what all ranks have is tuned"
    told = {
        f"shared {label}": f"site={label}: {differ}: {amount(len(shared[label]), 'config')}"
        for label in context.sites.restrict(shared)
    }
    if context.lookup.mode == "tune":
        notice(context, told)


def _manifest_of(context: TuningContext, spelled: set[str], is_watched: bool) -> RankManifest:
    """This rank's manifest, with the candidates of the sites in ``spelled`` in full."""
    met, lookup = context.sites.met, context.lookup
    sites = {label: met[label] for label in {*context.sites.new, *(spelled & met.keys())}}
    is_first, endless = context.ranks.is_first, context.replays.trials.variants.endless
    why_not = context.replays.why_not(is_asking=bool(context.sites.new))
    may_go_online = bool(why_not and not endless and context.options.max_slowdown)
    slower = (
        f"tuned in the calls to come, which take at most {context.options.max_slowdown:.0%} longer"
    )
    then = slower if may_go_online else "not tuned; split it, or give reset="
    return RankManifest(
        sites={label: digest(site.texts) for label, site in sites.items()},
        lists={label: site.texts for label, site in sites.items() if label in spelled},
        n_threads=context.compiler.n_threads * context.compiler.n_ranks,
        hits=dict(context.sites.hits),
        captured={} if context.ranks.is_alone else context.sites.captured(),
        is_watched=is_watched,
        folder=lookup.folder,
        lookups={
            label: lookup.ticket(
                label,
                site.record,
                runs=site.record is None or site.record.winner not in site.failures,
            )
            for label, site in sites.items()
        },
        wrong=dict(context.replays.trials.wrong),
        prior=(
            {
                label: replace(
                    context.sites.journal.prior(label, lookup.prior_times(label, site.texts)),
                    near=site.near,
                )
                for label, site in sites.items()
                if is_first and site.record is None
            }
            if context.settings.may_tune
            else {
                label: PriorTimes(near=near)
                for label, site in sites.items()
                if (near := site.near if site.record is None else site.record.winner) is not None
            }
        ),
        warm_ups={
            label: 1 if site.checker is None else site.checker.n_runs
            for label, site in sites.items()
            if not site.is_compiled
        },
        is_elsewhere=is_first
        and not context.settings.always_tune
        and context.sites.journal.is_taken(),
        run_s=round(context.replays.run_s, 4),
        settings=shared_settings(context.settings),
        why_not=f"{endless}: not tuned" if endless else why_not and f"{why_not}: {then}",
        may_go_online=may_go_online,
        deaths={
            label: dict(found)
            for label in sites
            if (found := context.sites.journal.attempts_at(label).deaths)
        },
        barred={
            label: barred
            for label in sites
            if (barred := context.sites.journal.attempts_at(label).failures)
        },
    )
