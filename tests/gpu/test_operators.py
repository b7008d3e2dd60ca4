"""A tuned launcher as an operator of graphs that Inductor records as CUDA graphs, or the user.

Needs a GPU.

python -m pytest -m gpu tests/gpu/test_operators.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from dist_tune import as_operator, contextual_autotune, tune_all
from tests.steps import autotuned, launch

pytestmark = pytest.mark.gpu
SIZES = (1 << 20, 1 << 21)


@pytest.mark.parametrize("ahead", [True, False])
def test_cuda_graphs_of_an_operator(ahead: bool):
    """Tuned ahead, or in the run that Inductor makes before it records; a graph that is replayed
    does not enter Python.
    """
    kernel, runs = autotuned(blocks=(64, 1024, 4096)), list[int]()

    @contextual_autotune(cache=False)
    def launcher(x: torch.Tensor) -> torch.Tensor:
        runs.append(len(x))
        return launch(kernel, x)

    operator: Any = as_operator(
        launcher, name=f"dist_tune_gpu_tests::recorded_{ahead}", fake=lambda x: torch.empty_like(x)
    )
    torch._dynamo.reset()
    counters.clear()

    @torch.compile(fullgraph=True, mode="reduce-overhead", dynamic=False)
    def compiled(x: torch.Tensor) -> Any:
        return operator(x * 2) + 1

    def check(n: int) -> int:
        """Equal results in each run, of inputs that change; how often the launcher has run so
        far.
        """
        for k in range(5):
            x = torch.full((n,), float(k), device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(x), x * 2 + 2)
        return len(runs)

    if ahead:
        tune_all(operator, [torch.zeros(n, device="cuda") for n in SIZES])
    for n in SIZES:
        assert check(n) == check(n)
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert len(operator.records) == 2
    x, graph = torch.zeros(SIZES[0], device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # of one's own: nothing is missed
        y = operator(x)
    x.fill_(6.0)
    graph.replay()
    assert torch.equal(y, x + 1)
