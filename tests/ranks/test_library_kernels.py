"""Kernels as libraries make them: tuners, caches and hooks of their own, wrappers that keep what was launched."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

from tests.steps import accumulate_kernel, add_kernel, autotuned, best, configs, launch, tuned
from tests.worlds import caught, is_interpreted, log, on_each_rank

N = 64
KEY = (N, "torch.float32", "torch.float32")


# -- tuners ----------------------------------------------------------------------------------------------------------


class Hooked(Autotuner):  # type: ignore[misc]  # Triton is not typed
    """As flash-linear-attention's: looks for a file's config before Triton does, and has hooks of its own that stand for Triton's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.n_runs = 0
        if self.restore_value:
            self.pre_hook, self.post_hook = self._copy, self._put_back

    def _copy(self, kwargs: dict[str, Any], reset_only: bool = False) -> None:
        self.restore_copies = {} if reset_only else {name: kwargs[name].clone() for name in self.restore_value}

    def _put_back(self, kwargs: dict[str, Any], exception: Exception | None) -> None:
        for name, copy in self.restore_copies.items():
            kwargs[name].copy_(copy)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.n_runs += 1
        return super().run(*args, **kwargs)


class Property(Autotuner):  # type: ignore[misc]  # Triton is not typed
    """Keeps all configs that it was launched with."""

    @property
    def best_config(self) -> Any:
        return self.history[-1]

    @best_config.setter
    def best_config(self, config: Any) -> None:
        self.__dict__.setdefault("history", []).append(config)


class Pruning(Autotuner):  # type: ignore[misc]  # Triton is not typed
    """Overrides ``prune_configs``, and never asks Triton's."""

    def prune_configs(self, kwargs: dict[str, Any]) -> list[triton.Config]:
        return [config for config in self.configs if config.kwargs["BLOCK"] > 16]


class ReadOnly(Autotuner):  # type: ignore[misc]  # Triton is not typed
    @property
    def best_config(self) -> Any:
        return self.configs[0]


class Filed(Autotuner):  # type: ignore[misc]  # Triton is not typed
    """As libraries make it that keep configs in files of their own: a copy of Triton's run, with another key."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.nargs: Any = dict(zip(self.arg_names, args, strict=False))
        if len(self.configs) > 1:
            named = {**self.nargs, **kwargs}
            key = f"{named['n'] // 10}_{named['x_ptr'].dtype}"
            if key not in self.cache:
                self.cache[key] = self.prune_configs(kwargs)[0]
            config = self.cache[key]
        else:
            config = self.configs[0]
        self.best_config = config
        result = self.fn.run(*args, **kwargs, **config.all_kwargs())
        self.nargs = None
        return result


class Inherits(Filed):
    """A policy of its own on top of that run."""


class Searches(Autotuner):  # type: ignore[misc]  # Triton is not typed
    """Looks nothing up: what it would launch cannot be known."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        return self.launch(self.prune_configs(kwargs)[0], args, kwargs)

    def launch(self, config: Any, args: Any, kwargs: Any) -> Any:
        self.best_config = config
        return self.fn.run(*args, **kwargs, **config.all_kwargs())


class Checks(Searches):
    """Asks what only the kernel itself can answer, and not one that stands for it."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Autotuner):
            raise TypeError(f"{self} is no kernel")
        return self.launch(self.cache.setdefault(str(args[2]), self.prune_configs(kwargs)[0]), args, kwargs)


# -- caches ----------------------------------------------------------------------------------------------------------


class Bare:
    """A cache with no more than Triton asks for."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}

    def __contains__(self, key: object) -> bool:
        return key in self.kept

    def __getitem__(self, key: Any) -> Any:
        return self.kept[key]

    def __setitem__(self, key: Any, config: Any) -> None:
        self.kept[key] = config


class Own(Bare, MutableMapping[Any, Any]):
    """A cache that writes down what it is asked for."""

    def __delitem__(self, key: Any) -> None:
        del self.kept[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.kept)

    def __len__(self) -> int:
        return len(self.kept)


class Layered(Own):
    """A mapping in memory above one on disk, which deletion leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.disk: dict[Any, Any] = {}

    def __contains__(self, key: object) -> bool:
        return key in self.disk

    def __getitem__(self, key: Any) -> Any:
        return self.kept.setdefault(key, self.disk[key])

    def __setitem__(self, key: Any, config: Any) -> None:
        self.kept[key] = self.disk[key] = config

    def __delitem__(self, key: Any) -> None:
        self.kept.pop(key, None)


class Default(dict[Any, Any]):
    """A cache that knows a config for every key, as a library that routes keys to recorded configs."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: object) -> Any:
        return configs(32)[0]


