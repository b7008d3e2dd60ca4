"""Kernels as libraries make and use them: tuners, caches and hooks of their own, wrappers that keep
what was launched, attributes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

from tests.steps import (
    Bare,
    Filed,
    accumulate_kernel,
    add_kernel,
    autotuned,
    best,
    configs,
    launch,
    made,
    told,
    tuned,
)
from tests.worlds import ROOT, is_interpreted, log, on_each_rank

N = 64
KEY = (N, "torch.float32", "torch.float32")
ONE_MS: Any = {"do_bench": lambda call, quantiles: (call(), [1.0] * 3)[1]}


# -- tuners ----------------------------------------------------------------------------------------


class Hooked(Autotuner):  # type: ignore[misc]  # Triton is not typed
    """As flash-linear-attention's: looks for a file's config before Triton does, and has hooks of
    its own that stand for Triton's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.restore_value:
            self.pre_hook, self.post_hook = self._copy, self._put_back

    def _copy(self, kwargs: dict[str, Any], reset_only: bool = False) -> None:
        self.restore_copies = (
            {} if reset_only else {name: kwargs[name].clone() for name in self.restore_value}
        )

    def _put_back(self, kwargs: dict[str, Any], exception: Exception | None) -> None:
        for name, copy in self.restore_copies.items():
            kwargs[name].copy_(copy)

    def run(self, *args: Any, **kwargs: Any) -> Any:
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
        return self.launch(
            self.cache.setdefault(str(args[2]), self.prune_configs(kwargs)[0]), args, kwargs
        )


# -- caches ----------------------------------------------------------------------------------------


class Own(Bare, MutableMapping[Any, Any]):
    """A cache that is a whole mapping."""

    def __delitem__(self, key: Any) -> None:
        del self.kept[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.kept)

    def __len__(self) -> int:
        return len(self.kept)


class Default(dict[Any, Any]):
    """A cache that knows a config for every key, as a library that routes keys to recorded
    configs.
    """

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: object) -> Any:
        return configs(32)[0]


# -- what is tuned ---------------------------------------------------------------------------------


@on_each_rank(cases=[Hooked, Property, Pruning, Filed, Own, Bare, Default])
def test_a_kernel_of_a_library_is_tuned_as_any_other(rank: int, kind: Any) -> Any:
    """``best_config`` is what was launched, in each run; a cache that knows all keys leaves nothing
    to tune.
    """
    kernel, is_right = made(kind), list[bool]()

    def closure(*, kernel: Any, x: torch.Tensor) -> float:
        launched: list[int] = []

        def grid(meta: dict[str, Any]) -> tuple[int]:
            launched.append(meta["BLOCK"])
            return (triton.cdiv(N, meta["BLOCK"]),)

        y = torch.empty_like(x)
        kernel[grid](x, y, N)
        is_right.append(kernel.best_config.kwargs["BLOCK"] == launched[-1])
        return y[0].item()

    step = tuned(kernel, closure)
    assert [step(kernel=kernel, x=torch.zeros(N)) for _ in range(3)] == [1.0] * 3
    assert (all(is_right), kernel.nargs, len(is_right) > 3) == (True, None, kind is not Default)
    assert (
        [len(each.candidates) for each in step.records] == []
        if kind is Default
        else [2 if kind is Pruning else 3]
    )
    assert len(getattr(kernel.cache, "kept", kernel.cache)) == len(step.records)
    return kernel.best_config.kwargs


@on_each_rank(modes=("interpret", "fake"))
def test_a_tuner_with_a_run_of_its_own_is_tuned_under_its_own_key(rank: int) -> Any:
    """Sizes of one key share a config; outside of the step the library tunes as ever, and its
    function has its own code again.
    """
    kernel, alone, code = made(Inherits), made(Inherits, add_kernel, None, 16), Filed.run.__code__
    step = tuned(kernel, lambda x: launch(alone, launch(kernel, x))[0].item())
    called = [step(torch.zeros(n)) for n in (N, N, N + 5, 2 * N)]
    assert Filed.run.__code__ is code
    called.append(launch(kernel, torch.zeros(6 * N))[0].item())
    assert called == [2.0] * 4 + [1.0] or not is_interpreted()
    assert [*kernel.cache] == [f"{n // 10}_torch.float32" for n in (N, 2 * N, 6 * N)]
    assert (kernel.nargs, len(step.records), "add_kernel['6_torch.float32']" in log()) == (
        None,
        2,
        True,
    )
    *chosen, outside = [config.kwargs["BLOCK"] for config in kernel.cache.values()]
    assert outside == 16
    return chosen


