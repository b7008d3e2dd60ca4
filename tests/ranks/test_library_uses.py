"""Attributes and methods of autotuned kernels that public libraries use, each inside a tuned closure; the list of docs/libraries.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.steps import autotuned, launch, tuned
from tests.worlds import ROOT, is_interpreted, on_each_rank

N = 64
USES: dict[str, Callable[[Any], Any]] = {
    "best_config": lambda kernel: kernel.best_config.kwargs["BLOCK"] in (16, 32, 64),
    "best_config.all_kwargs()": lambda kernel: kernel.fn[(4,)](torch.zeros(N), torch.empty(N), N, **kernel.best_config.all_kwargs()),
    "best_config = ...": lambda kernel: setattr(kernel, "best_config", kernel.configs[0]),
    "cache": lambda kernel: all(config in kernel.configs for config in dict(kernel.cache).values()),
    "cache[key] = ...": lambda kernel: kernel.cache.__setitem__(("another key",), kernel.configs[0]),
    "cache.pop()": lambda kernel: kernel.cache.pop("another key", None),
    "configs": lambda kernel: len(kernel.configs) == 3,
    "configs_timings": lambda kernel: sorted(getattr(kernel, "configs_timings", {}).values()),
    "bench_time": lambda kernel: getattr(kernel, "bench_time", 0.0) >= 0.0,
    "keys": lambda kernel: list(kernel.keys) == ["n"],
    "arg_names": lambda kernel: kernel.arg_names.index("n") == 2,
    "nargs": lambda kernel: kernel.nargs is None,
    "fn": lambda kernel: kernel.fn.__name__,
    "fn.fn": lambda kernel: kernel.fn.fn.__code__.co_name == "add_kernel",
    "fn.run": lambda kernel: kernel.fn.run(torch.zeros(N), torch.empty(N), N, grid=(4,), warmup=False, BLOCK=16),
    "base_fn": lambda kernel: kernel.base_fn.__name__ == "add_kernel",
    "reset_to_zero": lambda kernel: kernel.reset_to_zero == [],
    "restore_value": lambda kernel: kernel.restore_value == [],
    "pre_hook": lambda kernel: kernel.pre_hook({}, reset_only=True) == 0,
    "post_hook": lambda kernel: kernel.post_hook({}, exception=None) == 0,
    "user_defined_pre_hook": lambda kernel: kernel.user_defined_pre_hook is False,
    "user_defined_post_hook": lambda kernel: kernel.user_defined_post_hook is False,
    "perf_model": lambda kernel: kernel.perf_model is None,
    "configs_top_k": lambda kernel: kernel.configs_top_k == 1.0,
    "early_config_prune": lambda kernel: kernel.early_config_prune is None,
    "cache_results": lambda kernel: kernel.cache_results is not None,
    "use_cuda_graph": lambda kernel: kernel.use_cuda_graph is False,
    "do_bench": lambda kernel: kernel.do_bench(lambda: None, quantiles=(0.5, 0.2, 0.8)) == [1.0] * 3,
    "_bench()": lambda kernel: _benched(kernel),
    "prune_configs()": lambda kernel: _pruned(kernel),
    "run()": lambda kernel: kernel.run(torch.zeros(N), torch.empty(N), N, grid=lambda meta: (N // meta["BLOCK"],), warmup=False),
    "warmup()": lambda kernel: kernel.warmup(torch.zeros(N), torch.empty(N), N, grid=(1,)),
}
"""Name of what is used -> a use, after a launch; it returns no False."""


def _benched(kernel: Any) -> bool:
    """As tuners of libraries do that time the configs on their own."""
    kernel.nargs = dict(zip(kernel.arg_names, (torch.zeros(N), torch.empty(N), N), strict=False))
    timings_ms = kernel._bench(*kernel.nargs.values(), config=kernel.configs[0], grid=(4,), warmup=False)
    kernel.nargs = None
    return bool(timings_ms == [1.0] * 3)


def _pruned(kernel: Any) -> bool:
    """As libraries do that compile all configs ahead."""
    before, kernel.nargs = kernel.nargs, {}
    kept = kernel.prune_configs({"grid": (1,)})
    kernel.nargs = before
    return len(kept) == 3


def using(kernel: Any, use: Callable[[Any], Any], answers: list[Any]) -> Any:
    def closure(x: torch.Tensor) -> tuple[float, float]:
        y = launch(kernel, x)
        answers.append(use(kernel))
        return y[0].item(), launch(kernel, y)[-1].item()

    return tuned(kernel, closure, cache=False)


@on_each_rank(modes=("interpret", "fake"))
def test_what_libraries_use_works_in_a_tuned_closure(rank: int) -> Any:
    """In the first call's runs and in a later call; results are right, and the winner is the same on all ranks."""
    winners = {}
    for name, use in USES.items():
        kernel, answers = autotuned(do_bench=lambda call, quantiles: (call(), [1.0] * 3)[1]), list[Any]()

        step = using(kernel, use, answers)
        called = [step(torch.zeros(N)) for _ in range(2)]
        assert called == [(1.0, 2.0)] * 2 or not is_interpreted(), name
        assert not any(each is False for each in answers), name
        assert (len(answers) > 3, kernel.nargs) == (True, None), name
        winners[name] = kernel.cache[N, "torch.float32", "torch.float32"].kwargs
    return winners


def test_the_page_lists_what_is_tested():
    """Each name of the list has a row."""
    page = Path(ROOT / "docs" / "libraries.md").read_text()
    assert [name for name in USES if f"`{name}`" not in page] == []
