"""Tuning scripts: one kernel, several sizes.

Runs tell an exact clock their time, so that it is known which config is fastest.
"""

from __future__ import annotations

import json
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dist_tune import MachineError, NoValidConfigError
from dist_tune.measure import Clock
from dist_tune.offline import (
    get_search_space,
    load_config,
    m_leq,
    tune_and_save_configs,
    tune_kernel,
)
from dist_tune.offline.problem import SearchOptions, distinct, without_amd_keys
from dist_tune.testing import ExactTime, on_ranks, values

pytestmark = pytest.mark.processes

SPACE = [{"i": i} for i in range(6)]
FIELDS = [
    "BLOCK_SIZE_M",
    "BLOCK_SIZE_N",
    "BLOCK_SIZE_K",
    "GROUP_SIZE_M",
    "num_warps",
    "num_stages",
    "waves_per_eu",
    "matrix_instr_nonkdim",
]
Config = dict[str, Any]


@pytest.fixture(autouse=True)
def _logs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIST_TUNE_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("DIST_TUNE_VERBOSITY", "quiet")
    monkeypatch.setattr(Clock, "now", ExactTime.now)


def sleeping(
    ms_of: Callable[[Config], float], result: Callable[[Config], Any] = lambda config: torch.ones(4)
) -> Any:
    """A factory whose runs take so long and return that; right is a tensor of ones."""

    def make(config: Config) -> Any:
        def run() -> Any:
            ExactTime.pass_ms(ms_of(config))
            return result(config)

        return run, torch.ones(4)

    return make


# -- spaces ----------------------------------------------------------------------------------------


def test_nvidia_runs_one_config_of_those_that_only_amd_tells_apart(monkeypatch: pytest.MonkeyPatch):
    """4,500 of 22,500, without AMD's keys: the first of those that differ in these keys alone."""
    space = get_search_space()
    assert len({tuple(config.items()) for config in space}) == len(space) == 22_500
    assert (len(get_search_space(small=True)), all(list(config) == FIELDS for config in space)) == (
        8,
        True,
    )
    monkeypatch.setattr(torch.version, "hip", None)
    originals = distinct(space)
    firsts: dict[tuple[Any, ...], Config] = {}
    for config in space:
        firsts.setdefault(tuple(config[name] for name in FIELDS[:6]), config)
    assert (len(originals), originals) == (4_500, list(firsts.values()))
    own = {name: space[0][name] for name in FIELDS[:6]}
    assert without_amd_keys(space[0]) == own
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert (distinct(space), without_amd_keys(space[0])) == (space, space[0])


def test_repeats_are_left_out_in_order():
    """Values of different types are different, and objects without a text of their own; the space
    is left as it is.
    """
    one, other = object(), object()
    space: list[Config] = [
        {"A": 2, "kpack": 2},
        {"A": 1},
        {"A": 2, "kpack": 1},
        {"A": 1},
        {"A": "1"},
        {"A": True},
    ]
    configs = distinct(iter([*space, {"A": one}, {"A": other}, {"A": one}]))
    assert repr(configs[0]) == repr(space[0])
    assert repr(configs[1:]) == repr([{"A": each} for each in (1, "1", True, one, other)])
    configs[0]["A"] = configs[1]["A"] = 99
    assert space[:2] == [{"A": 2, "kpack": 2}, {"A": 1}]


@pytest.mark.parametrize(
    ("search", "n_configs", "n_tried"),
    [("random", 2001, 101), ("guided", 100, 48), ("random", 7, 7), ("racing", 4500, 4500)],
)
def test_racing_tries_all_and_other_searches_a_share_of_a_large_space(
    search: Any, n_configs: int, n_tried: int
):
    """A twentieth, rounded up, but not fewer than 48, nor more than there are; or as many as the
    script says.

    Racing comes to those that share Triton's front end one after the other, in random order of what
    is left, so that a search that ends early has seen all of the space.
    """
    space = [*map(without_amd_keys, distinct(get_search_space()))][:n_configs]
    options = SearchOptions(search=search)
    assert options.n_tried(n_configs) == n_tried
    few = SearchOptions(search=search, max_configs=5)
    assert (few.n_tried(n_configs), len(set(few.chosen(space)))) == (
        5,
        n_configs if search == "guided" else 5,
    )
    if search == "racing":
        order = options.chosen(space)
        assert sorted(order) == list(range(n_configs))
        groups = [
            {
                name: value
                for name, value in space[i].items()
                if name not in ("num_warps", "num_stages")
            }
            for i in order
        ]
        assert sum(one != other for one, other in pairwise(groups)) == n_configs // 15 - 1
        assert len({config["BLOCK_SIZE_M"] for config in groups[: 15 * 20]}) > 2


