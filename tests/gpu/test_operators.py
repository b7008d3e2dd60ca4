"""A tuned launcher as an operator of graphs that Inductor compiles and records as CUDA graphs. Needs a GPU.

python -m pytest -m gpu tests/gpu/test_operators.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from dist_tune import as_operator, contextual_autotune, tune_all
from tests.steps import autotuned, best, launch

pytestmark = pytest.mark.gpu
N = 1 << 20


class Made:
    """A kernel whose launches are an operator, and a function around it that Inductor compiles in one graph."""

    def __init__(self, name: str, **options: Any) -> None:
        self.kernel, self.n_runs = autotuned(blocks=(64, 1024, 4096)), 0

        @contextual_autotune(cache=False)
        def launcher(x: torch.Tensor) -> torch.Tensor:
            self.n_runs += 1
            return launch(self.kernel, x)

        self.operator: Any = as_operator(launcher, name=f"dist_tune_gpu_tests::{name}", fake=lambda x: torch.empty_like(x))
        torch._dynamo.reset()
        counters.clear()
        self.compiled = torch.compile(lambda x: self.operator(x * 2) + 1, fullgraph=True, **options)

    def check(self, n: int, runs: int = 5) -> None:
        """Equal results in each run, of inputs that change."""
        for k in range(runs):
            x = torch.full((n,), float(k), device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(self.compiled(x), x * 2 + 2)


def test_inductor_leaves_it_whole():
    """One graph for all sizes, in which the operator is tuned once for each."""
    made = Made("plain", dynamic=True)
    for n in (N, 2 * N, N):
        made.check(n)
    assert counters["stats"]["unique_graphs"] == 1
    assert [each.key.partition(",")[0] for each in made.operator.records] == [f"[{N}", f"[{2 * N}"]
    assert len(best(made.kernel)) == 2


@pytest.mark.parametrize("ahead", [True, False])
def test_cuda_graphs_of_inductor(ahead: bool):
    """Tuned ahead, or in the run that Inductor makes before it records; a graph that is replayed does not enter Python."""
    made = Made(f"recorded_{ahead}", mode="reduce-overhead", dynamic=False)
    if ahead:
        tune_all(made.operator, [torch.zeros(n, device="cuda") for n in (N, 2 * N)])
    for n in (N, 2 * N):
        made.check(n)
        n_runs = made.n_runs
        made.check(n)
        assert made.n_runs == n_runs
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert len(made.operator.records) == 2


def test_a_graph_of_ones_own_after_tune_all():
    """Nothing is missed under capture."""
    made = Made("captured")
    tune_all(made.operator, [torch.zeros(N, device="cuda")])
    x, graph = torch.zeros(N, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = made.operator(x)
    x.fill_(6.0)
    graph.replay()
    assert torch.equal(y, x + 1)
