"""Launches of kernels: keys as text, identities that tell kernels of one name and key apart, and
launches with a known config.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import AutotunerError

from dist_tune import contextual_autotune
from dist_tune.configs import describe
from dist_tune.launches import Launch
from dist_tune.testing import on_ranks, values
from tests.steps import autotuned, configs

pytestmark = pytest.mark.once


def identity(kernel: Any) -> Any:
    """Identity of a launch of ``kernel``."""
    x = torch.zeros(64)
    return dict(Launch(kernel, (x, 64), {}).identify())


def adding() -> Any:
    @triton.jit
    def helper(x):
        return x + 1.0

    return helper


def doubling() -> Any:
    @triton.jit
    def helper(x):
        return x * 2.0

    return helper


def made(captured: Any = 1, helper: Any = None, heuristics: Any = None, **options: Any) -> Any:
    """A kernel of a factory, always of one name."""
    helper = adding() if helper is None else helper
    captured = tl.constexpr(captured)

    @triton.jit
    def kernel(x_ptr, n, m, BLOCK: tl.constexpr):
        tl.store(x_ptr, helper(tl.load(x_ptr)) + captured)

    inner = kernel if heuristics is None else triton.heuristics(heuristics)(kernel)
    options = {"configs": configs(16, 32), "key": ["n"], **options}
    return triton.autotune(**options)(inner)


def rule(limit: Any) -> Callable[..., Any]:
    return lambda configs, named, **kwargs: [
        each for each in configs if each.kwargs["BLOCK"] <= limit
    ]


class Rule:
    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self, configs: Any, named: Any, **kwargs: Any) -> Any:
        return [each for each in configs if each.kwargs["BLOCK"] <= self.limit]

    keep = __call__


def model(cost: int) -> Callable[..., float]:
    return lambda **kwargs: float(cost * kwargs["BLOCK"])


def hook(number: int) -> Callable[..., None]:
    return lambda *args, **kwargs: print(number)


def block(size: Any) -> dict[str, Any]:
    return {"BLOCK": lambda args: size}


def with_hook(number: int) -> list[triton.Config]:
    return [triton.Config({"BLOCK": 16}, pre_hook=hook(number)), triton.Config({"BLOCK": 32})]


def of_globals(value: int) -> Any:
    """A kernel that reads a global, of a module of its own."""
    names: dict[str, Any] = {
        "__name__": "own",
        "size": value,
        "__annotations__": {"size": tl.constexpr},
    }

    def kernel(x_ptr, n, m, BLOCK: tl.constexpr):
        tl.store(x_ptr, size)  # type: ignore[name-defined]  # noqa: F821

    moved = FunctionType(kernel.__code__, names, "kernel")
    return triton.autotune(configs=configs(16, 32), key=["n"])(triton.jit(moved))


PAIRS: dict[str, Any] = {
    "captured value": ({"captured": 1}, {"captured": 2}),
    "captured helper": ({"helper": adding()}, {"helper": doubling()}),
    "a prune rule": ({}, {"prune_configs_by": {"early_config_prune": rule(16)}}),
    "what a prune rule captured": tuple(
        {"prune_configs_by": {"early_config_prune": rule(each)}} for each in (16, 32)
    ),
    "a list that a prune rule captured": tuple(
        {"prune_configs_by": {"early_config_prune": rule([each])}} for each in (16, 32)
    ),
    "what a rule object holds": tuple(
        {"prune_configs_by": {"early_config_prune": Rule(each)}} for each in (16, 32)
    ),
    "what a rule's object holds": tuple(
        {"prune_configs_by": {"early_config_prune": Rule(each).keep}} for each in (16, 32)
    ),
    "performance model": tuple(
        {"prune_configs_by": {"perf_model": model(each), "top_k": 1}} for each in (1, -1)
    ),
    "top_k": tuple(
        {"prune_configs_by": {"perf_model": model(1), "top_k": each}} for each in (1, 2)
    ),
    "key names": ({"key": ["n"]}, {"key": ["m"]}),
    "heuristics": ({}, {"heuristics": block(16)}),
    "what heuristics captured": ({"heuristics": block(16)}, {"heuristics": block(32)}),
    "reset_to_zero": ({}, {"reset_to_zero": ["x_ptr"]}),
    "restore_value": ({}, {"restore_value": ["x_ptr"]}),
    "pre_hook": ({}, {"pre_hook": hook(1)}),
    "what a pre_hook captured": ({"pre_hook": hook(1)}, {"pre_hook": hook(2)}),
    "what a post_hook captured": ({"post_hook": hook(1)}, {"post_hook": hook(2)}),
    "configs": ({}, {"configs": configs(16, 64)}),
    "what a config's hook captured": ({"configs": with_hook(1)}, {"configs": with_hook(2)}),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_kernels_of_one_name_and_key_differ_by(kind: str):
    """Each of these decides the code or the candidates of a launch.

    A kernel that is made anew is the same.
    """
    one, other = (identity(made(**options)) for options in PAIRS[kind])
    assert one != other
    assert [one, other] == [identity(made(**options)) for options in PAIRS[kind]]


def test_kernels_differ_by_a_global_that_they_read():
    """Triton compiles the values of globals in."""
    assert identity(of_globals(1)) != identity(of_globals(2))


def test_configs_that_read_alike_are_numbered():
    """Hooks of one factory have one name.

    A config keeps its number where others are pruned: its text is how it is found again.
    """
    alike = [triton.Config({"BLOCK": 16}, pre_hook=hook(each)) for each in (1, 2)]
    text = describe(alike[0])
    for n_pruned, texts in enumerate(
        [
            [text, f"{text} (#2)", describe(configs(32)[0])],
            [f"{text} (#2)", describe(configs(32)[0])],
        ]
    ):
        pruning = {"early_config_prune": lambda configs, named, n=n_pruned, **kwargs: configs[n:]}
        launch = Launch(
            made(configs=alike + configs(32), prune_configs_by=pruning), (torch.zeros(64), 64), {}
        )
        assert launch.candidates()[1:] == (texts, n_pruned)


def _yields_one_and_raises(
    configs: list[Any], named: dict[str, Any], **kwargs: Any
) -> Iterator[Any]:
    yield configs[0]
    raise ValueError(f"nothing else fits {named['n']}")


FORMS: dict[str, Callable[[list[Any]], Any]] = {
    "generator": lambda configs: (each for each in configs if each.kwargs["BLOCK"] > 16),
    "filter": lambda configs: filter(lambda each: each.kwargs["BLOCK"] > 16, configs),
    "map": lambda configs: map(copy, configs[1:]),
    "iterator": lambda configs: iter(configs[1:]),
    "view": lambda configs: dict(enumerate(configs[1:])).values(),
    "tuple": lambda configs: (*configs[1:],),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_prune_rule_may_return_what_can_be_gone_through_once(form: str):
    """As Triton 3.6 takes it; from 3.9 on Triton asks for its length, and the error says which
    kernel's rules it is.
    """
    pruning = {"early_config_prune": lambda configs, named, **kwargs: FORMS[form](configs)}
    launch = Launch(
        made(configs=configs(16, 32, 64), prune_configs_by=pruning), (torch.zeros(64), 64), {}
    )
    try:
        assert [each.kwargs["BLOCK"] for each in launch.candidates()[0]] == [32, 64]
    except TypeError as error:
        told = r"prune_configs_by of \S*kernel raised TypeError: .* has no len\(\); .*"
        assert re.fullmatch(told, str(error))  # noqa: PT017
        assert triton.__version__ >= "3.9"


@pytest.mark.parametrize("is_partial", [False, True])
@pytest.mark.parametrize(
    ("pruning", "named", "at"),
    [
        (
            {
                "early_config_prune": lambda configs, named, **kw: [
                    next(each for each in configs if each.kwargs["BLOCK_M"] > 8)
                ]
            },
            "early",
            "16",
        ),
        ({"perf_model": lambda BLOCK, **kw: 1 / (BLOCK - 32), "top_k": 1}, "perf_model", "32"),
        ({"early_config_prune": lambda configs: configs}, "prune_configs_by", "16"),
        ({"early_config_prune": _yields_one_and_raises}, "early_config_prune", "32"),
    ],
)
def test_a_prune_rule_that_raises_is_named(
    pruning: dict[str, Any], named: str, at: str, is_partial: bool
):
    """The rule, the kernel and a config; the user's own error is the cause.

    What Triton itself refuses is raised as it is.
    """
    pruning = {
        name: partial(each) if is_partial and callable(each) else each
        for name, each in pruning.items()
    }
    launch = Launch(made(prune_configs_by=pruning), (torch.zeros(64), 64), {})
    with pytest.raises((ValueError, TypeError)) as raised:
        launch.candidates()
    cause, text = raised.value.__cause__, str(raised.value)
    assert text.startswith("prune_configs_by of " if is_partial else named)
    assert f"kernel raised {type(cause).__name__}: {cause}; it " in text
    assert f'"BLOCK={at} num_warps=4' in text or 'it got 2 configs, the first "BLOCK=16' in text
    nothing: Any
    for nothing in ([], iter([])):
        none = Launch(
            made(
                prune_configs_by={"early_config_prune": lambda configs, named, r=nothing, **kw: r}
            ),
            (torch.zeros(64), 64),
            {},
        )
        with pytest.raises((AutotunerError, TypeError)):
            none.candidates()


class Opaque:
    pass


def test_values_that_read_alike_are_two_configs():
    """A config's values compare as Triton compares them, not by their text."""
    kernel = made(configs=[triton.Config({"BLOCK": 16, "MODE": Opaque()}) for _ in range(2)])
    launch = Launch(kernel, (torch.zeros(64), 64), {})
    candidates, texts, _ = launch.candidates()
    assert len(candidates) == len(set(texts)) == 2
    assert [launch.describe(each) for each in candidates] == texts


