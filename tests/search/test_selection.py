"""Who stays in a race and who wins, from reduced times, and the reason of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.search import Objective, Times
from dist_tune.search.selection import RacingOptions, clock_error_ms, hopeless, kept, select

TIE = 0.005


def of(
    *times: tuple[float, float], spread_ms: float = 0.0, rest_spread_ms: float = 0.0, n: int = 5
) -> dict[int, Times]:
    """Candidates with these kernel and closure times."""
    return {
        i: Times(kernel, closure, spread_ms, rest_spread_ms, n, 1, n)
        for i, (kernel, closure) in enumerate(times)
    }


ms = st.sampled_from([0.5, 1.0, 1.001, 1.1, 1.4, 2.0, 9.0])  # a handful, so that ties happen
spreads = st.sampled_from([0.0, 0.01, 0.2])
measured = st.tuples(ms, ms, spreads, spreads, st.integers(1, 9), st.integers(1, 3)).map(
    lambda each: Times(*each)
)
tables = st.dictionaries(st.integers(0, 30), measured, min_size=1, max_size=12)
objectives: Any = st.sampled_from(["closure", "kernel", "graph"])


@pytest.mark.parametrize(
    ("times", "quota", "margin", "objective", "error_ms", "staying"),
    [
        (
            of((1.0, 2.0), (1.2, 2.2), (1.3, 2.3), (1.6, 2.6)),
            9,
            0.25,
            "closure",
            0.0,
            [0, 1],
        ),  # others are slow by both clocks
        (
            of((1.0, 3.0), (1.5, 2.0), (1.5, 3.0)),
            9,
            0.25,
            "closure",
            0.0,
            [0, 1],
        ),  # one clock is enough to stay
        (of((1.0, 3.0), (1.5, 2.0), (1.5, 3.0)), 9, 0.25, "kernel", 0.0, [0]),
        (of((0.005, 0.1), (0.0052, 0.1), (0.0053, 0.1), (0.006, 0.1)), 1, 0.5, "closure", 0.0, [0]),
        (
            of((0.005, 0.1), (0.0052, 0.1), (0.0053, 0.1), (0.006, 0.1)),
            1,
            0.5,
            "closure",
            0.0002,
            [0, 1, 2],
        ),
    ],
)
def test_the_hopeless_leave_and_the_best_stay(
    times: dict[int, Times],
    quota: int,
    margin: float,
    objective: Objective,
    error_ms: float,
    staying: list[int],
):
    """Slower than the best by more than the margin, by both clocks; beyond the quota those stay
    that the clock cannot tell apart.
    """
    assert kept(times, quota, margin, objective, error_ms=error_ms) == staying


@given(tables, st.integers(1, 8), st.sampled_from([0.1, 0.5]), objectives)
def test_the_fastest_kernel_always_stays(
    table: dict[int, Times], quota: int, margin: float, objective: Objective
):
    """As many stay as may, at most; in order of index, whatever order they come in."""
    staying = kept(table, quota, margin, objective)
    assert min(table, key=lambda i: (table[i].launches_ms, i)) in staying
    assert 1 <= len(staying) <= quota
    assert (
        staying
        == sorted(set(staying))
        == kept(dict(reversed(table.items())), quota, margin, objective)
    )


def test_the_clocks_error_is_half_a_microsecond_until_repeats_have_shown_it():
    """And never more, however much a kernel's own times vary; none where a site's part of the step
    is so long that it is no matter.
    """
    options = RacingOptions()
    assert clock_error_ms(of((0.01, 0.01), (0.02, 0.02), n=1), options, 1) == 0.0005
    assert clock_error_ms(of((0.01, 0.01), (0.02, 0.02), spread_ms=0.3, n=4), options, 1) == 0.00025
    assert clock_error_ms(
        of((0.01, 0.01), (0.02, 0.02), spread_ms=0.0001, n=16), options, 1
    ) == pytest.approx(0.0001 * 1.858 / 4, rel=1e-3)
    often = {
        i: each._replace(n_launches=16) for i, each in of((0.01, 0.1), (0.02, 0.1), n=1).items()
    }
    assert clock_error_ms(often, options, 1) == 0.0005 * 4  # of the sum of sixteen readings
    assert [clock_error_ms(of((0.01, 0.5), (0.02, 0.5), n=1), options, n) for n in (1, 2)] == [
        0.0,
        0.0005,
    ]


@pytest.mark.parametrize(
    ("times", "objective", "winner"),
    [
        (of((1.004, 2.0), (1.0, 2.0)), "kernel", 0),  # half a percent is a tie
        (of((1.006, 2.0), (1.0, 2.0)), "kernel", 1),
        (of((1.0, 2.0), (1.0, 2.0), (1.0, 2.0)), "closure", 0),
        (of((1.003, 2.0), (1.0, 2.0)), "kernel", 0),
        (
            of((1.003, 2.0), (1.0, 2.0), spread_ms=0.05),
            "kernel",
            1,
        ),  # with more noise than a tie a lower index is no better guess
    ],
)
def test_a_tie_goes_to_the_lower_index(times: dict[int, Times], objective: Objective, winner: int):
    assert select(times, objective, TIE).winner == winner


def test_the_closure_decides_where_it_is_clear():
    """A kernel that is 2 % slower and saves 5 % beside it wins by the closure, and not by the
    kernel.
    """
    times = of((1.0, 3.0), (1.02, 2.85), (1.3, 3.3), spread_ms=0.001, rest_spread_ms=0.002)
    selection = select(times, "closure", TIE)
    assert (selection.winner, selection.worse, selection.is_clear) == (1, frozenset({2}), False)
    assert selection.closure_weight > 0.95
    assert (select(times, "kernel", TIE).winner, select(times, "kernel", TIE).closure_weight) == (
        0,
        0.0,
    )


def test_more_noise_leaves_it_open():
    """The same difference is clear, or asks for more replays, or is nobody's loss."""
    clear, near = (
        select(of((1.0, 2.0), (1.03, 2.03), spread_ms=spread), "kernel", TIE)
        for spread in (0.001, 0.02)
    )
    assert (clear.winner, clear.worse, clear.is_clear) == (0, frozenset({1}), True)
    assert (near.winner, near.worse, near.is_clear) == (0, frozenset(), False)