def made(kind: Any, kernel: Any = add_kernel, restored: list[str] | None = None, *blocks: int) -> Any:
    """A kernel as a library makes it: by its class of tuners, or with its class of caches."""
    if issubclass(kind, Autotuner):
        return kind(kernel, kernel.arg_names, configs(*(blocks or (16, 32, 64))), ["n"], None, restored)
    kernel = autotuned(kernel, restore_value=restored)
    kernel.cache = kind()
    return kernel


# -- what is tuned ---------------------------------------------------------------------------------------------------


@on_each_rank(cases=[Hooked, Property, Pruning, Filed, Inherits, Own, Bare, Default], modes=("interpret", "fake"))
def test_a_kernel_of_a_library_is_tuned_as_any_other(rank: int, kind: Any) -> Any:
    """``best_config`` is what was launched, in each run; a cache that knows all keys leaves nothing to tune."""
    kernel, wrong = made(kind), list[bool]()

    def closure(*, kernel: Any, x: torch.Tensor) -> float:
        launched: list[int] = []

        def grid(meta: dict[str, Any]) -> tuple[int]:
            launched.append(meta["BLOCK"])
            return (triton.cdiv(N, meta["BLOCK"]),)

        y = torch.empty_like(x)
        kernel[grid](x, y, N)
        wrong.append(kernel.best_config.kwargs["BLOCK"] != launched[-1])
        return y[0].item()

    step = tuned(kernel, closure)
    called = [step(kernel=kernel, x=torch.zeros(N)) for _ in range(3)]
    assert called == [1.0] * 3 or not is_interpreted()
    assert (any(wrong), kernel.nargs, len(wrong) > 3) == (False, None, kind is not Default)
    assert [len(each.candidates) for each in step.records] == [] if kind is Default else [2 if kind is Pruning else 3]
    assert len(getattr(kernel.cache, "kept", kernel.cache)) == len(step.records)
    return best(kernel) if kind in (Pruning, Property) else kernel.best_config.kwargs


@on_each_rank(cases=[Filed, Inherits], modes=("interpret", "fake"))
def test_a_tuner_with_a_run_of_its_own_is_tuned_under_its_own_key(rank: int, kind: Any) -> Any:
    """Sizes of one key share a config; outside of the step the library tunes as ever, and its function has its own code again."""
    kernel, alone, code = made(kind), made(kind, add_kernel, None, 16), Filed.run.__code__
    step = tuned(kernel, lambda x: launch(alone, launch(kernel, x))[0].item())
    called = [step(torch.zeros(n)) for n in (N, N, N + 5, 2 * N)]
    assert Filed.run.__code__ is code
    called.append(launch(kernel, torch.zeros(6 * N))[0].item())
    assert called == [2.0] * 4 + [1.0] or not is_interpreted()
    assert [*kernel.cache] == [f"{n // 10}_torch.float32" for n in (N, 2 * N, 6 * N)]
    assert (kernel.nargs, len(step.records)) == (None, 2)
    assert "add_kernel['6_torch.float32']" in log()
    *chosen, outside = [config.kwargs["BLOCK"] for config in kernel.cache.values()]
    assert outside == 16
    return chosen


@pytest.mark.once
@on_each_rank(cases=[Searches, Checks])
def test_a_tuner_whose_key_cannot_be_known_is_left_alone(rank: int, kind: Any):
    """Its kernels are launched as without dist_tune; one whose run looks nothing up is named in the log."""
    kernel = made(kind)
    step = tuned(kernel, lambda x: launch(kernel, x)[0].item())
    assert [step(torch.zeros(N)) for _ in range(2)] == [1.0] * 2
    assert kernel.best_config.kwargs["BLOCK"] == 16
    (told,) = (line for line in log().splitlines() if "Left alone are kernels of " in line)
    assert f"{Searches.__module__}.Searches, which tune in a run of their own" in told


@on_each_rank(cases=["read-only", "not launched"])
def test_what_no_launch_can_do_is_told_with_tritons_reason(rank: int, case: str):
    """A ``best_config`` that cannot be set, and a hook that reads it from a kernel that was not launched, fail on all ranks."""
    other = autotuned(blocks=(16, 32))
    hooked = autotuned(configs=configs(16, 32, pre_hook=lambda full: other.best_config))
    step = tuned(made(ReadOnly) if case == "read-only" else hooked)
    error = caught(lambda: step(torch.zeros(N)))
    assert error.kind == "NoValidConfigError"
    words = ("no setter",) if case == "read-only" else ("AttributeError", "has no attribute 'best_config'")
    assert [word for word in ("add_kernel[64,", *words) if word not in error.message] == []