@pytest.mark.once
@on_each_rank(cases=[Searches, Checks])
def test_a_tuner_whose_key_cannot_be_known_is_left_alone(rank: int, kind: Any):
    """Its kernels are launched as without dist_tune; one whose run looks nothing up is named in the
    log.
    """
    kernel = made(kind)
    step = tuned(kernel, lambda x: launch(kernel, x)[0].item())
    assert [step(torch.zeros(N)) for _ in range(2)] == [1.0] * 2
    assert kernel.best_config.kwargs["BLOCK"] == 16
    (line,) = (line for line in log().splitlines() if "Left alone are kernels of " in line)
    assert f"{Searches.__module__}.Searches, which tune in a run of their own" in line


@on_each_rank(cases=[Own, Bare, Default])
def test_a_config_that_ranks_do_not_share_is_tuned_anew(rank: int, kind: Any) -> Any:
    """Also in a cache that cannot forget a key: an empty one takes its place, and the library's is
    back with the ranks' common config.
    """
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
    """Hooks that copy and restore leave later launches what the kernel wrote; a hook that is
    assigned to a kernel is called.
    """
    y, other = torch.full((N,), 0.0 if case == "restored" else 5.0), autotuned(blocks=(16, 32))
    kernel = (
        made(Hooked, accumulate_kernel, ["y_ptr"])
        if case == "restored"
        else autotuned(accumulate_kernel)
    )
    if case == "assigned":
        kernel.pre_hook = lambda full, reset_only=False: full["y_ptr"].zero_()
    step = tuned(kernel, lambda x: launch(other, launch(kernel, x, y))[0].item())
    assert [step(torch.ones(N)) for _ in range(2)] == [2.0, 3.0]
    assert y[0].item() == 2.0


@on_each_rank()
def test_kernels_with_one_config_need_no_replay(rank: int):
    """One config, one left after pruning, one repeated: the closure runs for discovery, as the
    probe, and once more.
    """
    single, repeated, runs = (
        autotuned(blocks=(32,)),
        autotuned(configs=configs(32, 32, 32)),
        list[int](),
    )
    pruned = autotuned(
        blocks=(16, 32),
        prune_configs_by={"early_config_prune": lambda configs, named, **kw: configs[1:]},
    )
    step = tuned(
        single,
        lambda x: runs.append(1) or launch(repeated, launch(pruned, launch(single, x)))[0].item(),  # type: ignore[func-returns-value]
    )
    assert (step(torch.zeros(64)), len(runs)) == (3.0, 3)
    assert (
        best(pruned),
        best(repeated),
        len(single.cache),
        [len(r.candidates) for r in step.records],
    ) == ([32], [32], 0, [1, 1])


# -- mistakes --------------------------------------------------------------------------------------


@triton.jit
def optional_kernel(x_ptr, y_ptr, n, z_ptr=None, BLOCK: triton.language.constexpr = 16):
    pass


def reading_another() -> Any:
    other = autotuned()
    return autotuned(configs=configs(16, 32, pre_hook=lambda full: other.best_config))


MISTAKES: dict[str, tuple[Callable[[], Any], str, tuple[str, ...]]] = {
    "autotuned twice": (
        lambda: triton.autotune(
            [triton.Config({"SIZE": 1}), triton.Config({"SIZE": 2})], key=["n"]
        )(autotuned()),
        "TypeError",
        ("kernel tests.steps.add_kernel is decorated with triton.autotune twice",),
    ),
    "left out": (
        lambda: autotuned(optional_kernel, restore_value=["z_ptr"]),
        "ValueError",
        (
            (
                "optional_kernel names 'z_ptr', which this launch leaves out: pass it, None if"
                " there is none"
            ),
        ),
    ),
    "misspelt": (
        lambda: autotuned(reset_to_zero=["y_prt"]),
        "ValueError",
        ("y_prt",),
    ),  # Triton 3.9 says so at the decoration
    "another argument": (
        lambda: autotuned(configs=[triton.Config({"BLOCKS": 16}), triton.Config({"BLOCKS": 32})]),
        "NoValidConfigError",
        ("none of its 2 configs runs on rank 0:\n  each of them: ",),
    ),
    "a best_config that cannot be set": (
        lambda: made(ReadOnly),
        "NoValidConfigError",
        ("add_kernel[64,", "no setter"),
    ),
    "a hook that reads what was not launched": (
        reading_another,
        "NoValidConfigError",
        ("add_kernel[64,", "AttributeError", "has no attribute 'best_config'"),
    ),
}