# -- one problem -----------------------------------------------------------------------------------


def test_each_config_is_made_once_and_amd_keys_do_not_multiply_the_search():
    """The callback changes a copy of each, which runs and is returned, with AMD's keys; the space
    stays as it is.
    """
    made: Counter[str] = Counter()
    space = get_search_space(small=True) * 2 + [
        {**get_search_space(small=True)[0], "waves_per_eu": 8}
    ]

    def make(config: Config) -> Any:
        made[json.dumps(config)] += 1
        return (lambda: ExactTime.pass_ms(config["double"])), None

    best = tune_kernel(
        space, make, lambda config: config.update(double=2 * config["num_warps"]), num_iters=1
    )
    assert (set(made.values()), len(made)) == ({1}, 8)
    assert not any("waves" in config or "nonkdim" in config for config in made)
    assert {name: value for name, value in best.items() if name != "double"} in get_search_space(
        small=True
    )
    assert (best["double"], space[:8]) == (8, get_search_space(small=True))


def refused(config: Config) -> Any:
    raise ValueError("no such tile")


def raised() -> Any:
    raise MemoryError("too large")


def unwritten() -> Any:
    stale = torch.ones(4)
    return lambda config: (lambda: stale, torch.ones(4))


WRONG = {
    "returned None for this config": lambda config: None,
    "ValueError: no such tile": refused,
    "MemoryError: too large": lambda config: (raised, torch.ones(4)),
    "are NaN": lambda config: (lambda: torch.full((4,), float("nan")), torch.ones(4)),
    "wrong by 1": lambda config: (lambda: torch.zeros(4), torch.ones(4)),
    r"elements are NaN, the first at \[0\]: not written": unwritten(),
}


def test_every_dropped_config_has_its_reason(tmp_path: Path):
    """Refused with None, made wrongly, raised, NaN, wrong, not written: none of them ends the
    tuning or wins. In the log, and the error.
    """
    makes: list[Any] = [
        *WRONG.values(),
        lambda config: (lambda: ExactTime.pass_ms(1) or torch.ones(4), torch.ones(4)),
    ]
    assert tune_kernel(
        [{"i": i} for i in range(len(makes))],
        lambda config: makes[config["i"]](config),
        num_iters=1,
    ) == {"i": len(WRONG)}
    log = (tmp_path / "logs" / "rank-0.log").read_text()
    assert [reason for reason in WRONG if not re.search(reason, log)] == []
    for reason, make in WRONG.items():
        with pytest.raises(
            (NoValidConfigError, MachineError), match=f"(?s)its 6 configs.*{reason}"
        ) as caught:
            tune_kernel(SPACE, make, num_iters=1)
        assert reason != "ValueError: no such tile" or isinstance(
            caught.value.__cause__, ValueError
        )


@pytest.mark.parametrize(("n_right", "num_iters"), [(7, 3), (7, 10), (12, 10), (30, 30)])
@pytest.mark.parametrize("n_turning", [1, 2])
def test_what_is_right_at_first_does_not_win(
    tmp_path: Path, n_right: int, num_iters: int, n_turning: int
):
    """The fastest are wrong from their eighth run on, or a later one of the 5 + num_iters of
    benchmark_config. Alone there is none.
    """

    def make(config: Config) -> Any:
        runs = count(1)

        def run() -> Any:
            ExactTime.pass_ms(1 + config["i"])
            return torch.ones(4) * (2 if next(runs) > n_right and config["i"] < n_turning else 1)

        return run, torch.ones(4)

    assert tune_kernel(SPACE[:3], make, num_iters=num_iters) == SPACE[n_turning]
    assert re.search(
        r"candidate=0 .*the result is wrong: wrong by 1",
        (tmp_path / "logs" / "rank-0.log").read_text(),
    )
    with pytest.raises(NoValidConfigError, match="wrong by 1"):
        tune_kernel(SPACE[:n_turning], make, num_iters=num_iters)


