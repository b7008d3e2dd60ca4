"""Which configs of a large space are tried, and in which order."""

import math
import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from benchmarks.search_costs import FullTable, load_full_tables, regrets
from dist_tune.offline.search_space import products
from dist_tune.search.guided.strategies import GUIDED_LEAST, STRATEGIES, Guided, Strategy, Sweep, features, grouped_order, make_strategy

pytestmark = pytest.mark.once

SPACE = products({"BM": (16, 32, 64, 128), "BN": (16, 32, 64, 128), "split": ("yes", "no"), "num_warps": (2, 4, 8), "num_stages": (1, 2)})


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """Threads of small matrices wait for each other longer than they compute."""
    with threadpool_limits(1):
        yield


def latency_ms(index: int) -> float:
    config = SPACE[index]
    return math.fsum([1, abs(math.log2(config["BM"] / 64)), abs(math.log2(config["BN"] / 32)), (config["num_warps"] - 4) ** 2 / 16])


def play(strategy: Strategy, n: int = 64, failed: Any = lambda index: False) -> list[int]:
    """All that it proposes, told what came of it."""
    tried: list[int] = []
    while proposed := strategy.propose(n):
        assert len(proposed) <= n
        tried += proposed
        strategy.tell({i: latency_ms(i) for i in proposed if not failed(i)}, [i for i in proposed if failed(i)])
    assert strategy.propose(n) == []
    return tried


def warps_apart(index: int) -> dict[str, Any]:
    return {name: value for name, value in SPACE[index].items() if name not in ("num_warps", "num_stages")}


@given(st.integers())
def test_an_order_holds_each_candidate_once(seed: int):
    """Those that differ in warps and stages alone one after the other."""
    order = grouped_order(SPACE, seed)
    assert sorted(order) == list(range(len(SPACE)))
    groups = [warps_apart(i) for i in order]
    assert sum(one != other for one, other in pairwise(groups)) == 31


def test_a_sweep_begins_where_it_is_told():
    """The same circle, from a quarter, half or all of it on, of those that may be tried: all ranks try the same."""
    for n in (len(SPACE), 40):
        order = make_strategy("racing", SPACE, n, seed=1).propose(n)
        assert order == grouped_order(SPACE, 1)[:n]
        for start in (0.25, 0.5, 1.0):
            first = round(start * n)
            assert make_strategy("racing", SPACE, n, seed=1, start=start).propose(n) == [*order[first:], *order[:first]]
    assert grouped_order(SPACE, 1) != grouped_order(SPACE, 2)
    assert grouped_order([], 1) == []


def test_a_sweep_tries_all_in_its_order():
    """In portions as asked for, without those known from before."""
    sweep = Sweep([3, 1, 2, 0])
    sweep.tell({1: 1.0}, [0])
    assert sweep.n_planned == 4
    assert [sweep.propose(1), sweep.propose(5), sweep.propose(5)] == [[3], [2], []]


@pytest.mark.parametrize("search", STRATEGIES)
@pytest.mark.parametrize("max_configs", [None, 1, 20])
def test_as_many_are_tried_as_planned(search: Any, max_configs: int | None):
    """None twice; untold, all of the space, or a part of it where the search is random or guided."""
    strategy = make_strategy(search, SPACE, max_configs)
    n_planned = max_configs or (GUIDED_LEAST if search in ("random", "guided") else len(SPACE))
    assert strategy.n_planned == n_planned
    tried = play(strategy)
    assert len(set(tried)) == len(tried) == n_planned


@pytest.mark.parametrize("search", ["random", "guided"])
def test_a_share_of_a_large_space_is_tried(search: Any):
    """A twentieth, rounded up, but not fewer than the least, nor more than there are."""
    for n_configs, n_planned in ((2001, 101), (100, GUIDED_LEAST), (7, 7)):
        assert make_strategy(search, [{"BM": i + 1} for i in range(n_configs)], None).n_planned == n_planned


