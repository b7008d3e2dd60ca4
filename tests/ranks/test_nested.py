"""Who calls a tuned step, and how: steps within steps, threads, methods, captures, other packages;
and what a tuning leaves behind.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import (
    CaptureError,
    DistTuneError,
    NestedTuningError,
    NoValidConfigError,
    autotune,
    contextual_autotune,
)
from dist_tune.launches.kernel import tuning_key
from tests.programs import run_python
from tests.steps import (
    BLOCKS,
    FACES,
    QUICK,
    Face,
    Step,
    autotuned,
    best,
    is_unpatched,
    launch,
    threads_left,
    tuned,
)
from tests.worlds import ROOT, log, on_each_rank


@on_each_rank()
def test_a_nested_closure_is_tuned_by_the_outer_one(rank: int):
    """The inner closure joins the outer tuning; inside one that does not ask its ranks it is
    refused.
    """
    outer_kernel, inner_kernel = autotuned(blocks=(16, 32)), autotuned(blocks=(32, 64))
    inner = tuned(inner_kernel, group=dist.new_group([0, 1]))
    outer = tuned(outer_kernel, lambda x: inner(launch(outer_kernel, x)))
    assert [outer(torch.zeros(64))[0].item() for _ in range(2)] == [2.0, 2.0]
    assert (len(inner.records), len(outer.records)) == (0, 2)
    with pytest.raises(NestedTuningError, match=r"ranks \[0, 1\]"):
        tuned(None, lambda x: inner(x), is_dist=False)(torch.zeros(64))
    return best(outer_kernel), best(inner_kernel)


class Shaped:
    shape, dtype = [1, 2], "float"  # unhashable, as some libraries have it


@on_each_rank()
def test_any_arguments_will_do(rank: int):
    """Unhashable ones, None, keywords; without a warning that shapes changed, a miss itself starts
    the next tuning.
    """
    kernel, n = autotuned(blocks=(16, 32)), 64
    step = tuned(None, lambda *args, **kwargs: launch(kernel, torch.zeros(n))[0].item())
    assert [
        step(Shaped()),
        step([1], {2: 3}),
        step(torch.zeros(1), None, flag=True),
        step(Shaped()),
    ] == [1.0] * 4
    n = 128
    assert (step(Shaped()), len(step.records)) == (1.0, 2)
    return best(kernel)


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.kernel = torch.nn.Parameter(torch.ones(())), autotuned(blocks=(16, 32))
        self.forward = contextual_autotune(is_dist=True, n_repeat=1, n_warmup=0)(self.forward)  # type: ignore[method-assign]  # as users do

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return launch(self.kernel, x) * self.scale.detach()

    @contextual_autotune(is_dist=True, n_repeat=1, n_warmup=0)
    def method(self, x: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        """Adds one."""
        y = launch(self.kernel, x)
        return launch(self.kernel, y) if twice else y


@on_each_rank()
def test_an_averaged_model_whose_method_was_decorated_computes_with_its_own_parameters(rank: int):
    """It shares the records, so that a size which the copy meets first is known to the original as
    well; replays see its state.
    """
    model: Any = Scaled()
    averaged: Any = torch.optim.swa_utils.AveragedModel(
        model, avg_fn=lambda mean, new, n: new + 4.0
    )
    averaged.module.kernel = model.kernel
    for _ in range(2):
        averaged.update_parameters(model)
    values = [
        each(torch.zeros(n)).unique().tolist()
        for n in (64, 128)
        for each in (model, averaged, model)
    ]
    assert values == [[1.0], [5.0], [1.0]] * 2
    assert len(model.forward.records) == len(averaged.module.forward.records) == 2
    # A method that the class decorates is bound as any other.
    assert model.method(torch.zeros(256), twice=True)[0] == 2.0
    assert (Scaled.method.__name__, Scaled.method.__doc__) == ("method", "Adds one.")
    return best(model.kernel)


@on_each_rank()
def test_graph_capture_uses_known_winners_and_tunes_nothing(rank: int):
    """Under capture a known key runs, also at new shapes of other arguments; an unknown one is a
    clear error, also in the first call.
    """
    kernel, other, captures = autotuned(blocks=(16, 32)), autotuned(blocks=(16, 32)), [True]
    step = tuned(kernel, lambda x: launch(kernel, torch.zeros(64 if x.numel() < 128 else 128)))

    def closure() -> None:
        captures[0] = True
        try:
            launch(other, torch.zeros(64))
        finally:
            captures[0] = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures[0])
        with pytest.raises(CaptureError, match="captured"):
            step(torch.zeros(64))
        captures[0] = False
        step(torch.zeros(64))
        captures[0], before = True, log()
        assert [step(torch.zeros(n))[0] for n in (64, 65)] == [1.0, 1.0]
        assert log() == before
        with pytest.raises(CaptureError, match="before the capture"):
            step(torch.zeros(128))
        captures[0] = False
        with pytest.raises(CaptureError, match="before the capture"):
            tuned(other, closure)()
    assert (len(kernel.cache), len(other.cache), is_unpatched()) == (1, 0, True)


@on_each_rank(cases=FACES)
def test_a_tuning_leaves_neither_tensors_nor_threads(rank: int, face: Face):
    """Neither arguments nor results, which on a GPU would be activations; one thread, which answers
    peers.
    """
    step, x = Step(face, (16, 32)), torch.zeros(64)
    alive = weakref.ref(x)
    y = step(x)
    output = weakref.ref(y)
    del x, y
    gc.collect()
    assert (alive(), output(), threads_left()) == (None, None, [])
    assert {each.name for each in threading.enumerate() if each is not threading.main_thread()} == {
        "dist_tune presence"
    }


@on_each_rank()
def test_a_mistake_in_the_launch_is_the_cause_of_the_error(rank: int):
    """The last exception is chained, with its traceback."""
    kernel, x = autotuned(blocks=(16, 32)), torch.zeros(64)
    with pytest.raises(NoValidConfigError, match="y_ptr") as error:
        tuned(kernel, lambda: kernel[(4,)](x, n=64), is_dist=False)()
    assert type(error.value.__cause__).__name__ in ("TypeError", "KeyError", "InterpreterError")


@on_each_rank(is_dist=False)
def test_ranks_that_tune_alone_have_their_own_logs(rank: int):
    """``rank-<i>.log`` is the log of rank i, also without a process group; with ``is_dist`` that is
    an error which says what to call.
    """
    kernel = autotuned(blocks=(16, 32))
    # The quicker one's record would do for the other.
    tuned(kernel, is_dist=False, cache=False)(torch.zeros(64))
    assert ", tuned in " in log()
    with pytest.raises(DistTuneError, match=r"call init_process_group\(\)"):
        tuned(kernel)(torch.zeros(64))


# -- threads ---------------------------------------------------------------------------------------


def in_threads(n: int, work: Callable[[int], Any]) -> list[Any]:
    """Values, or errors, of a function called in threads that begin together."""
    ready, got = threading.Barrier(n), [None] * n

    def one(i: int) -> None:
        ready.wait()
        try:
            got[i] = work(i)
        except Exception as error:  # noqa: BLE001  # the test shall see it
            got[i] = repr(error)  # type: ignore[call-overload]

    threads = [threading.Thread(target=one, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


def lasting(seconds: float, ran: list[int]) -> Any:
    """A function of two configs that returns its argument after that time; threads that ran it."""

    @autotune(BLOCKS[:2], lambda x: None, **QUICK)
    def function(x: int, block: int) -> int:
        ran.append(threading.get_ident())
        time.sleep(seconds)
        return x

    return function


@on_each_rank()
def test_threads_tune_a_new_function_once(rank: int):
    """On both ranks, of which each has threads of its own: each gets its own value."""
    ran = list[int]()
    step = lasting(0.0, ran)
    assert in_threads(3, step) == [0, 1, 2]
    assert (len(step.records), len(set(ran)), is_unpatched()) == (1, 3, True)


@on_each_rank(1, is_dist=False, cases=[1, 4])
def test_threads_wait_for_a_tuning_that_makes_progress(rank: int, n: int):
    """Of one step, which one of them tunes, and of others, before which some are tuned: for longer
    than the deadline.
    """
    os.environ["DIST_TUNE_DEADLINE_S"] = "2"
    ran = list[int]()
    functions = [lasting(0.5 / n**0.5, ran) for _ in range(n)]
    steps = [
        tuned(None, lambda number, each=each: each(number), is_dist=False, cache=False)
        for each in functions
    ]
    assert in_threads(4, lambda i: steps[i % n](i)) == [*range(4)]
    assert [len(each.records) for each in steps] == [1] * n
    assert sum(ran.count(each) > 1 for each in set(ran)) == n


@on_each_rank(1, is_dist=False)
def test_a_thread_that_the_first_run_waits_for_goes_on(rank: int):
    """After the deadline without progress it takes no turn."""
    os.environ["DIST_TUNE_DEADLINE_S"] = "0.5"
    kernel, inner = autotuned(blocks=(16, 32)), list[Any]()

    def closure(x: torch.Tensor) -> float:
        if threading.current_thread() is threading.main_thread() and not inner:
            inner.extend(in_threads(1, lambda _: step(x)))
        return launch(kernel, x)[0].item()

    step = tuned(kernel, closure, is_dist=False, cache=False)
    assert (step(torch.zeros(64)), inner) == (1.0, [1.0])


@on_each_rank(1, is_dist=False)
def test_a_miss_is_its_own_thread_s(rank: int):
    """Another thread is inside the same closure meanwhile, in a call without a miss: its value is
    the call's, and it tunes nothing.
    """
    kernel, is_inside, may_end = autotuned(blocks=(16, 32)), threading.Event(), threading.Event()

    def closure(x: torch.Tensor) -> float:
        if threading.current_thread() is threading.main_thread():
            return launch(kernel, x)[0].item()
        is_inside.set()
        assert may_end.wait(60)
        return 7.0

    step = tuned(kernel, closure, is_dist=False, cache=False)
    step(torch.zeros(64))
    kernel.cache.clear()
    found: list[Any] = []
    other = threading.Thread(
        target=lambda: found.extend(in_threads(1, lambda _: step(torch.zeros(64))))
    )
    other.start()
    assert is_inside.wait(60)
    assert step(torch.zeros(64)) == 1.0
    may_end.set()
    other.join()
    assert (found, len(step.records), is_unpatched()) == ([7.0], 2, True)


@on_each_rank()
def test_other_threads_are_left_to_triton(rank: int):
    """A kernel launched by another thread while a closure is tuned is tuned by Triton's own
    benchmark.
    """
    kernel, other = (
        autotuned(blocks=(16, 32)),
        autotuned(blocks=(16, 32), do_bench=lambda call, quantiles: (call(), [1.0] * 3)[1]),
    )
    beside: list[Any] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        beside.extend([] if beside else in_threads(1, lambda _: launch(other, torch.zeros(64))))
        return launch(kernel, x)

    call = tuned(kernel, step, is_dist=False)
    call(torch.zeros(64))
    assert (
        beside[0][0],
        len(best(kernel)),
        len(best(other)),
        len(other.configs_timings),
        len(call.records),
    ) == (1.0, 1, 1, 2, 1)


# -- other packages and Triton ---------------------------------------------------------------------

WRAPPED = """
import functools, sys, torch, triton, triton.language as tl
from triton.runtime.autotuner import Autotuner
calls, original = [], Autotuner.run
@functools.wraps(original)
def wrapper(self, *args, **kwargs):
    calls.append(1)
    return original(self, *args, **kwargs)
