"""The ways to tune a step of a row-parallel product, side by side.

function: `autotune` chooses the exchange, and with it, in the same tuning, the product's config; staged: `contextual_autotune` tunes the
product once for each way to send its tiles, then `autotune` the exchange; contextual: the product alone, with the exchange of an untuned
step. Knows steps as contexts and functions; knows nothing of how they work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import triton

from dist_tune import TuningRecord, autotune, contextual_autotune
from kernels import push_gemm
from kernels.row_parallel import RowParallelGemm

Shape = tuple[int, ...]
TUNERS = ("function", "staged", "contextual")


@dataclass(frozen=True, slots=True)
class Step:
    """What a command line needs to know of a step."""

    description: str
    context: type[RowParallelGemm]
    module: ModuleType
    """The file of the step."""
    is_scattered: bool
    """Whether a rank has its rows of the result alone."""
    checked: list[dict[str, Any]]
    """Exchanges that between them take every path, as arguments of the step."""
    perf_shapes: tuple[Shape, ...]
    contenders: Callable[[torch.Tensor, torch.Tensor], dict[str, Callable[[], object]]]
    sent_bytes: Callable[[int, int, int, int], int]

    @property
    def function(self) -> Any:
        """The tuned function, which has its module's name; `function.__wrapped__` is the plain one."""
        return getattr(self.module, self.module.__name__.rpartition(".")[2])

    def rows(self, m: int) -> int:
        """Rows of the result on a rank."""
        return m // dist.get_world_size() if self.is_scattered else m


def tune_products(step: Step, context: Any, a: torch.Tensor, b: torch.Tensor, *, uses_cache: bool = True) -> list[TuningRecord]:
    """Tune the product once for each way to send its tiles, inside the step with the first exchange of that way; the records."""
    ways: dict[Any, dict[str, Any]] = {}
    for choices in step.module.config_space():
        exchange, algorithm = choices["exchange"], choices.get("algorithm")
        if algorithm is None or step.module.prune_fn(choices, a):
            ways.setdefault((algorithm, exchange.reduction == "inside", exchange.move), choices)
    records = []
    for choices in ways.values():
        tuned = contextual_autotune(is_dist=True, n_warmup=3, n_repeat=5, cache=uses_cache)(lambda a, b, k=choices: context(a, b, **k))
        tuned(a, b)
        records += tuned.records
    return records


def tuned_step(step: Step, tuner: str, context: Any, *, uses_cache: bool = True) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """The step as one of `TUNERS` tunes it: a function with `records`. Without the cache, nothing that was found before is used."""
    if not uses_cache:
        push_gemm.push_gemm_kernel.cache.clear()
    if tuner == "contextual":

        @contextual_autotune(is_dist=True, n_warmup=3, n_repeat=5, cache=uses_cache)
        def product_tuned(a: torch.Tensor, b: torch.Tensor) -> Any:
            return context(a, b)

        return product_tuned
    function, module = step.function, step.module
    if not uses_cache:
        function = autotune(module.config_space(), module.key_fn, getattr(module, "prune_fn", None), n_warmup=3, n_repeat=5, cache=False)(
            function.__wrapped__
        )
    staged: dict[Any, list[TuningRecord]] = {}

    def run(a: torch.Tensor, b: torch.Tensor) -> Any:
        shapes = (a.shape, b.shape)
        if tuner == "staged" and shapes not in staged:
            staged[shapes] = tune_products(step, context, a, b, uses_cache=uses_cache)
            run.records += staged[shapes]  # type: ignore[attr-defined]
        n_before = len(function.records)
        c = function(a, b, context)
        run.records += function.records[n_before:]  # type: ignore[attr-defined]
        return c

    run.records = []  # type: ignore[attr-defined]
    return run


def chosen_by(step: Step, tuner: str, a: torch.Tensor, b: torch.Tensor) -> tuple[dict[str, Any], triton.Config, Any]:
    """The exchange and the product's config that a tuner chooses on its own, and the object that it was tuned with. Collective."""
    context = step.context()
    run = tuned_step(step, tuner, context, uses_cache=False)
    run(a, b)
    run(a, b)  # with the winners, so that the last config and exchange are theirs
    assert context.last is not None
    plan, exchange = context.last
    algorithm = {} if step.is_scattered else {"algorithm": "two_shot" if plan.n_parts > 1 else "one_shot"}
    return {**algorithm, "exchange": exchange}, push_gemm.push_gemm_kernel.best_config, context


def tuned_alone(step: Step, a: torch.Tensor, b: torch.Tensor) -> triton.Config:
    """The product's config as it is chosen without any exchange: on a group of one rank, whose result is its own partial result."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    context: Any = step.context(groups[dist.get_rank()])
    push_gemm.push_gemm_kernel.cache.clear()
    contextual_autotune(is_dist=True, n_warmup=3, n_repeat=5, cache=False)(lambda: context(a, b))()
    return push_gemm.push_gemm_kernel.best_config
