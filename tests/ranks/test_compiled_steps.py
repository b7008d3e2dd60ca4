"""``torch.compile`` inside a tuned closure, on a host where Dynamo does not know Triton's kernels."""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime.autotuner import Autotuner

from tests.ranks.test_library_kernels import Filed, made
from tests.steps import autotuned, is_unpatched, launch, tuned
from tests.worlds import further, on_each_rank


@on_each_rank(cases=[Autotuner, Filed])
def test_a_compiled_step_that_launches_kernels(rank: int, kind: Any):
    """Dynamo runs the patched launch as it is, whose constants it cannot read; the kernel is tuned, and Triton is as before."""
    kernel = made(kind)
    inner = torch.compile(lambda x: launch(kernel, x) * 2, backend="eager")
    step = tuned(None, lambda x: inner(x))
    before = dict(vars(kind.run))
    assert [step(torch.zeros(n))[0].item() for n in (64, 64, 32)] == [2.0] * 3
    assert (len(step.records), is_unpatched(), vars(kind.run) == before) == (2, True, True)


@on_each_rank(cases=["operator", further("disabled")])
def test_kernels_of_an_operator_in_a_compiled_part_are_tuned(rank: int, case: str):
    """A custom operator stays in the one graph, a function that is not to be compiled breaks it; both run in Python."""
    kernel = autotuned(blocks=(16, 32))

    def launched(x: torch.Tensor) -> torch.Tensor:
        return launch(kernel, x)

    if case == "operator":
        launched.__annotations__ = {"x": torch.Tensor, "return": torch.Tensor}  # as values, which custom_op wants here
        opaque: Any = torch.library.custom_op(f"dist_tune_tests::launched_{rank}", launched, mutates_args=())
        opaque.register_fake(torch.empty_like)
    else:
        opaque = torch.compiler.disable(launched)
    inner = torch.compile(lambda x: opaque(x + 1) * 2, backend="aot_eager", fullgraph=case == "operator")
    step = tuned(None, lambda x: inner(x))
    assert [step(torch.zeros(64))[0].item() for _ in range(2)] == [4.0, 4.0]
    assert (len(step.records), len(kernel.cache), is_unpatched()) == (1, 1, True)
