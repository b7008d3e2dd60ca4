"""``torch.compile`` inside a tuned closure, on a host where Dynamo does not know Triton's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.runtime.autotuner import Autotuner

from dist_tune.testing import values
from tests.cases import further
from tests.ranks.kernels import autotuned, is_unpatched, launch, tuned
from tests.ranks.test_library_wrappers import filed
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


def _compiled_inside(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32))

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return launch(kernel, x) * 2

    inner = torch.compile(doubled, backend="eager")
    step = tuned(None, lambda x: inner(x))
    before = dict(vars(Autotuner.run))
    got = [step(torch.zeros(n))[0].item() for n in (64, 64, 32)]
    return got, len(step.records), is_unpatched(), vars(Autotuner.run) == before


@pytest.mark.parametrize("n_ranks", [1, further(2)])
def test_a_compiled_step_that_launches_kernels(n_ranks: int):
    """Dynamo runs the patched launch as it is, whose constants it cannot read; the kernel is tuned, and Triton is as before."""
    assert values(on_ranks(n_ranks, _compiled_inside)) == [([2.0, 2.0, 2.0], 2, True, True)] * n_ranks


def _own_run_inside(rank: int) -> Any:
    kernel, before = filed(16, 32), dict(vars(type(filed(16)).run))
    inner = torch.compile(lambda x: launch(kernel, x) * 2, backend="eager")
    step = tuned(None, lambda x: inner(x))
    return [step(torch.zeros(64))[0].item() for _ in range(3)], len(step.records), dict(vars(type(kernel).run)) == before


def test_a_compiled_step_that_launches_kernels_of_a_tuner_with_a_run_of_its_own():
    """Dynamo runs that, too, as it is."""
    assert values(on_ranks(2, _own_run_inside)) == [([2.0, 2.0, 2.0], 1, True)] * 2


def _opaque_inside(rank: int, kind: str) -> Any:
    kernel = autotuned(blocks=(16, 32))

    def launched(x: torch.Tensor) -> torch.Tensor:
        return launch(kernel, x)

    if kind == "operator":
        launched.__annotations__ = {"x": torch.Tensor, "return": torch.Tensor}  # as values, which custom_op wants here
        opaque: Any = torch.library.custom_op(f"dist_tune_tests::launched_{rank}", launched, mutates_args=())
        opaque.register_fake(torch.empty_like)
    else:
        opaque = torch.compiler.disable(launched)
    inner = torch.compile(lambda x: opaque(x + 1) * 2, backend="aot_eager", fullgraph=kind == "operator")
    step = tuned(None, lambda x: inner(x))
    got = [step(torch.zeros(64))[0].item() for _ in range(2)]
    return got, len(step.records), len(kernel.cache), is_unpatched()


@pytest.mark.parametrize("kind", ["operator", further("disabled")])
def test_kernels_of_an_operator_in_a_compiled_part_are_tuned(kind: str):
    """A custom operator stays in the one graph, a function that is not to be compiled breaks it; both run in Python."""
    assert values(on_ranks(2, _opaque_inside, kind)) == [([4.0, 4.0], 1, 1, True)] * 2