@on_each_rank(cases=[Own, Bare, Default, Layered])
def test_a_config_that_ranks_do_not_share_is_tuned_anew(rank: int, kind: Any) -> Any:
    """Also in a cache that cannot forget a key: an empty one takes its place, and the library's is back with the ranks' common config."""
    kernel = made(kind)
    own = kernel.cache = {} if kind is Default and rank == 1 else kernel.cache
    if kind is not Default:
        own[KEY] = kernel.configs[rank]
    step = tuned(kernel, lambda x: launch(kernel, x)[0].item())
    assert [step(torch.zeros(N)) for _ in range(2)] == [1.0, 1.0]
    assert (len(step.records), kernel.cache is own) == (1, True)
    return own[KEY].kwargs


@on_each_rank(cases=["restored", "assigned"])
def test_hooks_that_a_library_puts_in_place_of_tritons(rank: int, case: str):
    """Hooks that copy and restore leave later launches what the kernel wrote; a hook that is assigned to a kernel is called."""
    y, other = torch.full((N,), 0.0 if case == "restored" else 5.0), autotuned(blocks=(16, 32))
    kernel = made(Hooked, accumulate_kernel, ["y_ptr"]) if case == "restored" else autotuned(accumulate_kernel)
    if case == "assigned":
        kernel.pre_hook = lambda full, reset_only=False: full["y_ptr"].zero_()
    step = tuned(kernel, lambda x: launch(other, launch(kernel, x, y))[0].item())
    assert [step(torch.ones(N)) for _ in range(2)] == [2.0, 3.0]
    assert y[0].item() == 2.0


@on_each_rank()
def test_kernels_with_one_config_need_no_replay(rank: int):
    """One config, one left after pruning, one repeated: the closure runs for discovery, as the probe, and once more."""
    single, repeated, runs = autotuned(blocks=(32,)), autotuned(configs=configs(32, 32, 32)), list[int]()
    pruned = autotuned(blocks=(16, 32), prune_configs_by={"early_config_prune": lambda configs, named, **kw: configs[1:]})
    step = tuned(single, lambda x: runs.append(1) or launch(repeated, launch(pruned, launch(single, x)))[0].item())  # type: ignore[func-returns-value]
    assert (step(torch.zeros(64)), len(runs)) == (3.0, 3)
    assert (best(pruned), best(repeated), len(single.cache), [len(r.candidates) for r in step.records]) == ([32], [32], 0, [1, 1])


# -- heuristics, descriptors ------------------------------------------------------------------------------------------


@triton.jit
def _even_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr = False):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = (at < n) | EVEN
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=keep) + 1.0, mask=keep)


@on_each_rank(modes=("interpret", "fake"))
def test_heuristics_above_the_tuner(rank: int):
    """One site with and without the constant that they give; the log tells of the variant that is compiled without it."""
    kernel = autotuned(_even_kernel, blocks=(16, 32))
    above = triton.heuristics({"EVEN": lambda args: args["n"] % 32 == 0})(kernel)
    step = tuned(kernel, lambda x: launch(kernel, launch(above, x))[0].item())
    called = [step(torch.zeros(N)) for _ in range(2)]
    assert (len(best(kernel)), step.records[0].n_variants) == (1, 1 if is_interpreted() else 2)
    if is_interpreted():
        assert called == [2.0, 2.0]
    else:
        assert "variant=2 is compiled: EVEN is not given\n" in log()


def _set_shapes(full: dict[str, Any]) -> None:
    for name in ("x_desc", "y_desc"):
        full[name].block_shape = [full["BLOCK"], full["BLOCK"]]


@triton.jit
def _copy_kernel(x_desc, y_desc, n: tl.constexpr, BLOCK: tl.constexpr):
    for i in range(0, n, BLOCK):
        for j in range(0, n, BLOCK):
            y_desc.store([i, j], x_desc.load([i, j]))