@on_each_rank(1, cases=[*MISTAKES], is_dist=False)
def test_what_no_config_can_cure_is_told_once(rank: int, mistake: str):
    """Not for each config, and not with the advice to add one; with Triton's reason."""
    make, kind, words = MISTAKES[mistake]
    x = torch.zeros(N)
    found, message, _ = told(
        lambda: tuned(None, lambda kernel: kernel[(4,)](x, torch.empty_like(x), N), is_dist=False)(
            make()
        )
    )
    assert (found, [word for word in words if word not in message], "Add a config" in message) == (
        kind,
        [],
        False,
    )


# -- wrappers that keep what was launched, and ask no tuner again ----------------------------------


class Keeps(KernelInterface):  # type: ignore[misc]  # Triton is not typed
    """As flag_gems' LibEntry: asks the tuner once for each kind of arguments, and launches the same
    kernel from then on.
    """

    def __init__(self, kernel: Any) -> None:
        self.fn, self.kept = kernel, (dict[Any, Any](), dict[Any, Any]())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fn, name)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if (config := self.kept[0].get(args[2])) is not None:
            return self.fn.fn.run(
                *args, **{**kwargs, "grid": kwargs["grid"]}, **config.all_kwargs()
            )
        result = self.fn.run(*args, **kwargs)
        self.kept[0][args[2]] = self.fn.best_config
        return result


@pytest.mark.once
@on_each_rank(cases=["tuner", "own run", "in place", "disputed"])
def test_what_a_wrapper_keeps_of_replays_is_taken_from_it(rank: int, case: str) -> Any:
    """Each replay asks the tuner, also after ranks had different configs, and then the winner is
    kept; what was kept before is, too.
    """
    kernel = Keeps(
        made(Filed, accumulate_kernel)
        if case == "own run"
        else autotuned(accumulate_kernel, **ONE_MS)
    )
    launch(kernel, torch.ones(2 * N), torch.zeros(2 * N))  # the library's own choice: it stays
    before, source = kernel.kept[0][2 * N], torch.zeros(N)
    if case == "disputed":
        kernel.fn.cache[KEY] = kernel.fn.configs[rank]

    def closure(x: torch.Tensor) -> float:
        launch(kernel, torch.ones(2 * N), torch.zeros(2 * N))
        total = launch(kernel, torch.ones(N), x if case == "in place" else torch.zeros(N))
        return launch(kernel, total, torch.zeros(N))[0].item()

    step = tuned(kernel, closure)
    assert [step(source) for _ in range(3)] == (
        [1.0, 2.0, 3.0] if case == "in place" else [1.0] * 3
    )
    (config,) = (
        kernel.fn.cache[key] for key in kernel.fn.cache if str(key).startswith(("(64", "6_"))
    )
    assert kernel.kept[0][N] is config is kernel.best_config
    assert kernel.kept[0][2 * N] is before
    assert (len(step.records), "not tuned" in log()) == (
        (0, True) if case == "in place" else (1, False)
    )
    return config.kwargs


@pytest.mark.once
@on_each_rank()
def test_a_wrapper_around_an_untuned_kernel_keeps_nothing(rank: int):
    """A rank that is alone with a size asks for a meeting now and then, and tunes the size when its
    peer has come to it.
    """
    kernel, n_known = Keeps(autotuned(accumulate_kernel)), list[int]()
    step = tuned(kernel, lambda x: launch(kernel, x, torch.zeros_like(x))[0].item())
    for i in range(40):
        step(torch.ones(N if i < 2 or (rank == 1 and i < 30) else 2 * N))
        n_known.append(len(kernel.fn.cache))
    assert (30 < n_known.index(2) < 40, len(step.records)) == (True, 2)


launched_before: dict[Any, Any] = {}


@pytest.mark.once
@on_each_rank()
def test_a_function_that_keeps_its_first_launch_is_told_of(rank: int) -> Any:
    """What no replay launches is not tuned, which is said; the other kernels of the step are."""
    kernel, other = autotuned(accumulate_kernel), autotuned()

    def closure(x: torch.Tensor) -> float:
        """As functions do that keep compiled kernels in a module's dict."""
        x, y = launch(other, x), torch.zeros(N)
        if (config := launched_before.get(kernel)) is None:
            launch(kernel, x, y)
            launched_before[kernel] = kernel.best_config
        else:
            kernel.fn[(triton.cdiv(N, config.kwargs["BLOCK"]),)](x, y, N, **config.all_kwargs())
        return y[0].item()

    step = tuned(None, closure)
    assert [step(torch.zeros(N)) for _ in range(3)] == [1.0] * 3
    (line,) = [
        line
        for line in log().splitlines()
        if " is not tuned: the first run launched it and " in line
    ]
    assert re.search("WARNING.*(accumulate_kernel|site 2 )", line)
    return best(other)


# -- attributes: the list of docs/libraries.md -----------------------------------------------------

