"""Problems of tuning scripts: their spaces, which of their configs a device runs, and which are tried in which order."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from dist_tune.offline.problem import SearchOptions, get_search_space, launchable

pytestmark = pytest.mark.once

FIELDS = ["BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim"]


@pytest.mark.parametrize(("small", "n_configs"), [(False, 22_500), (True, 8)])
def test_a_space_has_so_many_configs(small: bool, n_configs: int):
    """No two alike, each with the eight fields, in one order."""
    space = get_search_space(small)
    assert len({tuple(config.items()) for config in space}) == len(space) == n_configs
    assert all(list(config) == FIELDS for config in space)
    assert all(config in get_search_space() for config in space[:8])


def test_nvidia_runs_one_config_of_those_that_only_amd_tells_apart(monkeypatch: pytest.MonkeyPatch):
    """4,500 of 22,500, without AMD's keys; each stands for the first of the space, of which the others differ in these keys alone."""
    monkeypatch.setattr(torch.version, "hip", None)
    space = get_search_space()
    own, originals = launchable(space)
    firsts: dict[tuple[Any, ...], dict[str, Any]] = {}
    for config in space:
        firsts.setdefault(tuple(config[name] for name in FIELDS[:6]), config)
    assert (len(own), originals) == (4_500, list(firsts.values()))
    assert own == [{name: config[name] for name in FIELDS[:6]} for config in originals]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert launchable(space) == (space, space)


def test_repeats_are_left_out_in_order(monkeypatch: pytest.MonkeyPatch):
    """Values of different types are different, and the space is left as it is."""
    monkeypatch.setattr(torch.version, "hip", None)
    space: list[dict[str, Any]] = [{"A": 2, "kpack": 2}, {"A": 1}, {"A": 2, "kpack": 1}, {"A": 1}, {"A": "1"}, {"A": True}]
    own, originals = launchable(iter(space))
    assert repr(own) == repr([{"A": 2}, {"A": 1}, {"A": "1"}, {"A": True}])
    assert repr(originals) == repr([space[0], space[1], space[4], space[5]])
    own[0]["A"] = originals[1]["A"] = 99
    assert space[:2] == [{"A": 2, "kpack": 2}, {"A": 1}]


class Layout:
    pass


def test_values_that_read_alike_are_two_configs():
    """Objects without a text of their own; each is one of its own repeats."""
    one, other = Layout(), Layout()
    own, _ = launchable([{"A": one}, {"A": other}, {"A": one}])
    assert [each["A"] for each in own] == [one, other]


def warps_apart(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in ("num_warps", "num_stages")}


def test_racing_tries_configs_that_share_triton_s_front_end_one_after_the_other():
    """Each once; in random order of what is left, so that a search that ends early has seen all of the space."""
    space, _ = launchable(get_search_space())
    order = SearchOptions().chosen(space)
    assert sorted(order) == list(range(len(space)))
    groups = [warps_apart(space[i]) for i in order]
    assert sum(one != other for one, other in pairwise(groups)) == len(space) // 15 - 1
    assert len({config["BLOCK_SIZE_M"] for config in groups[: 15 * 20]}) > 2


@pytest.mark.parametrize(
    ("search", "n_configs", "n_tried"), [("random", 2001, 101), ("guided", 100, 48), ("random", 7, 7), ("racing", 99, 99)]
)
def test_a_share_of_a_large_space_is_tried(search: Any, n_configs: int, n_tried: int):
    """A twentieth, rounded up, but not fewer than 48, nor more than there are; or as many as the script says."""
    space = [{"BM": i} for i in range(n_configs)]
    assert SearchOptions(search=search).n_tried(n_configs) == n_tried
    assert SearchOptions(search=search, max_configs=5).n_tried(n_configs) == 5
    assert len(set(SearchOptions(search=search, max_configs=5).chosen(space))) == (n_configs if search == "guided" else 5)
