"""A key function whose keys never come again is not tuned any more after three tunings; loops that tune many shapes on purpose are."""

from __future__ import annotations

import contextlib
import io
import itertools
from typing import Any

import pytest
import torch

from dist_tune import autotune, to_hashable
from dist_tune.testing import values
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once

SHOWN = {"DIST_TUNE_VERBOSITY": "normal"}


def _made(key_fn: Any) -> Any:
    return autotune([{"block": 1}, {"block": 2}], key_fn, n_warmup=0, n_repeat=1, cache=False)(lambda *args, block=0: len(args))


def _tunings(key_fn: Any, calls: list[tuple[Any, ...]]) -> tuple[int, list[str]]:
    """Tunings in a list of calls, and the lines about keys."""
    function = _made(key_fn)
    with contextlib.redirect_stderr(io.StringIO()) as terminal:
        for args in calls:
            assert function(*args) == len(args)
    return len(function.records), [line for line in terminal.getvalue().splitlines() if "never repeats" in line]


def _counter(*args: Any) -> int:
    return next(_numbers)


_numbers = itertools.count(100)


def _endless(rank: int, kind: str) -> Any:
    x = torch.zeros(4)
    keys: dict[str, Any] = {"counter": _counter, "float": lambda x, scale: (to_hashable(x), scale), "memory": lambda x: x.data_ptr()}
    alive = [torch.zeros(4) for _ in range(6)]
    calls: dict[str, Any] = {"counter": [(x,)] * 6, "float": [(x, 0.1 * i) for i in range(6)], "memory": [(each,) for each in alive]}
    return _tunings(keys[kind], calls[kind])


@pytest.mark.parametrize("kind", ["counter", "float", "memory"])
@pytest.mark.parametrize("is_dist", [False, True])
def test_a_key_that_never_repeats_is_told_of(kind: str, is_dist: bool):
    """A counter, a float and an address as keys of arguments that are alike: three are tuned, and one line on the first rank says why."""
    if kind == "memory" and is_dist:
        return  # addresses differ between ranks
    (n_tunings, lines), *others = values(on_ranks(1 + is_dist, _endless, kind, is_dist=is_dist, env=SHOWN))
    assert n_tunings == 3
    (line,) = lines
    assert "has a key that never repeats: 3 tunings in as many calls with arguments alike, keys [" in line
    assert "let key_fn return only what decides whether a config can be used again: not tuned" in line
    assert line.count("[") == line.count("]") == 3, line
    assert others == [(3, [])] * is_dist


def _legitimate(rank: int) -> Any:
    x, shapes = torch.zeros(64), range(1, 11)

    class Layer:
        def __init__(self, number: int) -> None:
            self.number = number

    layers = [Layer(i) for i in range(6)]
    return [
        _tunings(lambda x: to_hashable(x), [(torch.zeros(n),) for n in shapes]),
        _tunings(lambda n: n, [(n,) for n in shapes]),
        _tunings(lambda x, n: n, [(x, n) for n in shapes]),
        _tunings(lambda layer, x: layer.number, [(layer, x) for layer in layers]),
        _tunings(lambda x, mode: mode, [(x, mode) for mode in ("a", "b", "c", "d", "e")]),
    ]


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_loop_over_shapes_tunes_them_all(n_ranks: int):
    """Ten shapes, sizes or names once each, and the layers of a model."""
    for got in values(on_ranks(n_ranks, _legitimate, is_dist=n_ranks > 1, env=SHOWN)):
        assert got == [(n, []) for n in (10, 10, 10, 6, 5)]


def _with_hits(rank: int) -> Any:
    x = torch.zeros(4)
    modes = [mode for mode in range(5) for _ in range(2)]
    current = [0]
    function = _made(lambda x: current[0])
    for mode in modes:
        current[0] = mode
        function(x)
    return len(function.records)


def test_a_key_that_comes_again_is_no_sign():
    """Each of five modes that arguments do not show is called twice."""
    assert values(on_ranks(2, _with_hits)) == [5, 5]