@pytest.mark.parametrize(("atol", "is_right"), [(0.1, True), (0.01, False)])
def test_a_result_is_right_within_the_tolerance(atol: float, is_right: bool):
    near = sleeping(lambda config: 0, lambda config: torch.ones(4) + 0.05)
    with nullcontext() if is_right else pytest.raises(NoValidConfigError, match=r"wrong by 0\.05"):
        assert tune_kernel([{"i": 1}], near, num_iters=1, atol=atol, rtol=0.01) == {"i": 1}


def test_a_device_that_is_lost_in_a_check_ends_the_tuning(tmp_path: Path):
    """It is no verdict on the config at hand, nor on those after it, which would all fail; what was
    under way stays suspected.
    """
    n_runs = 0

    def lose(config: Config) -> torch.Tensor:
        nonlocal n_runs
        n_runs += 1
        if n_runs == 2:  # the run that is checked, and its repetition
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return torch.ones(4)

    with pytest.raises(RuntimeError, match="illegal memory access"):
        tune_kernel(SPACE, sleeping(lambda config: 0, lose), num_iters=1)
    assert list((tmp_path / "cache" / "journals").glob("*.jsonl"))


def test_max_configs_and_budget_end_the_search():
    """Few are tried; what was tried decides."""
    made = []

    def make(config: Config) -> Any:
        made.append(config["i"])
        return (lambda: time.sleep(0.002)), None

    space = [{"i": i} for i in range(400)]
    tune_kernel(space, make, num_iters=1, max_configs=5)
    assert len(set(made)) == 5
    made.clear()
    began = time.monotonic()
    tune_kernel(space, make, num_iters=1, budget_s=0.5)
    assert time.monotonic() - began < 10
    assert 2 <= len(set(made)) < 300  # one round at least


PAIR = r"must return \(run, ground_truth\).* got "


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"search_space": []}, ValueError, "empty"),
        ({"search_space": [1]}, TypeError, "a search space holds dicts of values by name, got 1"),
        ({"search_space": 3}, TypeError, "search_space must be a list of configs, got 3"),
        ({"search_space": [{3: 4}]}, TypeError, "search_space holds a config with the name 3"),
        ({"num_iters": 0}, ValueError, "need num_iters >= 1, got 0"),
        ({"search": "magic"}, ValueError, "search must be one of .* got 'magic'"),
        ({"budget_s": 0}, ValueError, "budget_s"),
        ({"max_configs": "x"}, TypeError, "max_configs must be an int, got 'x'"),
        ({"rtol": float("inf")}, ValueError, "rtol"),
        ({"group": "tp"}, TypeError, "group must be a process group.* got 'tp'"),
        ({"config_callback": 3}, TypeError, "config_callback must be a function.* got 3"),
        ({"make_run_and_gt_fn": 3}, TypeError, "make_run_and_gt_fn must be a function.* got 3"),
        ({"make_run_and_gt_fn": lambda config: lambda: 1}, TypeError, f"{PAIR}the function"),
        (
            {"make_run_and_gt_fn": lambda config: (object(), None, 4)},
            TypeError,
            f"{PAIR}a tuple of 3 values",
        ),
        *(
            ({"sizes": [1], option: 3}, TypeError, rf"{option} must be a function.* got 3")
            for option in ("make_for_size", "classes")
        ),
        ({"sizes": [1, 1]}, ValueError, "need sizes, and each once"),
    ],
)
def test_mistakes_of_the_caller_are_told(
    tmp_path: Path, given: Any, error: type[Exception], words: str
):
    """Also the factory's answer, which is known with its first config; those of a file before
    anything is tuned.
    """
    own: Any = {"make_run_and_gt_fn": sleeping(lambda config: 0)}
    if "sizes" in given:
        own = {
            "make_for_size": lambda size: refused,
            "json_file_name": "a.json",
            "save_path": tmp_path,
        }
    with pytest.raises(error, match=words) as caught:
        (tune_and_save_configs if "sizes" in given else tune_kernel)(
            **{"search_space": SPACE, "num_iters": 1, **own, **given}
        )
    assert " at 0x" not in str(caught.value)


