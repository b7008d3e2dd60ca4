"""Launches that are recorded, and those that are predicted from them: compiled ahead, or dropped on all ranks."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from dist_tune import autotune
from dist_tune.compiler.patches import replaced
from dist_tune.runtime.recording import LaunchRecorder, PredictedFailure, PredictedFailureError, RecordedLaunch, precompiles
from dist_tune.testing import FakeH200, on_ranks, values
from tests.foresight_programs import act_kernel, copy_kernel, record, tiles, twice, x_and_y

pytestmark = pytest.mark.processes

QUICK: Any = {"n_warmup": 0, "n_repeat": 1, "cache": False}


@triton.jit
def dot_kernel(x_ptr, y_ptr, n: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    t = tl.load(x_ptr + at[:, None] * n + at[None, :])
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(4):
        acc = tl.dot(tl.load(x_ptr + k * BLOCK + at[:, None] * n + at[None, :]), t, acc)
    tl.store(y_ptr + at[:, None] * n + at[None, :], acc)


def _limits() -> Any:
    def many(x: torch.Tensor, config: triton.Config) -> None:
        for n in range(50):
            copy_kernel[(1,)](x, x, n, **config.kwargs)
        dot_kernel[(1,)](x, x, 16, **config.kwargs)

    x = torch.zeros(256)
    site, recorder = record(many, tiles(16, 32), 0, x)
    kernels = [each.kernel.fn.__name__ for each in recorder.launches]
    alive = weakref.ref(x)
    del x
    gc.collect()
    return kernels, [each.label for each in precompiles(site.label, site.configs, recorder.launches)], alive() is None


def _restored() -> Any:
    own, heard = vars(JITFunction)["run"], []
    x, y = x_and_y()
    recorder = LaunchRecorder()

    def launch() -> None:
        copy_kernel[(1,)](x, y, 256, BLOCK=16)

    def fail() -> None:
        with recorder.recording():
            launch()  # outside the function
            with recorder.running("f[]", 0):
                thread = threading.Thread(target=launch)
                thread.start()
                thread.join()
                copy_kernel.warmup(x, y, 256, BLOCK=16, grid=(1,))
                heard.append(len(recorder.launches))
                launch()
                raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    launch()
    return heard, len(recorder.launches), vars(JITFunction)["run"] is own


def _in_place_of_a_launch() -> Any:
    """The launches that end as predicted, though they are not the one that was recorded."""
    x, y = x_and_y()
    site, recorder = record(lambda x, y, config: copy_kernel[(1,)](x, y, 256, **config.kwargs), tiles(16, 32), 0, x, y)
    (ahead,) = precompiles(site.label, site.configs, recorder.launches)
    failure = PredictedFailure(copy_kernel, ahead.configs[1].given, "rank 1: OutOfResources: out of resource: x")
    recorder.failures = {("f[]", 1): [failure]}
    ended: dict[str, str] = {}

    def attempt(name: str, candidate: int, launch: Any) -> None:
        with (
            replaced(JITFunction, "run", lambda run: lambda *args, **kwargs: None),
            recorder.recording(),
            recorder.running(site.label, candidate),
        ):
            try:
                launch()
                ended[name] = ""
            except PredictedFailureError as error:
                ended[name] = f"{isinstance(error, triton.OutOfResources)} {error}"

    attempt("the same", 1, lambda: copy_kernel[(1,)](x, y, 256, BLOCK=32))
    attempt("another size", 1, lambda: copy_kernel[(1,)](x, y, 100, BLOCK=32))
    attempt("another candidate", 0, lambda: copy_kernel[(1,)](x, y, 256, BLOCK=32))
    attempt("another constant", 1, lambda: copy_kernel[(1,)](x, y, 256, BLOCK=16))
    attempt("another option", 1, lambda: copy_kernel[(1,)](x, y, 256, BLOCK=32, num_warps=2))
    attempt("another dtype", 1, lambda: copy_kernel[(1,)](y, y, 256, BLOCK=32))
    attempt("another kernel", 1, lambda: act_kernel[(1,)](x, twice, 32))
    return ended


def _tuned() -> Any:
    """Whole tunings: compilations that a launch had to wait for, and what was dropped."""
    waited: list[str] = []
    triton.knobs.runtime.jit_cache_hook = lambda **facts: None if facts["is_manual_warmup"] else waited.append(facts["repr"])
    x = torch.ones(128, 128, dtype=torch.float16)

    def tune(function: Any, space: Any) -> Any:
        waited.clear()
        tuned = autotune(space, None, **QUICK)(function)
        tuned(x)
        return (
            len(waited),
            [each.failure for each in tuned.records[0].candidates],
            [each.shared_bytes for each in tuned.records[0].candidates],
        )

    def plain(x: torch.Tensor, config: triton.Config) -> None:
        dot_kernel[(1,)](x, x, 128, BLOCK=16, num_warps=1, num_stages=config.num_stages)

    def clamped(x: torch.Tensor, config: triton.Config) -> None:
        dot_kernel[(1,)](x, x, 128, BLOCK=16, num_warps=1, num_stages=min(config.num_stages, 3))

    def unrelated(x: torch.Tensor, config: triton.Config) -> None:
        dot_kernel[(1,)](x, x, 128, BLOCK=16, num_warps=1, num_stages=2)

    stages = [{"config": triton.Config({}, num_stages=n)} for n in (2, 3, 12)]
    return tune(plain, stages), tune(clamped, stages), tune(unrelated, stages)


def _scenarios(rank: int) -> dict[str, Any]:
    FakeH200.shared_limit_bytes = 4_000  # before Triton asks, once for all
    return {each.__name__: each() for each in (_limits, _restored, _in_place_of_a_launch, _tuned)}


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """One process with the fake driver for all."""
    (value,) = values(on_ranks(1, _scenarios, mode="fake", is_dist=False, env={"DIST_TUNE_DEADLINE_S": "30"}))
    return dict(value)


def test_a_kernel_that_is_launched_often_hides_no_other(answers: dict[str, Any]):
    """Two launches of each kernel count; and no tensor is kept alive by the recorded launches."""
    kernels, labels, is_free = answers["_limits"]
    assert kernels == ["copy_kernel", "copy_kernel", "dot_kernel"]
    assert labels == ["f[] > 0.copy_kernel", "f[] > 1.copy_kernel", "f[] > 2.dot_kernel"]
    assert is_free


def test_triton_is_restored(answers: dict[str, Any]):
    """Also after an exception. Launches outside the function, on other threads, and warm-ups are not heard."""
    heard, n_launches, is_own = answers["_restored"]
    assert (heard, n_launches, is_own) == ([0], 1, True)


def test_only_the_launch_that_was_predicted_ends_as_predicted(answers: dict[str, Any]):
    """Whatever its sizes; not one with other constants, options, dtypes, of another candidate or kernel."""
    ended = answers["_in_place_of_a_launch"]
    reason = "True rank 1: OutOfResources: out of resource: x"
    assert {name: text for name, text in ended.items() if text} == {"the same": reason, "another size": reason}


def test_a_tuning_compiles_ahead_and_believes_launches_rather_than_predictions(answers: dict[str, Any]):
    """One launch waits for a compilation; what does not fit is dropped; a config that the function tames, or does not use, is not."""
    (n_waited, failures, shared_bytes), clamped, unrelated = answers["_tuned"]
    assert n_waited == 1
    assert failures[:2] == [None, None]
    assert "OutOfResources: out of resource: shared memory" in failures[2]
    assert all(shared_bytes)
    assert clamped[1] == unrelated[1] == [None] * 3


def test_a_launch_reads_as_its_arguments_by_name():
    """By position and by keyword, with what is no argument of the kernel."""
    assert RecordedLaunch("f[]", 0, copy_kernel, (1, 2), {"BLOCK": 16, "num_warps": 2}).given == {
        "x_ptr": 1,
        "y_ptr": 2,
        "BLOCK": 16,
        "num_warps": 2,
    }


def _interpreted(rank: int) -> Any:
    site, recorder = record(lambda x, block: None, [{"block": 1}], 0, torch.zeros(1))
    with recorder.recording(), recorder.running(site.label, 0):
        x = torch.zeros(64)
        copy_kernel[(1,)](x, x, 64, BLOCK=16)
    return type(copy_kernel).__name__, recorder.launches


def test_under_the_interpreter_there_is_nothing_to_predict():
    """Its kernels are of another class."""
    assert values(on_ranks(1, _interpreted, is_dist=False)) == [("InterpretedFunction", [])]


def _out_of_resources(rank: int) -> Any:
    FakeH200.shared_limit_bytes = 4_000 if rank == 1 else 232_448
    space = [{"gemm_config": triton.Config({"BLOCK": 16}, num_warps=1, num_stages=stages)} for stages in (2, 3, 12)]

    @autotune(space, None, n_warmup=0, n_repeat=1)
    def step(x: torch.Tensor, gemm_config: triton.Config) -> torch.Tensor:
        y = torch.ones(128, 128)
        dist.all_reduce(y[0])  # behind it a rank that cannot launch would be alone
        dot_kernel[(1,)](x, y, 128, **gemm_config.all_kwargs())
        dist.all_reduce(y[0])
        return y

    step(torch.ones(128, 128, dtype=torch.float16))
    record = step.records[0]
    return record.best.config, [each.failure for each in record.candidates], record.candidates[2].shared_bytes


@pytest.mark.once
def test_shared_memory_that_one_rank_lacks_drops_the_config_on_all():
    """It is predicted, so that no rank launches what another one cannot, though there are collectives before and behind."""
    got = values(on_ranks(2, _out_of_resources, mode="fake", env={"DIST_TUNE_DEADLINE_S": "20"}))
    assert got[0][:2] == got[1][:2]
    config, failures, _ = got[0]
    assert "num_stages=12" not in config
    assert failures[:2] == [None, None]
    assert "rank 1: OutOfResources: out of resource: shared memory" in failures[2]