@given(tables, objectives)
def test_a_verdict_is_the_same_in_any_order(table: dict[int, Times], objective: Objective):
    """The winner is a contender, not among the worse, and no slower by both clocks than another
    beyond tie and noise.
    """
    selection = select(table, objective, TIE)
    assert selection == select(dict(reversed(table.items())), objective, TIE)
    assert selection.winner in table.keys() - selection.worse
    assert 0.0 <= selection.closure_weight <= 1.0


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        (of((1.0, 3.0), (1.02, 2.5)), "fastest step"),
        (of((1.0, 3.0), (1.3, 3.3), rest_spread_ms=0.3), "fastest kernel"),
        (of((1.001, 3.0), (1.0, 2.999)), "tied within noise"),
        (of((1.0, 3.0), (1.001, 3.0)), "tied within noise, faster kernel"),
        (
            of((1.0, 3.0), (1.03, 3.03), spread_ms=0.1, rest_spread_ms=0.3),
            "tied within noise, faster kernel",
        ),
        (of((1.0, 3.0)), "fastest in the race"),
    ],
)
def test_the_reason_follows_from_the_comparison_that_decided(times: dict[int, Times], reason: str):
    """The step where its differences counted, a tie where the winner was taken of several."""
    assert select(times, "closure", 0.0075).reason == reason
    assert select(times, "graph", 0.0075).reason == reason


def test_what_is_slow_by_its_host_alone_may_be_captured():
    """A step of a slow host is hopeless as it is; as a graph its kernel decides."""
    table = of((1.0, 500.0), (1.2, 50.0))
    how: Any = {"is_first": False, "is_alone": True}
    assert hopeless(table, {}, RacingOptions(), "closure", **how) == {0}
    assert hopeless(table, {}, RacingOptions(), "graph", **how) == set()