def test_memory_that_our_own_runs_hold_is_no_reason_to_drop_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two inputs fit at a time: those that are held are let go before another one is made, and each
    config is tried.
    """
    alive: WeakSet[torch.Tensor] = WeakSet()
    half_full = {"is_available": lambda: True, "memory_allocated": lambda: len(alive)}
    device = SimpleNamespace(
        **half_full, get_device_properties=lambda: SimpleNamespace(total_memory=1)
    )
    monkeypatch.setattr("dist_tune.offline.runs.api", device)

    def make(config: Config) -> Any:
        if len(alive) >= 2:
            raise torch.OutOfMemoryError("out of memory")
        x = torch.ones(4)
        alive.add(x)
        return (lambda: ExactTime.pass_ms(20 * config["i"]) or x + 0), torch.ones(4)

    assert tune_kernel(SPACE, make, num_iters=3) == SPACE[0]
    assert "out of memory" not in (tmp_path / "logs" / "rank-0.log").read_text()


# -- several problems, and files -------------------------------------------------------------------


@pytest.mark.parametrize("search", ["racing", "exhaustive", "random", "guided"])
def test_each_search_finds_the_best_of_a_small_space(tmp_path: Path, search: Any):
    """Of two sizes, one for each of two files, whose configs are returned by file and class."""

    def make_for_size(n: int) -> Any:
        return sleeping(lambda config: 1 + 8 * abs(config["i"] - n))

    found = tune_and_save_configs(
        [4, 1],
        make_for_size,
        SPACE,
        lambda size: f"k{size}.json",
        tmp_path,
        num_iters=5,
        search=search,
    )
    assert found == {"k4.json": {"small": {"i": 4}}, "k1.json": {"small": {"i": 1}}}
    assert [load_config(tmp_path / name, 1)["i"] for name in found] == [4, 1]


def test_lists_of_a_script_may_be_gone_through_once(tmp_path: Path):
    """Space and sizes as generators are tuned as lists are, and not in part, or as if there were
    none.
    """
    make = sleeping(lambda config: 6.0 - config["i"])
    once: Any = iter
    found = tune_and_save_configs(
        once([1, 4000]), lambda n: make, once(SPACE), "k.json", tmp_path, num_iters=1
    )
    assert found == {"small": {"i": 5}, "large": {"i": 5}}


def test_sizes_of_one_class_get_the_config_that_loses_least_over_them(tmp_path: Path):
    """Best at each size is another one; the third is second at both.

    Classes that are there stay. Inputs of one size live at a time.
    """
    ms = {64: [6, 36, 9], 128: [36, 6, 9], 512: [30, 30, 6], 4096: [1, 21, 21]}
    alive: WeakSet[torch.Tensor] = WeakSet()

    def make_for_size(size: int) -> Any:
        assert not alive
        x = torch.ones(4)
        alive.add(x)
        return sleeping(lambda config: ms[size][config["i"]], lambda config: x + 0)

    folder = tmp_path / "configs"
    saved = tune_and_save_configs(
        [64, 128, 512], make_for_size, SPACE[:3], "k.json", folder, num_iters=5
    )
    assert saved == {"small": {"i": 2}, "medium": {"i": 2}}
    assert load_config(folder / "k.json", 100) == {"i": 2}
    by_limit = tune_and_save_configs(
        [64, 4096], make_for_size, SPACE[:2], "k.json", folder, classes=m_leq(64), num_iters=1
    )
    assert by_limit == {"M_LEQ_64": {"i": 0}, "any": {"i": 0}}
    assert json.loads((folder / "k.json").read_text()) == saved | by_limit


def test_the_config_of_a_class_is_right_again_and_again_at_all_its_sizes(tmp_path: Path):
    """The one that loses least is the best at no size; it is wrong from its eighth run on at the
    last, and out.
    """
    ms = {64: [6, 36, 9], 128: [36, 7, 9]}

    def make_for_size(size: int) -> Any:
        runs: Counter[int] = Counter()

        def result(config: Config) -> torch.Tensor:
            runs[config["i"]] += 1
            return torch.ones(4) * (2 if config["i"] == 2 and size == 128 and runs[2] > 7 else 1)

        return sleeping(lambda config: ms[size][config["i"]], result)

    assert tune_and_save_configs(
        [64, 128], make_for_size, SPACE[:3], "k.json", tmp_path, num_iters=5
    ) == {"small": {"i": 0}}


def test_what_cannot_be_tuned_does_not_lose_the_rest(tmp_path: Path):
    """A size at which nothing runs, and a class that no config serves: the rest is in the file, and
    the error names them.
    """

    def make_for_size(size: int) -> Any:
        right_ones = {32: [0], 64: [1], 512: [0, 1], 4096: []}[size]
        return sleeping(
            lambda config: 1, lambda config: torch.ones(4) * (1 if config["i"] in right_ones else 2)
        )

    with pytest.raises(
        RuntimeError,
        match=(
            r"(?s)size=4096.*NoValidConfigError.*k\.json small: no config runs at all of the sizes"
            r" \[32, 64\]"
        ),
    ):
        tune_and_save_configs(
            [32, 64, 512, 4096], make_for_size, SPACE[:2], "k.json", tmp_path, num_iters=1
        )
    assert list(json.loads((tmp_path / "k.json").read_text())) == ["medium"]


# -- compiled ahead, by the launches of the first run ----------------------------------------------


@triton.jit
def scale_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows, columns = tl.arange(0, 128), tl.arange(0, DEPTH)
    a = tl.load(x_ptr + rows[:, None] * DEPTH + columns[None, :])
    acc = tl.dot(a, tl.trans(a))
    tl.store(
        y_ptr + at,
        tl.load(x_ptr + at, mask=at < n).to(tl.float32) * 2 + tl.sum(tl.sum(acc, 0), 0) * 0,
        mask=at < n,
    )


def _compiled_ahead(rank: int) -> Any:
    """100 is no power of two; a tile of 128 by 1024 halves is a quarter of a megabyte."""
    x = torch.ones(128 * 1024, dtype=torch.float16)
    space = [
        {"BLOCK": block, "DEPTH": 64, "num_warps": warps}
        for block in (64, 128, 256)
        for warps in (4, 8)
    ]
    space += [
        {"BLOCK": 100, "DEPTH": 64, "num_warps": 4},
        {"BLOCK": 64, "DEPTH": 1024, "num_warps": 4},
    ]

    def make(config: Config) -> Any:
        def run() -> None:
            scale_kernel[(triton.cdiv(4096, config["BLOCK"]),)](
                x, torch.empty(4096), 4096, **config
            )

        return run, None

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        best = tune_kernel(space, make, num_iters=2, name="p")
    log = Path(os.environ["DIST_TUNE_LOG_DIR"], f"rank-{rank}.log").read_text()
    return best["BLOCK"], "out of resource" in log, "arange's range must be a power of 2" in log


def test_kernels_are_compiled_before_they_are_launched_and_what_does_not_fit_never_is():
    """Real sm_90 code: a config too large for shared memory and one that does not compile are
    dropped, with the reason.
    """
    ((block, *has_reasons),) = values(on_ranks(1, _compiled_ahead, mode="fake", is_dist=False))
    assert (block in (64, 128, 256), has_reasons) == (True, [True, True])


@triton.jit
def store_kernel(x, IS_DESCRIPTOR: tl.constexpr, TILE: tl.constexpr):
    if IS_DESCRIPTOR:
        x.store([0, 0], tl.zeros(x.block_shape, tl.float16))
    else:
        tl.store(x + tl.arange(0, TILE), tl.zeros((TILE,), tl.float16))


def _waited(rank: int) -> int:
    """Compilations that a launch waited for, where a flag of the config chooses the kind of an
    argument.
    """
    waited: list[str] = []
    triton.knobs.runtime.jit_cache_hook = lambda **facts: (
        None if facts["is_manual_warmup"] else waited.append(facts["repr"])
    )
    x = torch.ones(256, 64, dtype=torch.float16)

    def make(config: Config) -> Any:
        def run() -> None:
            tile = (
                TensorDescriptor.from_tensor(x, [config["TILE"], 64])
                if config["IS_DESCRIPTOR"]
                else x
            )
            store_kernel[(1,)](tile, **config)

        return run, None

    tune_kernel(
        [{"TILE": tile, "IS_DESCRIPTOR": each} for tile in (16, 32, 128) for each in (False, True)],
        make,
        num_iters=2,
        name="p",
    )
    return len(waited)


def test_one_config_of_each_kind_waits_for_its_kernel():
    """The others of its kind are compiled ahead."""
    assert values(on_ranks(1, _waited, mode="fake", is_dist=False)) == [2]
