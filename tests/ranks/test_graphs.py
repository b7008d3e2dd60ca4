"""Finals by captured replays: a stand-in for CUDA's graphs keeps what a run takes on the device, and leaves out what its host takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import contextual_autotune
from dist_tune.distributed import group as groups
from dist_tune.replays import replays
from dist_tune.testing import ExactTime
from tests.steps import accumulate_kernel, autotuned, configs, launch
from tests.worlds import log, on_each_rank

COMPARED_AS_IT_IS = 'is compared as it is, without objective="graph", because it cannot be captured: '


class Graph:
    """What a run takes on the device, in milliseconds."""

    def __init__(self, run: Callable[[], object], replay: Callable[[], object]) -> None:
        self.ms, self._also = list[float](), replay
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ExactTime, "pass_ms", staticmethod(self.ms.append))
            run()

    def replay(self) -> None:
        ExactTime.pass_ms(sum(self.ms))
        self._also()


@contextmanager
def graphs(
    before: Callable[[int], object] = lambda k: None, replay: Callable[[], object] = lambda: None, obstacle: str = ""
) -> Iterator[list[Graph]]:
    """Graphs can be captured here. ``before``: called before each capture, with those so far. ``replay``: what each does besides."""
    made = list[Graph]()

    def captured(run: Callable[[], object], pool: Any) -> Graph:
        before(len(made))
        made.append(Graph(run, replay))
        return made[-1]

    def obstacle_in(run: Callable[[], object]) -> str:
        run()
        return obstacle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replays, "captured", captured)
        patch.setattr(replays, "graph_pool", lambda: None)
        patch.setattr(replays, "obstacle_in", obstacle_in)
        yield made


def on_the_host(nargs: Any) -> None:
    """30 ms that no graph holds."""
    ExactTime.seconds += 0.03


def on_the_device(nargs: Any) -> None:
    """30 ms of the step beside the kernel."""
    ExactTime.pass_ms(30.0)


def unlike() -> Any:
    """The config of the fastest kernel slows the step down, and that of the next one its host: the third makes the fastest step."""
    return autotuned(configs=[*configs(64, pre_hook=on_the_device), *configs(32, pre_hook=on_the_host), *configs(16, 8)])


def blocks(step: Any) -> list[Any]:
    return [record.best.fields["BLOCK"] for record in step.records]


@on_each_rank(cases=["closure", "kernel", "graph"])
def test_the_graph_decides_if_it_is_asked_for(rank: int, objective: Any) -> Any:
    """Three objectives, three winners; no call waits for another rank in what was captured alone."""
    kernel = unlike()
    step = contextual_autotune(is_dist=True, objective=objective)(lambda x: dist.all_reduce(launch(kernel, x)))
    with graphs() as made:
        step(torch.zeros(64))
    (record,) = step.records
    assert blocks(step) == [{"closure": 16, "kernel": 64, "graph": 32}[objective]]
    assert bool(made) == (objective == "graph")
    if made:
        assert record.reason == "fastest step as a CUDA graph"
        assert (record.best.closure_ms or 9.0) < 1.0
        assert COMPARED_AS_IT_IS not in log()
        assert len(made) <= 3 * 4  # finalists, and not their replays
    return record.winner


@on_each_rank()
def test_two_sites_share_their_graphs(rank: int) -> Any:
    """Both are compared in the same captured replays, each by what its own candidates add."""
    first, second = unlike(), autotuned(configs=[*configs(8, pre_hook=on_the_host), *configs(4)])

    @contextual_autotune(is_dist=True, objective="graph")
    def step(x: torch.Tensor) -> torch.Tensor:
        return launch(second, launch(first, x))

    with graphs():
        step(torch.zeros(64))
    assert blocks(step) == [32, 8]
    return blocks(step)


@on_each_rank()
def test_without_a_cuda_device_the_step_decides_as_it_is(rank: int) -> Any:
    """One line says so; the choice is that of the default."""
    kernel = unlike()
    step = contextual_autotune(is_dist=True, objective="graph")(lambda x: dist.all_reduce(launch(kernel, x)))
    step(torch.zeros(64))
    assert log().count(f"{COMPARED_AS_IT_IS}rank 0: there is no CUDA device") == 1
    assert step.records[0].reason == "fastest step"
    return blocks(step) == [16]


@on_each_rank(cases=["wait", "first", "later", "error"])
def test_no_rank_captures_what_another_one_cannot(rank: int, when: str) -> Any:
    """Rank 1 waits for its device, or fails in a capture: on both ranks the step decides as it is, and one line says why."""

    def before(n_made: int) -> None:
        assert when != "wait", "captured though a rank cannot"
        if rank == 1 and n_made == {"first": 0, "later": 5, "error": -1}[when]:
            raise RuntimeError("not now")

    def failing(nargs: Any) -> None:
        if rank == 1 and type(vars(ExactTime)["pass_ms"]) is staticmethod and when == "error":
            raise RuntimeError("not now")

    kernel = autotuned(configs=[*configs(32, pre_hook=on_the_host), *configs(16, pre_hook=failing), *configs(8, 4)])

    @contextual_autotune(is_dist=True, objective="graph")
    def step(x: torch.Tensor) -> torch.Tensor:
        ExactTime.pass_ms(300.0 if when == "later" else 0.1)  # a long step's finals have batches of few replays
        return launch(kernel, x)

    with graphs(before, obstacle="it waits for the device in step.py:7" * (rank == 1 and when == "wait")):
        step(torch.zeros(64))
    why = "it waits for the device in step.py:7" if when == "wait" else "RuntimeError: not now"
    assert log().count(f"{COMPARED_AS_IT_IS}rank 1: {why}") == 1
    assert blocks(step) == [16]
    assert not any(each.failure for each in step.records[0].candidates)
    return step.records[0].reason


@on_each_rank()
def test_a_replayed_graph_is_undone_and_a_captured_run_is_not(rank: int):
    """Under ``restore_value`` each replay finds what the call found; the capture has changed nothing, and nothing is put back after it."""
    kernel = autotuned(accumulate_kernel, configs=configs(16, 32, pre_hook=on_the_host), restore_value=["y_ptr"])
    x, y, found = torch.full((64,), 2.0), torch.ones(64), list[float]()
    step = contextual_autotune(is_dist=True, objective="graph")(lambda x, y: launch(kernel, x, y).sum())

    def replay() -> None:
        found.append(y[0].item())
        y.add_(x)

    class Undone(Graph):
        def __init__(self, *given: Any) -> None:
            before = y.clone()
            super().__init__(*given)
            assert y[0] == 3.0
            y.copy_(before)

    with graphs(replay=replay), pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.Graph", Undone)
        step(x, y)
    assert {*found} == {1.0}
    assert y[0] == 3.0


@on_each_rank()
def test_collectives_of_a_capture_do_not_count(rank: int) -> Any:
    """One rank has captured a collective and the other none: they meet in the next call all the same."""
    n_captured, n_issued = [0], groups._n_issued

    def before(n_made: int) -> None:
        if rank == 1:
            raise RuntimeError("not now")
        n_captured[0] += 1

    kernel = autotuned(configs=configs(32, 16, 8))

    @contextual_autotune(is_dist=True, objective="graph")
    def step(x: torch.Tensor) -> None:
        launch(kernel, x)
        if type(vars(ExactTime)["pass_ms"]) is not staticmethod:  # gloo's cannot be captured
            dist.all_reduce(torch.ones(1))

    with graphs(before), pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "_n_issued", lambda group: n_issued(group) + n_captured[0])
        step(torch.zeros(64))
        assert (n_captured[0] > 0) == (rank == 0)
        step(torch.zeros(128))
    assert "goes on with the configs it has" not in log()
    return len(step.records)


@on_each_rank()
def test_a_step_tuned_in_its_calls_says_that_none_is_captured(rank: int) -> Any:
    """Calls that count are not captured: one line, and the choice of the default."""
    kernel, total, done = autotuned(configs=configs(16, 64)), torch.zeros(64), torch.zeros(1)

    @contextual_autotune(is_dist=True, objective="graph", max_slowdown=1.0)
    def step(x: torch.Tensor) -> None:
        total.add_(launch(kernel, x))

    with graphs() as made:
        for _ in range(2000):
            step(torch.zeros(64))
            time.sleep(1e-3)
            dist.all_reduce(done.fill_(len(step.records)), dist.ReduceOp.MIN)
            if done:
                break
    assert (blocks(step), made) == ([64], [])
    return log().count(f"{COMPARED_AS_IT_IS}rank 0: its replays are calls that count")


@pytest.mark.parametrize("search", ["exhaustive", "online"])
def test_a_search_without_finals_has_no_graphs(search: Any):
    """Refused where it is written."""
    with pytest.raises(
        ValueError, match=rf'objective="graph" compares finalists by captured replays of the step: search={search!r} has none'
    ):
        contextual_autotune(search=search, objective="graph")
