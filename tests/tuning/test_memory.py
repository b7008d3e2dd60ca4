"""Memory that a tuning holds: no workspace of failed configs, no value of the first run, no copies of dead temporaries."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton

from dist_tune import autotune, contextual_autotune
from dist_tune.runtime.tunable import Undo, copies_of
from dist_tune.testing import on_ranks, values
from tests.ranks.kernels import add_kernel, autotuned, launch

pytestmark = pytest.mark.once


class _Bytes:
    """An object whose life can be watched; tensors' own wrappers may be resurrected."""


def _failing(rank: int) -> Any:
    held: list[Any] = []
    n_alive: list[int] = []

    def hook(args: Any) -> None:
        n_alive.append(sum(each() is not None for each in held))
        workspace = _Bytes()
        held.append(weakref.ref(workspace))
        if args["BLOCK"] != 64:
            raise RuntimeError(f"no room beside {workspace}")

    configs = [triton.Config({"BLOCK": block}, pre_hook=hook) for block in (16, 32, 64)]
    kernel = triton.autotune(configs=configs, key=["n"])(add_kernel)
    gc.disable()  # references alone free it
    contextual_autotune(n_repeat=1, n_warmup=0)(lambda x: launch(kernel, x))(torch.zeros(64))
    return n_alive


@pytest.mark.processes
def test_a_failed_config_holds_nothing():
    """Memory that its frames held is free when the next candidate is launched."""
    (n_alive,) = values(on_ranks(1, _failing, is_dist=False))
    assert len(n_alive) > 2
    assert set(n_alive) == {0}


def _watched(n_alive: list[int]) -> Callable[..., Any]:
    """A step that notes the values of its earlier runs that are alive when it begins."""
    kernel = autotuned(blocks=(16, 32, 64))
    values: list[Any] = []

    def step(x: torch.Tensor, part: int = 0) -> Any:
        n_alive.append(sum(each() is not None for each in values))
        value = _Value()
        value["y"] = launch(kernel, x.detach()) * x
        values.append(weakref.ref(value))
        return value

    gc.disable()  # references alone free it
    return step


def _nothing() -> None:
    """What the ``reset`` of such a step has to do."""


def _first_value(rank: int, has_graph: bool, resets: bool) -> Any:
    n_alive: list[int] = []
    step = contextual_autotune(n_repeat=2, n_warmup=1, reset=_nothing if resets else None)(_watched(n_alive))
    step(torch.zeros(64, requires_grad=has_graph))
    return n_alive


def _value_beside_a_kernel(rank: int) -> Any:
    """The function's config comes from the cache; at the second length its kernel is tuned for itself."""
    for n in (64, 128):
        n_alive: list[int] = []
        step = autotune([{"part": part} for part in range(2)], None, n_repeat=2, n_warmup=0, reset=_nothing)(_watched(n_alive))
        step(torch.zeros(n))
    return n_alive


class _Value(dict[str, Any]):
    """A value of a step."""


@pytest.mark.processes
@pytest.mark.parametrize(("has_graph", "resets"), [(False, False), (True, False), (False, True)])
def test_the_first_value_is_freed(has_graph: bool, resets: bool):
    """By the third run: until then it may be the call's, unless by ``reset`` the second one is as good."""
    (n_alive,) = values(on_ranks(1, _first_value, has_graph, resets, is_dist=False))
    assert n_alive[:2] == [0, not resets]
    assert set(n_alive[2:]) == {0}


@pytest.mark.processes
def test_the_value_of_a_function_from_the_cache_is_freed_before_its_kernel_is_tuned():
    """Any run of it is as good as the first."""
    (n_alive,) = values(on_ranks(1, _value_beside_a_kernel, is_dist=False))
    assert len(n_alive) > 3
    assert set(n_alive) == {0}


def test_copies_die_with_their_tensors():
    """A hundred layers with temporaries hold one copy; one that lives is put back, also through a view."""
    undo, kept = Undo(), torch.ones(8)
    undo.keep(copies_of([kept]))
    for _ in range(100):
        undo.keep(copies_of([torch.ones(1000)]))
        assert len(undo._saved) <= 2
    view = kept[2:4]
    kept.fill_(3)
    del kept
    undo.restore()
    assert view.tolist() == [1.0, 1.0]


def _gradients(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32, 64))
    made: list[Any] = []
    n_alive: list[int] = []

    @contextual_autotune(n_repeat=2, n_warmup=1)
    def step(x: torch.Tensor) -> None:
        assert x.grad is None
        n_alive.append(sum(each() is not None for each in made))
        (launch(kernel, x.detach()) * x).sum().backward()
        made.append(weakref.ref(x.grad))

    gc.disable()
    x = torch.ones(64, requires_grad=True)
    step(x)
    return n_alive, None if x.grad is None else x.grad[0].item()


@pytest.mark.processes
def test_gradients_of_the_first_run_are_freed():
    """Each run makes them anew, and the last run's are the call's."""
    ((n_alive, gradient),) = values(on_ranks(1, _gradients, is_dist=False))
    assert gradient == 2.0
    assert set(n_alive[2:]) == {0}


def _short_at_the_end(rank: int) -> Any:
    kernel, n_runs, is_short = autotuned(), 0, True

    @contextual_autotune(n_repeat=1, n_warmup=0)
    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal n_runs
        n_runs += 1
        if kernel.cache and is_short:  # the last run: kernels have their configs
            raise MemoryError("no memory left")
        return launch(kernel, x)

    with pytest.raises(MemoryError) as raised:
        step(torch.zeros(64))
    is_short, n_before = False, n_runs
    return raised.value.__notes__, step(torch.zeros(64)).sum().item(), n_runs - n_before


@pytest.mark.processes
def test_a_machine_without_memory_in_the_last_run_is_told_with_what_to_do():
    """The error is the call's own, and says that the next call runs with the winners; it does, without a replay."""
    ((notes, total, n_runs),) = values(on_ranks(1, _short_at_the_end, is_dist=False))
    assert any("is tuned, and this was its last run" in note and "call again" in note for note in notes)
    assert (total, n_runs) == (64.0, 1)