Autotuner.run = wrapper
code = original.__code__
from dist_tune import contextual_autotune
from tests.steps import autotuned, launch
assert original.__code__ is code, "importing changes nothing"
many, one = autotuned(blocks=(16, 32)), autotuned(blocks=(16,))
step = contextual_autotune(n_repeat=1)(lambda x: launch(one, launch(many, x)))
assert step(torch.zeros(64))[0] == 2 and len(many.cache) == 1 and len(step.records) == 1
before = len(calls)
step(torch.zeros(64))
assert len(calls) == before + 2, "the other package's wrapper is called as before"
assert Autotuner.run is wrapper and original.__code__ is code
print("fine")
"""
ENDS = """
import gc, weakref, torch, torch.distributed as dist
from tests.steps import autotuned, launch, tuned
gc.disable()  # a collection may come too late as well
dist.init_process_group("gloo")
held = weakref.ref(dist.group.WORLD)
tuned(autotuned(), cache=False)(torch.arange(64.0))
dist.destroy_process_group()
print("fine" if held() is None else "held")
"""


@pytest.mark.parametrize(("program", "n_ranks"), [(WRAPPED, 0), (ENDS, 2)], ids=["wrapped", "ends"])
def test_a_program_finds_what_is_its_own_as_it_was(tmp_path: Path, program: str, n_ranks: int):
    """Another package's wrapper around the autotuner is called for every launch; nothing holds a
    process group that was destroyed.

    Threads of gloo's have aborted programs that had done all their work: they asked for an
    interpreter that was gone.
    """
    env = {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(ROOT),
        "DIST_TUNE_LOG_DIR": str(tmp_path),
        "DIST_TUNE_VERBOSITY": "quiet",
    }
    (tmp_path / "program.py").write_text(program)
    done = run_python(tmp_path / "program.py", cwd=tmp_path, env=os.environ | env, n_ranks=n_ranks)
    assert (done.returncode, done.stdout.count("fine")) == (0, max(1, n_ranks)), (
        done.stdout + done.stderr
    )


def test_kernels_of_several_triton_versions_are_heard_the_same_way():
    """The copy of the tuning key agrees with the one Autotuner.run looks up."""

    class Spy(dict[Any, Any]):
        def __contains__(self, key: object) -> bool:
            raise KeyError(key)

    kernel = autotuned(key=("n", "x_ptr"))
    kernel.cache = Spy()
    x = torch.zeros(4)
    for args, kwargs in (((x, x, 4), {}), ((x,), {"y_ptr": x.half(), "n": 4})):
        with pytest.raises(KeyError) as looked_up:
            kernel.run(*args, grid=(1,), warmup=False, **kwargs)
        assert looked_up.value.args[0] == tuning_key(
            kernel, args, {**kwargs, "grid": (1,), "warmup": False}
        )
