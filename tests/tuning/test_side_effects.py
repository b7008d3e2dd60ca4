"""Kernels that restore or zero what they change, and steps that change state: a call leaves what one plain call leaves."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import triton

from dist_tune import contextual_autotune
from dist_tune.testing import on_ranks, values
from tests.ranks.kernels import accumulate_kernel, autotuned, launch

pytestmark = [pytest.mark.once, pytest.mark.processes]

QUICK: Any = {"n_repeat": 2, "n_warmup": 1}


def only(function: Any, *args: Any) -> Any:
    """The value of a function that runs in one process of its own."""
    return values(on_ranks(1, function, *args, is_dist=False))[0]


def _known(rank: int, kind: str) -> Any:
    """An accumulating kernel beside one that is tuned, with a config of its own before or after."""
    option: Any = {"reset_to_zero": ["y_ptr"]} if kind == "zeroed" else {"restore_value": ["y_ptr"]}
    total = autotuned(accumulate_kernel, blocks=(32,) if kind == "single" else (16, 32), **option)
    other, key = autotuned(blocks=(16, 32, 64)), (64, "torch.float32", "torch.float32")
    y, n = torch.zeros(64), [64]
    if kind != "single":
        total.cache[key] = total.configs[0]

    def run(x: torch.Tensor) -> torch.Tensor:
        launch(total, x, y)
        out = launch(other, torch.zeros(n[0]))
        launch(total, x, y)
        return out

    step = contextual_autotune(**QUICK)(run)
    if kind == "late":  # the miss is not the first launch, and the signature not new
        other.cache[key] = other.configs[0]
        step(torch.ones(64))
        y.zero_()
        other.cache.clear()
    out = step(torch.ones(64))
    return y[0].item(), out[0].item(), len(other.cache)


@pytest.mark.parametrize("kind", ["known", "single", "zeroed", "late"])
def test_kernels_with_a_config_are_undone_too(kind: str):
    """Two launches a step add up to two, though the step is replayed for the sake of another kernel."""
    assert only(_known, kind) == (2.0, 1.0, 1)


def _from_the_cache(rank: int) -> Any:
    total, other = autotuned(accumulate_kernel, blocks=(16, 32), restore_value=["y_ptr"]), autotuned(blocks=(16, 32))
    contextual_autotune(**QUICK)(lambda x, y: launch(total, x, y))(torch.ones(64), torch.zeros(64))
    total.cache.clear()
    y = torch.zeros(64)

    @contextual_autotune(**QUICK)
    def step(x: torch.Tensor) -> torch.Tensor:
        launch(total, x, y)
        return launch(other, x)

    step(torch.ones(64))
    return y[0].item(), [each.is_recalled for each in step.records]


def test_a_kernel_from_the_cache_is_undone_too():
    """One config comes from a record and the other is tuned: the first adds once."""
    assert only(_from_the_cache) == (1.0, [True, False])


def _zeroed_twice(rank: int) -> Any:
    total = autotuned(accumulate_kernel, blocks=(16, 32), reset_to_zero=["y_ptr"])
    y = torch.zeros(64)

    @contextual_autotune(**QUICK)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        launch(total, x, y)
        launch(total, x, y)

    step(torch.ones(64), y)
    return y[0].item()


def test_zeroing_happens_once_as_in_triton():
    """Triton zeroes while it tunes, at the first launch; the second one adds."""
    assert only(_zeroed_twice) == 2.0


def _in_place(rank: int, kind: str) -> Any:
    kernel = autotuned(blocks=(16, 32, 64))
    plain = triton.jit(accumulate_kernel.fn)
    c, x = torch.zeros(64), torch.ones(64)

    def run(c: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = launch(kernel, x)
        if kind == "torch":
            c.add_(y)
        elif kind == "kernel":
            plain[(4,)](y, c, 64, BLOCK=16)
        else:
            torch.add(c, y, out=c)
        return c

    step = contextual_autotune(**QUICK)(run)
    got = step(c, x)
    first = got[0].item(), c[0].item(), got is c, len(kernel.cache)
    kernel.cache.clear()
    step(c, x)  # the signature is not new: the miss comes in the middle
    return first, c[0].item(), len(kernel.cache)


@pytest.mark.parametrize("kind", ["torch", "kernel", "out"])
def test_an_in_place_step_acts_once(kind: str):
    """An argument that torch or a kernel of the step writes holds what one run leaves, in the first call and in a later one."""
    assert only(_in_place, kind) == ((2.0, 2.0, True, 1), 4.0, 1)


class _Normed(torch.nn.Module):
    def __init__(self, tracks: bool) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(64)
        self.tracks = tracks
        self.kernel = autotuned(blocks=(16, 32, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, var = self.norm.running_mean, self.norm.running_var
        y = self.norm(x) if self.tracks else torch.nn.functional.batch_norm(x, mean, var, training=True)
        return y + launch(self.kernel, torch.zeros(64))


def _normed(rank: int, tracks: bool) -> Any:
    model = _Normed(tracks)
    contextual_autotune(**QUICK)(model.forward)(torch.ones(4, 64))
    assert model.norm.running_mean is not None
    return model.norm.running_mean[0].item()


@pytest.mark.parametrize("tracks", [True, False])
def test_statistics_of_batch_norm_are_those_of_one_run(tracks: bool):
    """Torch counts no writes to them; with a counter of batches beside them, which it counts, and without."""
    assert only(_normed, tracks) == pytest.approx(0.1)


def _warned(rank: int) -> Any:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        contextual_autotune(restore=None, **QUICK)
        contextual_autotune(restore="args", **QUICK)
        contextual_autotune(**QUICK)
    return [str(each.message) for each in told]


def test_restore_is_accepted_with_a_warning():
    """Any value of it warns, None as well."""
    told = only(_warned)
    assert len(told) == 2
    assert all("restore= has no effect" in each for each in told)


def _appended(rank: int) -> Any:
    kernel, seen = autotuned(blocks=(16, 32)), list[torch.Tensor]()

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        seen.append(launch(kernel, x))
        return seen

    return len(contextual_autotune(**QUICK)(step)(torch.ones(64)))


def test_a_list_that_grows_and_is_the_value_is_told_as_that():
    """Not as a change of a tensor in place; and it has grown once."""
    (run,) = on_ranks(1, _appended, is_dist=False)
    assert run.value == 1
    assert "returns another value when it runs again (returned a list of length 2, expected a list of length 1)" in run.log


def _backward(rank: int, kind: str) -> Any:
    kernel, norm = autotuned(blocks=(16, 32, 64)), torch.nn.BatchNorm1d(64)
    weight, total = torch.ones(64, requires_grad=True), torch.zeros(64)

    def step(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = launch(kernel, torch.ones(64))
        if kind == "norm":
            value: torch.Tensor = (norm(x * weight) * y).square().sum()
            return value
        total.add_(y)
        return (total * weight).sum()

    loss = contextual_autotune(**QUICK)(step)(total, torch.rand(4, 64))
    loss.backward()
    return weight.grad is not None, total[0].item()


@pytest.mark.parametrize("kind", ["norm", "in place"])
def test_a_value_of_a_first_run_that_counts_can_be_differentiated(kind: str):
    """What its graph has saved was changed by the probe and put back: autograd sees the state that it has saved."""
    assert only(_backward, kind) == (True, 0.0 if kind == "norm" else 2.0)


def _inferred(rank: int, where: str, has_option: bool) -> Any:
    option: Any = {"restore_value": ["y_ptr"]} if has_option else {}
    total, other = autotuned(accumulate_kernel, blocks=(16, 32), **option), autotuned(blocks=(16, 32))
    if not has_option:
        total = triton.jit(accumulate_kernel.fn)

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if has_option:
            launch(total, x, y)
        else:
            total[(4,)](x, y, 64, BLOCK=16)
        return launch(other, y)

    if where == "inside":
        run = torch.inference_mode()(run)
    step: Any = contextual_autotune(**QUICK)(run)
    if where == "around":
        step = torch.inference_mode()(step)
    with torch.inference_mode(mode=where == "arguments"):
        x, y = torch.ones(64), torch.zeros(64)
    got = [step(x, y)[0].item(), y[0].item()]
    step(x, y)
    return [*got, y[0].item(), len(other.cache)]


@pytest.mark.parametrize("where", ["around", "inside", "arguments"])
@pytest.mark.parametrize("has_option", [True, False])
def test_inference_mode_changes_nothing(where: str, has_option: bool):
    """An argument that a kernel adds to holds what one run leaves, whatever is an inference tensor."""
    assert values(on_ranks(1, _inferred, where, has_option, is_dist=False)) == [[2.0, 1.0, 2.0, 1]]
