"""Functions and the kernels inside them take turns, because the times of one depend on the config
of the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest

from dist_tune.errors import CandidateFailure, FailureKind
from dist_tune.search import Guide, Plan, PriorTimes, Race, Replay, Report, Samples, reduce_reports
from tests.search.playing import searching

Step = Callable[[Mapping[str, int]], dict[str, float]]
"""Site -> candidate of each site, to milliseconds of each site that is launched; "way" is around
all others.
"""

REST_MS = 0.006


class NestedWorld:
    """One rank that replays a function called "way" and what it launches, with samples as a tuning
    keeps them and noise of 1 %.

    ``beside``: sites that are launched outside it. ``fails_at``: (site, candidate) -> the replay
    from which on it fails.
    """

    def __init__(
        self,
        search: Race,
        step: Step,
        seed: int = 0,
        *,
        beside: Collection[str] = (),
        fails_at: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        self.search, self.step, self.samples, self.beside = (
            search,
            step,
            Samples(),
            {"way", *beside},
        )
        self.fails_at, self.failures = fails_at or {}, dict[str, dict[int, CandidateFailure]]()
        self.replays: list[Replay] = []
        self.elapsed_s = 0.0
        self._noise = random.Random(seed)

    def replay(self, schedule: Replay, *, is_race: bool) -> None:
        number = len(self.replays)
        self.replays.append(schedule)
        for site, planned in schedule.items():
            if number >= self.fails_at.get((site, planned.candidate), number + 1):
                self.failures.setdefault(site, {})[planned.candidate] = CandidateFailure(
                    FailureKind.LAUNCH, "no"
                )
                return
        ms = self.step({site: trial.candidate for site, trial in schedule.items()})
        self.elapsed_s += ms["way"] / 1e3
        for site, each in ms.items():
            if site not in self.beside:
                self.samples.nest("way", schedule["way"].candidate, site)
            if (trial := schedule.get(site)) is None:  # nothing runs so far of what was tried
                continue
            if trial.is_timed:
                self.samples.add_run(site, trial.candidate, number)
                if is_race:
                    self.samples.add_launch(
                        site, trial.candidate, number, each * self._noise.gauss(1.0, 0.01)
                    )
            elif trial.is_checked:
                self.samples.add_warm_up(site, trial.candidate, each)
        self.samples.add_replay(
            number, (ms["way"] + REST_MS) * self._noise.gauss(1.0, 0.01), schedule
        )

    def finish(self, at_most: int = 1500) -> NestedWorld:
        """Warm up the function, then replay until the search asks for nothing more."""
        in_finals = False
        for schedule in self.search.warm_up(
            {"way": 1}, {"way": self.search["way"].alive()}, {"way": []}
        ):
            self.replay(schedule, is_race=False)
        self.search.tell_warm_up(
            len(self.replays), reduce_reports({0: self.samples.report_warm_ups({})})
        )
        self.search.end_warm_up(["way"])
        while batch := self._next():
            assert len(self.replays) <= at_most, f"no end after {at_most} replays"
            while self.search.begun_anew:
                self.samples.forget(self.search.begun_anew.pop())
            if self.search.is_final != in_finals:
                self.samples.restart()
                in_finals = self.search.is_final
            for schedule in batch:
                self.replay(schedule, is_race=not in_finals)
            report = self.samples.report(self.failures, batch, self.search.kernel_times_ms())
            self.search.tell(
                len(batch), reduce_reports({0: replace(report, elapsed_s=self.elapsed_s)})
            )
        return self

    def _next(self) -> list[Replay]:
        while waves := self.search.waves():
            self.search.join(waves)
        return self.search.batch()

    @property
    def chosen(self) -> dict[str, int]:
        return {
            site: self.search[site].best or 0
            for site in sorted({site for replay in self.replays for site in replay})
        }

    def timed(self, site: str) -> list[Replay]:
        """Replays that time it."""
        return [replay for replay in self.replays if site in replay and replay[site].is_timed]


def moe(seed: int) -> Step:
    """A product of 36 configs beside copies of 9 kinds, which take SMs and bandwidth from it: from
    some configs more than from others.
    """
    draw = random.Random(seed)
    alone_ms = [0.125 * draw.uniform(1.0, 4.0) for _ in range(36)]
    slowed = [[draw.uniform(1.0, 1.9) for _ in range(9)] for _ in range(36)]

    def step(chosen: Mapping[str, int]) -> dict[str, float]:
        way, config = chosen["way"], chosen["product"]
        product_ms = alone_ms[config] * slowed[config][way]
        return {"product": product_ms, "way": product_ms + 0.04 + 0.004 * (way % 3)}

    return step


@pytest.mark.parametrize("seed", range(12))
def test_a_kernel_is_timed_beside_one_config_of_the_function_around_it(seed: int):
    """All of a race's times of the product are of the same way, and all of the ways' are of one
    product: so they can be compared.
    """
    step = moe(seed)
    world = NestedWorld(searching(Plan(3, 5), {"way": 9, "product": 36}), step, seed).finish()
    product, first = world.timed("product"), world.replays.index(world.timed("way")[0])
    before = [replay for replay in world.replays[:first] if replay["product"].is_timed]
    assert {replay["product"].candidate for replay in before} == set(range(36))
    assert len({replay["way"].candidate for replay in before}) == 1
    assert len({replay["product"].candidate for replay in world.timed("way")}) == 1
    assert not [replay for replay in product if replay["way"].is_timed]
    assert product[-1]["way"].candidate == world.chosen["way"]
    ms = {way: step({"way": way, "product": world.chosen["product"]})["way"] for way in range(9)}
    chosen_ms = step(world.chosen)["way"]
    assert chosen_ms <= 1.02 * min(
        step({"way": world.chosen["way"], "product": i})["way"] for i in range(36)
    )
    # Alternating descent: the last turn is the product's.
    assert chosen_ms <= 1.25 * min(ms.values())


def own_kernels(chosen: Mapping[str, int]) -> dict[str, float]:
    """Each of four ways has a kernel of its own; the last way is the fastest once its kernel is
    tuned, and the slowest before.
    """
    way = chosen["way"]
    kernel = f"kernel {way}"
    kernel_ms = 0.1 + 0.01 * abs(chosen.get(kernel, 0) - 7) * (1 + 2 * way) - 0.01 * way
    return {kernel: kernel_ms, "way": kernel_ms + 0.02}


class All(Guide):
    """Asks for all that were not tried."""

    def wave(self, times_ms: Any, failures: Any) -> list[int]:
        wave = sorted(self.untried)
        self.untried.clear()
        return wave


@pytest.mark.parametrize("is_guided", [False, True])
def test_ways_are_compared_with_their_kernels_tuned(is_guided: bool):
    """Each way's own kernel is raced before the ways are, so that the way wins which is the fastest
    with its best config.

    A guided kernel of which nothing runs yet asks for more before its turn: that would begin with
    nothing to run, and end the search.
    """
    race = searching(
        Plan(1, 5), {"way": 4} | {f"kernel {way}": 10 for way in range(3 if is_guided else 4)}
    )
    if is_guided:
        guide = All([f"size={i}" for i in range(10)])
        guide.untried = set(range(1, 10))
        race.add("kernel 3", 10, {0: "rank 0: no"}, guide=guide)
    world = NestedWorld(race, own_kernels).finish()
    assert world.chosen["way"] == 3
    assert world.chosen["kernel 3"] == 7


@pytest.mark.parametrize("search", ["racing", "exhaustive"])
def test_the_product_is_raced_again_beside_the_way_that_won(search: Any):
    """Config 3, which has left the finals beside the way that it raced with, is the fastest beside
    the one that is chosen.
    """

    def step(chosen: Mapping[str, int]) -> dict[str, float]:
        way, config = chosen["way"], chosen["product"]
        product_ms = 0.2 + 0.015 * (config != (3 if way == 2 else 1)) + 0.3 * (config > 3)
        return {
            "product": product_ms,
            "way": product_ms + (0.2 if way == 2 and config == 0 else 0.01 if way == 2 else 0.1),
        }

    world = NestedWorld(
        searching(Plan(1, 5, search=search), {"way": 3, "product": 6}), step
    ).finish()
    assert world.timed("product")[0]["way"].candidate != 2
    assert world.chosen == {"way": 2, "product": 3}


def test_a_race_begins_anew_where_the_config_around_it_fails():
    """Times beside the config that has failed are not compared with those beside the one in its
    place.
    """

    def step(chosen: Mapping[str, int]) -> dict[str, float]:
        product_ms = (0.1 if chosen["way"] == 0 else 0.3) + 0.005 * (19 - chosen["product"])
        return {"product": product_ms, "way": product_ms + 0.01}

    world = NestedWorld(
        searching(Plan(0, 5), {"way": 3, "product": 20}), step, fails_at={("way", 0): 15}
    ).finish()
    timed = {(each["way"].candidate, each["product"].candidate) for each in world.timed("product")}
    assert {way for way, _ in timed} >= {0, 1}
    assert {product for way, product in timed if way == 1} == set(range(20))
    assert world.chosen["product"] == 19
    assert all(
        each.times.kernel_ms > 0.29
        for each in world.search["product"].results()
        if each.times is not None
    )


def test_a_kernel_that_is_launched_outside_the_function_as_well_is_tuned():
    """The only config that launches it inside the function has failed: a probe shows that it is
    launched nevertheless.
    """
    race = searching(Plan(1, 5), {"way": 3, "product": 8, "rest": 1})
    race.tell_warm_up(0, Report(nesting={"product": {"way": [1]}}))
    race["way"].drop({1: "rank 0: no"})

    def step(chosen: Mapping[str, int]) -> dict[str, float]:
        product_ms = 0.1 + 0.01 * abs(5 - chosen["product"])
        return {"way": 0.1 + product_ms, "product": product_ms}

    assert NestedWorld(race, step, beside={"product"}).finish().chosen["product"] == 5


def test_what_is_inside_races_beside_no_suspect():
    """A config that may end the process does not run in each replay of the kernel's race, while
    there is another one.
    """
    race = searching(Plan(0, 1), {"product": 8})
    race.add("way", 3, {}, PriorTimes(suspects=[0, 2]))
    race.tell_warm_up(0, Report(nesting={"product": {"way": [0, 1, 2]}}))
    assert {each["way"].candidate for each in race.batch()} == {1}


def test_functions_within_functions_take_turns_from_the_inside_out():
    """The innermost is raced first, the outermost last."""

    def step(chosen: Mapping[str, int]) -> dict[str, float]:
        product_ms = 0.1 + 0.02 * chosen["product"]
        inner_ms = product_ms + 0.03 * chosen["inner"]
        return {
            "product": product_ms,
            "inner": inner_ms,
            "way": inner_ms + 0.05 * (2 - chosen["way"]),
        }

    world = NestedWorld(searching(Plan(1, 3), {"way": 3, "inner": 4, "product": 5}), step)
    for way in range(3):
        world.samples.nest("inner", way, "product")
    world.finish()
    timed = [[site for site, trial in replay.items() if trial.is_timed] for replay in world.replays]
    assert all(len(each) <= 1 for each in timed)
    assert [*dict.fromkeys(site for each in timed for site in each)] == ["product", "inner", "way"]
    assert world.chosen == {"way": 2, "inner": 0, "product": 0}


def test_a_budget_leaves_half_of_it_to_the_function():
    """When the kernel inside has used up its half, a kernel beside the function has trials left:
    the function races nevertheless.
    """

    def step(chosen: Mapping[str, int]) -> dict[str, float]:
        ms = {"product": 100.0 + 10 * chosen["product"], "way": 200.0 + 50 * (2 - chosen["way"])}
        return ms | {"beside": 100.0 + 10 * chosen["beside"]}

    race = searching(Plan(1, 5, budget_s=4.0), {"way": 3, "product": 40, "beside": 40})
    world = NestedWorld(race, step, beside={"beside"}).finish()
    assert {each["way"].candidate for each in world.timed("way")} == {0, 1, 2}
    assert any(
        "the rest of the budget is for the function around it" in str(each.left)
        for each in race["product"].results()
    )
    assert world.chosen["way"] == 2
    assert world.elapsed_s < 4.5