@triton.jit
def keyed_kernel(x_ptr, act, n):
    pass


PLAIN = {"silu": "silu", None: "None", 1: "1", 1.5: "1.5", torch.float16: "torch.float16"}
VALUES: list[Any] = [
    *PLAIN,
    "None",
    True,
    "True",
    "1",
    1.0,
    "1.0",
    "a,b",
    "a",
    "",
    "'a'",
    "[",
    "inf",
    float("inf"),
    "nan",
]


def test_keys_that_differ_read_differently():
    """None and "None" are two keys, on disk as in ``kernel.cache``.

    Plain words, numbers and dtypes are not quoted.
    """
    tuned = triton.autotune(configs=configs(16, 32), key=["act", "n"])(keyed_kernel)
    texts = [Launch(tuned, (torch.zeros(4), value, 64), {}).key_text for value in VALUES]
    assert len(set(texts)) == len(VALUES)
    assert texts[: len(PLAIN)] == [f"[{text},64,torch.float32]" for text in PLAIN.values()]


class _Names(list[str]):
    """Names of a kernel's arguments; counts how often it is searched."""

    n_searches = 0

    def __contains__(self, name: object) -> bool:
        self.n_searches += 1
        return super().__contains__(name)


def _known(rank: int) -> Any:
    kernel, x, y, seen, is_broken = (
        autotuned(blocks=(16, 32)),
        torch.zeros(64),
        torch.zeros(64),
        list[Any](),
        False,
    )

    def grid(meta: dict[str, Any]) -> tuple[int]:
        seen.append(list(kernel.nargs))
        if is_broken:
            raise ValueError("no grid")
        return (64 // meta["BLOCK"],)

    step = contextual_autotune(n_repeat=1, n_warmup=0, reset=lambda: None)(
        lambda: kernel[grid](x, y, n=64)
    )
    step()
    kernel.arg_names = names = _Names(kernel.arg_names)
    step()
    left, n_searches, is_broken = kernel.nargs, names.n_searches, True
    with pytest.raises(ValueError, match="no grid"):
        step()
    return {tuple(each) for each in seen}, n_searches, left, kernel.nargs


@pytest.mark.processes
def test_a_launch_with_a_known_config():
    """Arguments by name as vanilla has them, and gone afterwards, also after an error; each keyword
    is searched once among the names.

    Triton's own look-up, which searches each argument, is not made.
    """
    names, n_searches, *left = values(on_ranks(1, _known, is_dist=False))[0]
    assert (names, n_searches, left) == ({("x_ptr", "y_ptr")}, 3, [None, None])