SAME = (
    "keys",
    "arg_names",
    "nargs",
    "reset_to_zero",
    "restore_value",
    "user_defined_pre_hook",
    "user_defined_post_hook",
    "perf_model",
    "configs_top_k",
    "early_config_prune",
    "cache_results",
    "use_cuda_graph",
    "fn",
    "base_fn",
)
"""What a kernel has as one that is not tuned has it."""


def benched(kernel: Any) -> bool:
    """As tuners of libraries do that time the configs on their own."""
    kernel.nargs = dict(zip(kernel.arg_names, (torch.zeros(N), torch.empty(N), N), strict=False))
    timings_ms = kernel._bench(
        *kernel.nargs.values(), config=kernel.configs[0], grid=(4,), warmup=False
    )
    kernel.nargs = None
    return bool(timings_ms == [1.0] * 3)


def pruned(kernel: Any) -> bool:
    """As libraries do that compile all configs ahead."""
    before, kernel.nargs = kernel.nargs, {}
    kept = kernel.prune_configs({"grid": (1,)})
    kernel.nargs = before
    return len(kept) == 3


USES: dict[str, Callable[[Any], Any]] = {
    "best_config": lambda kernel: kernel.best_config in kernel.configs,
    "best_config.all_kwargs()": lambda kernel: kernel.fn[(4,)](
        torch.zeros(N), torch.empty(N), N, **kernel.best_config.all_kwargs()
    ),
    "best_config = ...": lambda kernel: setattr(kernel, "best_config", kernel.configs[0]),
    "cache": lambda kernel: all(config in kernel.configs for config in dict(kernel.cache).values()),
    "cache[key] = ...": lambda kernel: kernel.cache.__setitem__(
        ("another key",), kernel.configs[0]
    ),
    "cache.pop()": lambda kernel: kernel.cache.pop("another key", None),
    "configs": lambda kernel: len(kernel.configs) == 3,
    "configs_timings": lambda kernel: sorted(getattr(kernel, "configs_timings", {}).values()),
    "bench_time": lambda kernel: getattr(kernel, "bench_time", 0.0) >= 0.0,
    "fn.fn": lambda kernel: kernel.fn.fn.__code__.co_name == "add_kernel",
    "fn.run": lambda kernel: kernel.fn.run(
        torch.zeros(N), torch.empty(N), N, grid=(4,), warmup=False, BLOCK=16
    ),
    "pre_hook": lambda kernel: kernel.pre_hook({}, reset_only=True) == 0,
    "post_hook": lambda kernel: kernel.post_hook({}, exception=None) == 0,
    "do_bench": lambda kernel: (
        kernel.do_bench(lambda: None, quantiles=(0.5, 0.2, 0.8)) == [1.0] * 3
    ),
    "_bench()": benched,
    "prune_configs()": pruned,
    "run()": lambda kernel: kernel.run(
        torch.zeros(N), torch.empty(N), N, grid=lambda meta: (N // meta["BLOCK"],), warmup=False
    ),
    "warmup()": lambda kernel: kernel.warmup(torch.zeros(N), torch.empty(N), N, grid=(1,)),
}
"""Name of what is used -> a use, after a launch; it returns no False."""


@on_each_rank(modes=("interpret", "fake"))
def test_what_libraries_use_works_in_a_tuned_closure(rank: int) -> Any:
    """In the first call's runs and in a later call; results are right, and the winner is the same
    on all ranks.
    """
    kernel, twin, wrong = autotuned(**ONE_MS), autotuned(**ONE_MS), list[list[str]]()
    launch(twin, torch.zeros(N))

    def closure(x: torch.Tensor) -> tuple[float, float]:
        y = launch(kernel, x)
        unlike = [name for name in SAME if getattr(kernel, name) != getattr(twin, name)]
        wrong.append(unlike + [name for name, use in USES.items() if use(kernel) is False])
        return y[0].item(), launch(kernel, y)[-1].item()

    step = tuned(kernel, closure, cache=False)
    assert [step(torch.zeros(N)) for _ in range(2)] == [(1.0, 2.0)] * 2 or not is_interpreted()
    assert ([name for names in wrong for name in names], len(wrong) > 3, kernel.nargs) == (
        [],
        True,
        None,
    )
    return kernel.cache[KEY].kwargs


def test_the_page_lists_what_is_tested():
    """No more, and no less."""
    page = Path(ROOT / "docs" / "libraries.md").read_text()
    listed = re.findall(
        r"^\| (`.*?) \|",
        page.partition("### Which libraries use what")[2].partition("###")[0],
        re.MULTILINE,
    )
    assert sorted(re.findall("`(.*?)`", " ".join(listed))) == sorted([*SAME, *USES])
