"""Plays tables of times through the real search, ledgers and reduction: no GPU, no processes.

Knows true times and makes noise around them: hiccups, errors of clocks, and costs of the closure
that a kernel's clock does not see. Figures for policies and for the cost of agreement:

    python -m benchmarks.simulator
    python -m benchmarks.simulator --online
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass, replace
from math import exp

from benchmarks.meeting_costs import Cost, tuning
from benchmarks.timing_tables import load_tables
from benchmarks.worlds import HICCUP, World, kernel_of, many, step_of_148
from dist_tune.search.guided import guide_of
from dist_tune.search.pace import ONLINE, Pace
from dist_tune.search.plan import Plan, Replay, SearchName
from dist_tune.search.race import Race
from dist_tune.search.selection import RacingOptions
from dist_tune.search.times import Report, Samples, reduce_reports


@dataclass(frozen=True, slots=True)
class Played:
    """What came of one tuning."""

    winners: dict[str, int]
    regret: float
    """By how much the closure is slower than with the best candidate of each site; 0.01 is a
    percent.
    """
    n_replays: int
    replay_ms: float
    """Time of all replays, each on its slowest rank."""
    search: Race
    schedule: list[Replay]
    meetings: list[tuple[dict[int, Report], Report]]
    """One per rung or round."""
    n_calls: int = 0
    """Of the job until its winners, where it is tuned online."""
    slowdown: float = 0.0
    """Share of the time of these calls that trials have taken beyond what was in use, truly."""


class _Rank:
    """One simulated rank: its dice and its ledger."""

    def __init__(self, world: World, rank: int, seed: int) -> None:
        self.samples = Samples()
        self._world = world
        self._rank = rank
        self._dice = random.Random(f"{seed} {rank}")

    def run(self, number: int, schedule: Replay, *, times_launches: bool) -> float:
        """One replay; returns its time."""
        world = self._world
        closure_ms = self._noisy(world.other_ms)
        for site, trial in schedule.items():
            kernel, candidate, is_timed = world.sites[site], trial.candidate, trial.is_timed
            if is_timed:
                self.samples.add_run(site, candidate, number)
            for _ in range(kernel.n_launches):
                has_hiccup = self._dice.random() < world.hiccups
                ms = self._noisy(kernel.ms[candidate][self._rank]) * (HICCUP if has_hiccup else 1.0)
                closure_ms += ms
                if times_launches:
                    closure_ms += world.events_ms
                if is_timed and times_launches:
                    self.samples.add_launch(
                        site, candidate, number, self._read(ms + world.events_ms, world.clock_ms)
                    )
            closure_ms += self._noisy(kernel.unseen_ms[candidate]) if kernel.unseen_ms else 0.0
        self.samples.add_replay(number, self._read(closure_ms, 2 * world.clock_ms), schedule)
        return closure_ms

    def _read(self, ms: float, error_ms: float) -> float:
        return max(ms + self._dice.gauss(0.0, error_ms), 1e-6) if error_ms else ms

    def _noisy(self, ms: float) -> float:
        return ms * exp(self._dice.gauss(0.0, self._world.noise)) if ms else 0.0


def play(
    world: World,
    plan: Plan | None = None,
    options: RacingOptions | None = None,
    seed: int = 0,
    *,
    max_slowdown: float | None = None,
) -> Played:
    """Tune the closure as a session does, between the vote on what was compiled and the winners;
    online with ``max_slowdown``.
    """
    plan = plan or Plan()
    search = Race(plan, options or (ONLINE if max_slowdown is not None else None))
    for site, kernel in world.sites.items():
        guide = guide_of(plan.search, kernel.texts)
        untried = guide.untried if guide is not None else ()
        search.add(
            site,
            len(kernel.ms),
            {i: why for i, why in kernel.failures.items() if i not in untried},
            guide=guide,
        )
    ranks = [_Rank(world, rank, seed) for rank in range(world.n_ranks)]
    schedule: list[Replay] = []
    meetings: list[tuple[dict[int, Report], Report]] = []
    replay_ms, in_finals = 0.0, False
    pace, n_calls, beyond_ms, job_ms = Pace(max_slowdown or 1.0), 0, 0.0, 0.0
    while batch := _next_batch(world, search):
        if search.is_final and not in_finals:
            for rank in ranks:
                rank.samples.restart()
        in_finals = search.is_final
        times_launches = not in_finals or plan.objective == "kernel"
        n_taken, in_use = len(batch), {site: search[site].best or 0 for site in world.sites}
        if max_slowdown is not None:
            plain_ms = world.closure_ms(in_use)
            pace.renew()
            while not pace.may_work(n_calls + 1):
                n_calls += 1
                pace.add(n_calls, plain_ms / 1e3)
                job_ms += plain_ms
            pace.agreed = pace.account
            pace.has_begun = True
            batch, n_taken = pace.plan(search, batch)
            trials = pace.schedule(n_calls + 1 + pace.n_wait(search, batch), batch)
            for call in range(n_calls + 1, max(trials) + 1):
                tried = trials.get(call, {})
                ms = world.closure_ms(
                    in_use | {site: trial.candidate for site, trial in tried.items()}
                )
                pace.add(call, ms / 1e3, is_trial=call in trials)
                job_ms += plain_ms
                beyond_ms += max(0.0, ms - plain_ms)
            n_calls = max(trials)
        for replay in batch:
            replay_ms += max(
                rank.run(len(schedule), replay, times_launches=times_launches) for rank in ranks
            )
            schedule.append(replay)
        known_ms = search.kernel_times_ms()
        reports = {r: rank.samples.report({}, batch, known_ms) for r, rank in enumerate(ranks)}
        told = replace(reduce_reports(reports), batch_s=len(batch) * world.host_ms / 1e3)
        meetings.append((reports, told))
        search.tell(n_taken, told)
        if max_slowdown is not None:
            pace.agreed = pace.account
            pace.end(search, batch)
    winners = {site: best for site in world.sites if (best := search[site].best) is not None}
    best_ms = world.closure_ms({site: kernel.best() for site, kernel in world.sites.items()})
    return Played(
        winners,
        world.closure_ms(winners) / best_ms - 1,
        len(schedule),
        replay_ms,
        search,
        schedule,
        meetings,
        n_calls,
        beyond_ms / (job_ms + beyond_ms) if job_ms else 0.0,
    )


def _next_batch(world: World, search: Race) -> list[Replay]:
    while waves := search.waves():
        for site, wave in waves.items():
            search[site].drop(
                {i: why for i, why in world.sites[site].failures.items() if i in wave}
            )
        search.join(waves)
    return search.batch()


# -- policies --------------------------------------------------------------------------------------


def summary(
    world: World, plan: Plan | None = None, options: RacingOptions | None = None, n_runs: int = 200
) -> str:
    """Share of runs with one winner, worst and mean regret, replays against an exhaustive
    search's.
    """
    runs = [play(world, plan, options, seed) for seed in range(n_runs)]
    same = statistics.multimode(tuple(run.winners.values()) for run in runs)[0]
    own_share = sum(tuple(run.winners.values()) == same for run in runs) / n_runs
    regrets = [run.regret for run in runs]
    exhaustive = Race(Plan(search="exhaustive"))
    for site, kernel in world.sites.items():
        exhaustive.add(site, len(kernel.ms), kernel.failures)
    n_replays = statistics.mean(run.n_replays for run in runs)
    return (
        f"same={own_share:6.1%} regret worst={max(regrets):7.3%}"
        f" mean={statistics.mean(regrets):7.3%} replays={n_replays:6.1f} of {exhaustive.n_left}"
        f" rounds={statistics.mean(len(run.meetings) for run in runs):.1f}"
        f" replay_s={statistics.mean(run.replay_ms for run in runs) / 1e3:.3f}"
    )


@dataclass(frozen=True, slots=True)
class Quota(RacingOptions):
    """Options that keep another share of the candidates after the first rung; half of that after
    each later one.
    """

    first: int = 4
    """One of so many stays."""

    def quota(self, n_candidates: int, rung: int) -> int:
        """How many may stay after this rung."""
        return max(self.max_finalists, n_candidates // (self.first << rung))


def online_summary(
    world: World, search: SearchName, n_runs: int, max_slowdown: float = 0.05
) -> str:
    """Calls until the winners, regret and slowdown of a job that is tuned online, whose calls have
    no untimed run (``n_warmup=0``).
    """
    runs = [
        play(world, Plan(search=search, n_warmup=0), seed=seed, max_slowdown=max_slowdown)
        for seed in range(n_runs)
    ]
    regrets, n_calls, slowdowns = (
        [run.regret for run in runs],
        [run.n_calls for run in runs],
        [run.slowdown for run in runs],
    )
    within = sum(regret <= 0.01 for regret in regrets) / n_runs
    return (
        f"calls median={statistics.median(n_calls):5.0f} most={max(n_calls):5} regret"
        f" median={statistics.median(regrets):6.2%} worst={max(regrets):6.2%}"
        f" within_1%={within:4.0%} slowdown median={statistics.median(slowdowns):5.1%}"
        f" worst={max(slowdowns):5.1%}"
    )


OPTIONS: dict[str, RacingOptions] = {
    "default": RacingOptions(),
    "margins 0.3 0.15 0.1 0.05": RacingOptions(margins=(0.3, 0.15, 0.1, 0.05)),
    "margins 1 0.5 0.3 0.2": RacingOptions(margins=(1.0, 0.5, 0.3, 0.2)),
    "quota 1/2": Quota(first=2),
    "quota 1/8": Quota(first=8),
    "3 finalists": RacingOptions(max_finalists=3),
    "6 finalists": RacingOptions(max_finalists=6),
    "8 finalists": RacingOptions(max_finalists=8),
    "1 final round": RacingOptions(n_final_rounds=1),
    "2 final rounds": RacingOptions(n_final_rounds=2),
    "tie 0.25 %": RacingOptions(tie=0.0025),
    "tie 1 %": RacingOptions(tie=0.01),
}


def main(n_runs: int = 200) -> None:
    """Print all tables."""
    worlds = {name: World({name: kernel_of(table)}) for name, table in load_tables().items()}
    worlds["20 random sites of 8 candidates"] = many(20, 8)
    for name, world in worlds.items():
        print(f"\n{name}, {n_runs} runs, noise {world.noise:.1%}, hiccups {world.hiccups:.1%}")
        for label, options in OPTIONS.items():
            n = n_runs if len(world.sites) == 1 else n_runs // 10
            print(f"  {label:26} {summary(world, options=options, n_runs=n)}")
    world, texts = step_of_148()
    played = play(world)
    step_ms = world.closure_ms(played.winners)
    print(
        f"\nagreement: 148 candidates, a step of {step_ms:.3f} ms, {played.n_replays} replays of"
        f" {played.replay_ms:.1f} ms in all"
    )
    for n_ranks in (4, 64, 256, 1024):
        costs = tuning(played.meetings, texts, n_ranks)
        for label, cost in {**costs, "all": sum(costs.values(), Cost())}.items():
            print(
                f"  ranks={n_ranks:<5} {label:10} messages={cost.n_messages:<6}"
                f" up_MB={cost.up_bytes / 1e6:<8.3f} down_MB={cost.down_bytes / 1e6:<8.3f}"
                f" latency_ms={cost.latency_ms:<7.1f} transfer_ms={cost.transfer_ms:<7.1f}"
                f" reduce_ms={cost.reduce_ms:<7.1f} of replays={cost.ms / played.replay_ms:.1%}"
            )


def main_online(n_runs: int = 20) -> None:
    """Print the table of jobs that are tuned online."""
    worlds = {
        f"3 random sites of 64, {other_ms:.0f} ms beside them": many(3, 64, other_ms=other_ms)
        for other_ms in (0.0, 1.0, 4.0)
    }
    recorded = {
        name: World({name: kernel_of(table)})
        for name, table in load_tables().items()
        if name.startswith("contextual")
    }
    print(f"max_slowdown=0.05, {n_runs} runs each, 4 ranks, noise 1.0%, hiccups 0.3%")
    for name, world in {**worlds, **recorded}.items():
        step_ms = world.closure_ms({site: kernel.best() for site, kernel in world.sites.items()})
        # A guided search needs configs that are described.
        for search in SEARCHES if name in recorded else SEARCHES[:1]:
            print(
                f"{name:36} best step_ms={step_ms:.3f} {search:7}"
                f" {online_summary(world, search, n_runs)}"
            )


SEARCHES: tuple[SearchName, ...] = ("racing", "guided")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--online",
        action="store_true",
        help="jobs that are tuned in their own calls: calls until the winners, and their cost",
    )
    main_online() if parser.parse_args().online else main()
