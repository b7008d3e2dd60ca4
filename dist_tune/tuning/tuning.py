"""One tuning, top to bottom: discover, compile, warm up, race, apply.

The order of phases; each is a function over the context. Ranks talk only between replays; an error
inside a replay on this rank alone is reported at the next meeting, or posted as the end of the
tuning.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

from dist_tune.compiler import Compiler, n_compile_threads
from dist_tune.errors import JobEndedError, PeerFailedError, StoreGoneError
from dist_tune.files import tell_held
from dist_tune.launches import Tunable
from dist_tune.log import Story, closure_name
from dist_tune.measure import device_clock, no_full_collections, peak_bytes
from dist_tune.ranks import Calls, Ranks
from dist_tune.records import CacheLookup, TuningRecord
from dist_tune.replays import FirstRun, OnlineRuns, Replayer, Trials, Variants
from dist_tune.search import ONLINE, Pace, Race
from dist_tune.settings import Settings, check_mode
from dist_tune.sites import Site, Sites, TuningJournal, one_at_a_time
from dist_tune.tuning.applying import apply_winners
from dist_tune.tuning.context import Closure, TuningContext, TuningOptions
from dist_tune.tuning.discover import discover
from dist_tune.tuning.entering import enter_sites
from dist_tune.tuning.notices import cut_off, tell_of_first_run, tell_of_repeated
from dist_tune.tuning.racing import run_race
from dist_tune.watch import Kind, Watchdog, prepare_release


class Tuning:
    """The tuning of one call of a closure, made between replays or at the first miss."""

    def __init__(
        self,
        name: str,
        ranks: Ranks,
        options: TuningOptions,
        settings: Settings,
        calls: Calls | None = None,
        first: Tuning | None = None,
    ) -> None:
        """``calls``: of a tuning beside them, on a thread of its own (``tune_in_thread``), whose
        runs they are.

        ``first``: the tuning whose sites it goes on with, and what that has compiled.
        """
        self.is_alone = False
        """True if other ranks have passed this call without a meeting: their arguments differ from
        this rank's.
        """
        self.goes_online = False
        """True if calls may not be repeated, and are to be tuned while they are made: the same on
        all ranks.
        """
        self.options, self.settings = options, settings
        self._is_beside, self._has_started = calls is not None, False
        self._is_cut_off = False
        """True once it was told that the tuning does not come to its end."""
        # No candidate warms up in a call of its own.
        if options.plan.search == "online" or self._is_beside:
            plan = options.plan
            options = replace(
                options,
                plan=replace(
                    plan, search=None if plan.search == "online" else plan.search, n_warmup=0
                ),
            )
        self._exit = ExitStack()
        self._exit.callback(tell_held)
        self._place = self._exit.enter_context(
            ranks.calling(f"{name} online" if self._is_beside else name)
        )
        story = Story(
            settings,
            ranks.rank,
            name,
            world_size=len(ranks.members),
            is_first=ranks.writes_progress,
            is_verbose=options.is_verbose,
        )
        self._exit.callback(story.close)
        story.terminal.shows_steps = not self._is_beside
        position, n_ranks = ranks.neighbours
        # Ranks of the job that take no part in the tuning compile beside this one.
        n_threads = n_compile_threads(max(n_ranks, ranks.n_local))
        if first is None:
            compiler = Compiler(n_threads, settings.deadline_s, position, n_ranks)
        else:
            compiler = first._context.compiler
            compiler.n_threads = max(1, n_threads // 2)  # beside a job that goes on
        # Else another tuning goes on with it.
        self._exit.callback(lambda: None if self.goes_online else compiler.end())
        world = {"world_size": len(ranks.members), "ranks_per_host": n_ranks}
        lookup = CacheLookup(settings, story, is_used=options.uses_cache, **world)
        clock = device_clock()
        journal = TuningJournal(name, ranks.rank, ranks.members, lookup, story)
        self._exit.callback(journal.close)
        sites = Sites(story, compiler, lookup, journal=journal, search=options.plan.search)
        self._watchdog = Watchdog(ranks, sites, settings, story, prepare_release(options.release))
        self._exit.callback(self._watchdog.stop)
        if len(ranks.members) > 1 and not self._is_beside:
            self._watchdog.mind()
        # A tuning that is never made, after an error between the first run and the meeting.
        weakref.finalize(self, self._watchdog.stop)
        trials = Trials(
            name, ranks, sites, Variants(sites, compiler, story), clock, watchdog=self._watchdog
        )
        trials.buckets = options.buckets
        ranks.activity.troubles = trials.suspects
        race = Race(options.plan, ONLINE if self._is_beside else None)
        self.replays = Replayer(
            ranks, trials, clock, options.reset, settings.deadline_s, sites=sites, start=self._start
        )
        if calls is not None:
            self.replays = OnlineRuns(
                ranks,
                trials,
                clock,
                settings.deadline_s,
                sites,
                race,
                Pace(options.max_slowdown),
                calls,
            )
        self.trials = trials
        """The ``Listener`` of its runs, the first one among them."""
        self._context: TuningContext = TuningContext(
            name,
            ranks,
            options,
            story,
            race=race,
            sites=sites,
            compiler=compiler,
            lookup=lookup,
            replays=self.replays,
            settings=settings,
        )

    @property
    def records(self) -> list[TuningRecord]:
        """One for each site that has its config now."""
        return self._context.records

    @property
    def sites(self) -> list[Site]:
        """All that this rank has met."""
        return [*self._context.sites.met.values()]

    def meet(self, launch: Tunable) -> Site:
        """Enter the site of the launch that is the whole closure, before it is made; its arguments
        are kept for all runs.
        """
        self._context.replays.keep(launch)
        return self._context.sites.meet(launch)

    def refuse(self, why_not: str) -> None:
        """Tune nothing, on no rank: the keys of this closure have no end."""
        self.trials.variants.endless = why_not

    @property
    def untuned(self) -> list[Site]:
        """Sites that this rank has met alone, and that wait for a call in which all ranks meet."""
        return (
            [self._context.sites.met[label] for label in self._context.sites.new]
            if self.is_alone
            else []
        )

    def tune_after(self, closure: Closure, first: FirstRun, *, is_watched: bool) -> Any:
        """Tune the sites of a ``first`` run of ``closure``; the value of the last run, or of that
        one where no other may follow.

        Collective. ``is_watched``: whether it was heard from its beginning, so that hits are known,
        too.

        Raises:
            DistTuneError: on all ranks, for a reason that is the same on all.
            Exception: what the closure or ``reset`` raises on this rank; the other ranks hear of
                it.
        """
        context = self._context
        context.replays.run_s = self._watchdog.first_run_s = (
            time.monotonic() - context.expenses.began
        )
        with self._under_way():
            context.replays.begin(first, is_made=True)
            is_tuned = self._discovered(closure, is_watched=is_watched)
            tell_of_first_run(context, first.value, is_watched=is_watched)
            return self._finish(closure) if is_tuned else self._counted()

    def tune(self, closure: Closure, first: FirstRun) -> Any:
        """Tune the site that was met (``meet``), of which no run was made; the value of a clean
        run. Collective, and raises so, too.
        """
        with self._under_way():
            self._context.replays.begin(first, is_made=False)
            if self._discovered(closure, is_watched=True):
                return self._finish(closure)
            if self._context.replays.n_replays > 0:  # and no other run may follow
                return self._counted()
            # Its config was in the cache, or other ranks are not here.
            self._context.replays.run_first(closure)
            # Kernels inside the function.
            if not self.is_alone and self._discovered(closure, is_watched=True):
                return self._finish(closure)
            return self._counted()

    def tune_in_thread(self, first: Tuning) -> None:
        """Tune the sites of the ``first`` tuning in the calls to come.

        Collective; an error ends it on all ranks.
        """
        with self._exit:
            try:
                self._begin()
                self.replays.begin(FirstRun(), is_made=True)
                self._context.sites.adopt(first._context.sites)
                self.replays.again(_no_run)
                if self._discovered(_no_run, is_watched=True):
                    self._finish(_no_run)
                else:
                    self.replays.last_run(_no_run)
            except BaseException as error:
                if not _is_programs_end(error):
                    self._is_cut_off = True
                    told = (
                        f"{closure_name(self._context.name)} is not tuned any further:"
                        f" {type(error).__name__}: {error}"
                    )
                    self._context.story.warning(told, shown=True)
                self._end(error)
                raise

    def for_thread(self) -> Ranks:
        """The ranks, for a tuning on another thread. All ask in the same call."""
        return self._context.ranks.for_thread()

    def end_compiler(self) -> None:
        """It was to go on with another tuning, which cannot begin."""
        self._context.compiler.end()

    def leave(self, error: BaseException) -> None:
        """The first run of the closure raised: post that to the others, or learn that another rank
        raised first.

        Raises:
            DistTuneError: another rank is the cause.
        """
        with self._exit, one_at_a_time(self._context.name, self.settings.deadline_s):
            self._begin(has_raised=True)
            self._end(error)

    def tell_cut_off(self) -> None:
        """The program ends before the tuning does: tell once how far it has come.

        For any thread.
        """
        context = self._context
        if not self._is_cut_off and not context.records:
            self._is_cut_off = True
            context.story.info(cut_off(context), shown=True)
            context.story.flush()

    # -- phases ------------------------------------------------------------------------------------

    def _discovered(self, closure: Closure, *, is_watched: bool) -> bool:
        """True if there is something to tune on some rank; it is in the race then."""
        context = self._context
        is_under_way = self._is_beside or bool(context.entries)
        manifest = discover(context, closure, is_watched=is_watched, is_under_way=is_under_way)
        self.is_alone = manifest is None
        self.goes_online |= manifest is not None and manifest.goes_online
        context.expenses.end_phase("discover")
        if manifest is not None:
            if manifest.to_tune and not manifest.why_not and not manifest.mode:
                self._start()
                tell_of_repeated(context, context.replays.first_run.accept())
            enter_sites(context, closure, manifest)
        return bool(context.entries)

    def _start(self) -> None:
        """Before the first replay: until here a rank may be late for reasons of its own."""
        if not self._has_started and not self._is_beside:
            self._has_started = True
            self._exit.enter_context(self._context.ranks.short_timeouts())
            self._exit.enter_context(no_full_collections())
            self._watchdog.mind()

    def _finish(self, closure: Closure) -> Any:
        """Race, and apply."""
        untuned_bytes = peak_bytes()
        run_race(self._context, closure)
        endless = self._context.replays.trials.variants.endless
        return apply_winners(
            self._context, closure, untuned_bytes, endless and f"{endless}: not tuned"
        )

    def _counted(self) -> Any:
        """The first run counts: there was nothing to tune, or no other may follow."""
        context = self._context
        context.sites.journal.close(delete=not self.goes_online)
        context.sites.leave_given_up()
        context.story.debug(
            f"{context.name}: nothing to tune in {len(context.sites.hits)} autotuned launches with"
            " known configs"
        )
        return context.replays.refuse_first()

    # -- around them -------------------------------------------------------------------------------

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """One tuning at a time; an error ends it on all ranks."""
        with self._exit, one_at_a_time(self._context.name, self.settings.deadline_s):
            try:
                self._begin()
                check_mode()
                yield
            except BaseException as error:
                self._end(error)
                raise

    def _begin(self, *, has_raised: bool = False) -> None:
        self._watchdog.at("the first meeting", Kind.UNLIMITED)
        self._watchdog.watch()
        self._context.ranks.enter(
            self._place, f" ({self._context.options.plan})", has_raised=has_raised
        )
        self._context.expenses.search_began = time.monotonic()

    def _end(self, error: BaseException) -> None:
        context = self._context
        self._watchdog.at("the end of the tuning", Kind.UNLIMITED)
        context.compiler.end()
        context.sites.journal.end_with(error)
        for suspect in self.trials.suspects:
            error.add_note(
                f"rank {context.ranks.rank} left {suspect}, after a collective; if there were more"
                " after it, ranks are out of step"
            )
        if _is_programs_end(error):
            self.tell_cut_off()
        else:
            told = f"{type(error).__name__}: {error}"
            context.story.error(f"{self._place.text} ended by {told}")
        try:
            context.ranks.abort(error)
        finally:
            with suppress(RuntimeError):  # of a device that is lost
                context.replays.give_up()


def _is_programs_end(error: BaseException) -> bool:
    """True if a tuning ends because the program does, here or on another rank."""
    is_peers = isinstance(error, PeerFailedError) and error.error.startswith(JobEndedError.__name__)
    return is_peers or isinstance(error, JobEndedError | StoreGoneError | SystemExit)


def _no_run() -> None:
    """In the place of a closure whose runs are the user's."""