@on_each_rank(modes=("interpret", "fake"))
def test_hooks_that_set_the_block_shape_of_descriptors(rank: int):
    """What such a hook sets is part of what is compiled, so it also runs before compilation."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    kernel = autotuned(_copy_kernel, configs=configs(16, 32, 64, pre_hook=_set_shapes))
    x, y = torch.randn(N, N), torch.zeros(N, N)
    step = tuned(kernel, lambda: kernel[(1,)](*(TensorDescriptor(each, [N, N], [N, 1], [1, 1]) for each in (x, y)), N))
    step()
    assert [each.failure for each in step.records[0].candidates] == [None] * 3
    assert bool((x == y).all()) or not is_interpreted()


# -- wrappers that keep what was launched, and ask no tuner again ----------------------------------------------------


class Keeps(KernelInterface):  # type: ignore[misc]  # Triton is not typed
    """As flag_gems' LibEntry: asks the tuner once for each kind of arguments, and launches the same kernel from then on."""

    def __init__(self, kernel: Any) -> None:
        self.fn, self.kept = kernel, (dict[Any, Any](), dict[Any, Any]())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fn, name)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if (config := self.kept[0].get(args[2])) is not None:
            return self.fn.fn.run(*args, **{**kwargs, "grid": kwargs["grid"]}, **config.all_kwargs())
        result = self.fn.run(*args, **kwargs)
        self.kept[0][args[2]] = self.fn.best_config
        return result


@pytest.mark.once
@on_each_rank(cases=["tuner", "own run", "in place", "disputed"])
def test_what_a_wrapper_keeps_of_replays_is_taken_from_it(rank: int, case: str) -> Any:
    """Each replay asks the tuner, also after ranks had different configs, and then the winner is kept; what was kept before is, too."""
    timed: Any = {"do_bench": lambda call, quantiles: (call(), [1.0] * 3)[1]}
    kernel = Keeps(made(Filed, accumulate_kernel) if case == "own run" else autotuned(accumulate_kernel, **timed))
    launch(kernel, torch.ones(2 * N), torch.zeros(2 * N))  # the library's own choice: it stays
    before, source = kernel.kept[0][2 * N], torch.zeros(N)
    if case == "disputed":
        kernel.fn.cache[KEY] = kernel.fn.configs[rank]

    def closure(x: torch.Tensor) -> float:
        launch(kernel, torch.ones(2 * N), torch.zeros(2 * N))
        total = launch(kernel, torch.ones(N), x if case == "in place" else torch.zeros(N))
        return launch(kernel, total, torch.zeros(N))[0].item()

    step = tuned(kernel, closure)
    called = [step(source) for _ in range(3)]
    (config,) = (kernel.fn.cache[key] for key in kernel.fn.cache if str(key).startswith(("(64", "6_")))
    assert called == ([1.0, 2.0, 3.0] if case == "in place" else [1.0] * 3)
    assert kernel.kept[0][N] is config is kernel.best_config
    assert kernel.kept[0][2 * N] is before
    assert (len(step.records), "not tuned" in log()) == ((0, True) if case == "in place" else (1, False))
    return config.kwargs


@pytest.mark.once
@on_each_rank()
def test_a_wrapper_around_an_untuned_kernel_keeps_nothing(rank: int):
    """A rank that is alone with a size asks for a meeting now and then, and tunes the size when its peer has come to it."""
    kernel, n_known = Keeps(autotuned(accumulate_kernel)), list[int]()
    step = tuned(kernel, lambda x: launch(kernel, x, torch.zeros_like(x))[0].item())
    for i in range(40):
        step(torch.ones(N if i < 2 or (rank == 1 and i < 30) else 2 * N))
        n_known.append(len(kernel.fn.cache))
    assert (n_known.index(2), len(step.records)) == (34, 2)


_launched: dict[Any, Any] = {}


def _remembering(kernel: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As functions do that keep compiled kernels in a module's dict."""
    if (rule := _launched.get(kernel)) is None:
        launch(kernel, x, y)
        _launched[kernel] = kernel.best_config
    else:
        kernel.fn[(triton.cdiv(N, rule.kwargs["BLOCK"]),)](x, y, N, **rule.all_kwargs())
    return y


@pytest.mark.once
@on_each_rank()
def test_a_function_that_keeps_its_first_launch_is_told_of(rank: int) -> Any:
    """What no replay launches is not tuned, which is said; the other kernels of the step are."""
    kernel, other = autotuned(accumulate_kernel), autotuned()
    step = tuned(None, lambda x: _remembering(kernel, launch(other, x), torch.zeros(N))[0].item())
    assert [step(torch.zeros(N)) for _ in range(3)] == [1.0] * 3
    (line,) = [line for line in log().splitlines() if " is not tuned: the first run launched it and " in line]
    assert "WARNING" in line
    assert "accumulate_kernel" in line or "site 2 " in line
    return best(other)