@pytest.mark.parametrize("search", STRATEGIES)
def test_a_seed_decides(search: Any):
    """Two ranks that are told the same propose the same; another seed proposes otherwise."""
    one, other, third = (play(make_strategy(search, SPACE, 40, seed)) for seed in (3, 3, 4))
    assert one == other
    assert one != third


def test_guided_goes_on_from_what_is_known():
    """Known ones count as tried, and are not tried again."""
    guided = Guided(SPACE, 40)
    guided.tell({i: latency_ms(i) for i in range(20)}, range(20, 30))
    tried = play(guided)
    assert len(tried) == 10
    assert not set(tried) & set(range(30))


def test_guided_asks_its_model_once_it_knows_enough():
    """Eight at a time, however many are asked for, and from then on better ones than by chance."""
    guided = Guided(SPACE, 48)
    first = guided.propose(64)
    guided.tell({i: latency_ms(i) for i in first}, [])
    then = guided.propose(64)
    assert (len(first), len(then)) == (12, 8)
    rest = play_on(guided, then)
    assert mean_ms(rest) < 0.8 * mean_ms(range(len(SPACE)))
    assert min(map(latency_ms, rest)) == 1.0


def play_on(strategy: Strategy, proposed: list[int]) -> list[int]:
    strategy.tell({i: latency_ms(i) for i in proposed}, [])
    return proposed + play(strategy)


def mean_ms(indices: Any) -> float:
    return sum(map(latency_ms, indices)) / len(indices)


def test_guided_keeps_away_from_what_does_not_run():
    """Half of the space fails, and it is fast where it runs nearby: less than a third of what the model proposes fails."""
    tried = play(Guided(SPACE, 64), failed=lambda i: SPACE[i]["BM"] > 32)
    assert sum(SPACE[i]["BM"] > 32 for i in tried[16:]) < len(tried[16:]) / 3


@pytest.mark.parametrize("n_running", [0, 1])
def test_guided_goes_on_where_nearly_nothing_runs(n_running: int):
    """Nothing can be learnt from no times, or one."""
    tried = play(Guided(SPACE, 40), n=16, failed=lambda i: i >= n_running)
    assert len(set(tried)) == 40


def test_fields_that_are_constant_or_missing_are_no_obstacle():
    """A space of one config many times over, and one in which some configs lack a field."""
    for space in ([{"BM": 16}] * 30, [{"BM": 16, "kpack": 2} if i % 2 else {"BM": 2 ** (i % 5)} for i in range(30)]):
        assert sorted(play(Guided(space, 30))) == list(range(30))


def test_features_are_from_0_to_1():
    """Numbers by their logarithm, others by their place, constants not at all."""
    space: list[dict[str, Any]] = [{"BM": 16, "K": 1, "on": False}, {"BM": 32, "K": 1, "on": True}, {"BM": 256, "K": 1, "on": None}]
    assert features(space).tolist() == [[0.0, 0.0], [0.25, 1.0], [1.0, 0.5]]
    assert features([{"BM": 16}] * 2).tolist() == [[0.0], [0.0]]


def test_guided_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    """At once, and not when its model is asked first; other searches do not need it."""
    monkeypatch.setitem(sys.modules, "sklearn.gaussian_process", None)
    with pytest.raises(ImportError, match=r'pip install "dist-tune\[guided\]"'):
        make_strategy("guided", SPACE, 10)
    assert len(play(make_strategy("random", SPACE, 10))) == 10


def test_guided_finds_what_chance_does_not():
    """On a third of three recorded spaces, with a twentieth of the configs: within 5 % of the best in two of three at least."""
    tables = [FullTable(each.problem, each.configs[::3], each.us[::3]) for each in load_full_tables()[::7]]
    assert len(tables) == 3
    n_tries = len(tables[0].configs) // 20
    guided = [regrets(table, "guided", n_tries, seed=0)[-1] for table in tables]
    by_chance = [regrets(table, "random", n_tries, seed)[-1] for table in tables for seed in range(8)]
    assert sorted(guided)[1] <= 0.05
    assert sum(guided) / 3 < 0.5 * sum(by_chance) / 24
