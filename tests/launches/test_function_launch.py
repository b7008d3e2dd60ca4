"""Functions that have configs: forms in which they come, how they look, what a caller may fix,
keys, candidates, and which code counts.
"""

from __future__ import annotations

import copy
import functools
import inspect
import io
import math
import pickle
import pydoc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import triton
import triton.language as tl

from dist_tune import NoValidConfigError, autotune, contextual_autotune, power_of_two, to_hashable
from dist_tune.configs import as_configs, describe, distinct
from dist_tune.launches.function_launch import FunctionLaunch, TunableFunction
from tests.steps import BLOCKS, QUICK, quiet

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quiet(monkeypatch, tmp_path)


# -- forms -----------------------------------------------------------------------------------------


def ordinary(x: int, y: int = 2, *, block: int = 0) -> int:
    return x + y


def variadic(*xs: int, block: int = 0) -> int:
    return sum(xs)


def anything(*xs: int, **options: Any) -> int:
    return sum(xs) + int(options.get("more", 0))


class Caller:
    def __call__(self, x: int, block: int) -> int:
        return x

    def method(self, x: int, block: int) -> int:
        return x


class Layer:
    """Two instances of which share what was tuned."""

    ran: list[str] = []  # noqa: RUF012  # a test's

    def __init__(self, name: str) -> None:
        self.name = name

    @autotune(BLOCKS, lambda self, x: x, **QUICK)
    def forward(self, x: int, block: int = 0) -> str:
        self.ran.append(self.name)
        return f"{self.name} {x}"

    @staticmethod
    @autotune(BLOCKS, None, **QUICK)
    def static(x: int, block: int) -> int:
        return x

    @classmethod
    @autotune(BLOCKS, None, **QUICK)
    def of_class(cls, x: int, block: int) -> str:
        return f"{cls.__name__} {x}"


def test_methods():
    """An instance's, a class's and static ones; a second instance uses what the first one's call
    has tuned.
    """
    a, b = Layer("a"), Layer("b")
    assert (a.forward(1), b.forward(1), b.forward(x=1)) == ("a 1", "b 1", "b 1")
    assert Layer.ran.count("b") == 2
    assert (Layer.static(3), a.of_class(4)) == (3, "Layer 4")
    assert Layer.forward(a, 2) == "a 2"
    records = vars(Layer)["forward"].records
    assert [record.kernel for record in records] == [f"{__name__}.Layer.forward"] * 2


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "value", "name"),
    [
        (ordinary, (1,), {}, 3, "ordinary"),
        (ordinary, (), {"y": 5, "x": 1}, 6, "ordinary"),
        (variadic, (1, 2, 3), {}, 6, "variadic"),
        (variadic, (), {}, 0, "variadic"),
        (anything, (1, 2), {"more": 4}, 7, "anything"),
        (lambda x, block: x, (1,), {}, 1, "<lambda>"),
        (functools.partial(ordinary, y=10), (1,), {}, 11, "ordinary"),
        (functools.partial(functools.partial(ordinary, 1), 2), (), {}, 3, "ordinary"),
        (Caller(), (8,), {}, 8, "Caller"),
        (Caller().method, (9,), {}, 9, "Caller.method"),
    ],
)
def test_what_can_be_called_can_be_tuned(
    function: Any, args: Any, kwargs: Any, value: Any, name: str
):
    """Positional and keyword arguments, defaults, lambdas, partials, objects: the value is that of
    an ordinary call.
    """
    tuned = autotune(BLOCKS, None, **QUICK)(function)
    assert [tuned(*args, **kwargs), tuned(*args, **kwargs)] == [value] * 2
    (record,) = tuned.records
    assert record.kernel == f"{__name__}.{name}"
    assert [each.config for each in record.candidates] == ["block=1", "block=2", "block=4"]


class Scaling(torch.nn.Module):
    """Decorates a method of its own, as models do that are built from options."""

    def __init__(self, decorate: Any) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.forward = decorate(self.forward)  # type: ignore[method-assign]  # as users do

    def forward(self, x: torch.Tensor, block: int = 0) -> torch.Tensor:
        return x * self.scale


def saved(model: Scaling) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


RULES: dict[str, Any] = {
    "prune_fn": lambda config, x: config["block"] > 1,
    "check": lambda result, x: result.shape == x.shape,
}


@pytest.mark.parametrize(
    "decorate",
    [
        contextual_autotune(**QUICK),
        autotune(BLOCKS, lambda x: x.shape, **QUICK, **RULES),
        autotune(BLOCKS, key=["x"], nearest=True, **QUICK),
    ],
)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, saved, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_a_copy_of_an_object_whose_bound_method_is_decorated_computes_with_its_own_values(
    decorate: Any, copied: Any
):
    """Made before or after the original's first call, and of a copy; the method itself comes with a
    copy of its object, too.
    """
    model, x = Scaling(decorate), torch.ones(4)
    early = copied(model)
    values = [model(x)]
    late = copied(model)
    later = copied(late)
    method = copied(model.forward)
    for k, each in enumerate((early, late, later, method.__self__)):
        each.scale.data.fill_(2.0 + k)
    values += [early(x), late(x), later(x=x), method(x), model(x)]
    assert [value.unique().tolist() for value in values] == [
        [1.0],
        [2.0],
        [3.0],
        [4.0],
        [5.0],
        [1.0],
    ]


def test_a_decorated_bound_method_is_one():
    """It has the signature, records and configs of before; rules and ``key=`` know what the call is
    given, and not the object.
    """
    options: Any = {
        **QUICK,
        "prune_fn": lambda config, x: config["block"] > 1,
        "check": lambda x: x,
    }
    tuned: Any = autotune(BLOCKS, key=["x"], **options)(Caller().method)
    assert (
        tuned(8),
        tuned(x=8),
        tuned(9, autotune=False),
        list(inspect.signature(tuned).parameters)[:2],
    ) == (8, 8, 9, ["x", "block"])
    assert [len(each.candidates) for each in tuned.records] == [2]
    assert (tuned.configs, tuned.__name__, tuned.__self__.method(7, 1)) == (BLOCKS, "method", 7)


def test_a_builtin_without_a_signature():
    """Nothing can be checked before it is called."""
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(torch.add)
    tuned = autotune([{"alpha": 1}, {"alpha": 2}], None, **QUICK)(torch.add)
    assert tuned(torch.ones(2), 0 * torch.ones(2)).tolist() == [1.0, 1.0]


def test_a_function_without_source():
    """As one typed into an interpreter."""
    names: dict[str, Any] = {"math": math}
    exec("def typed(x, block):\n    return math.sqrt(x)", names)
    tuned = autotune(BLOCKS, None, n_warmup=0, n_repeat=1)(names["typed"])
    assert tuned(16.0) == 4.0
    again = autotune(BLOCKS, None, n_warmup=0, n_repeat=1)(names["typed"])
    assert again(16.0) == 4.0
    assert again.records[0].is_recalled


@triton.jit
def kernel(x_ptr, block: tl.constexpr):
    pass


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (staticmethod(ordinary), "put @staticmethod above @autotune"),
        (classmethod(lambda cls, block: None), "put @classmethod above @autotune"),
        (3, "autotune decorates ordinary functions"),
        (kernel, "Those have triton.autotune"),
        (
            triton.autotune([triton.Config({"block": 1})], key=[])(kernel),
            "Those have triton.autotune",
        ),
    ],
)
def test_what_cannot_be_tuned_says_why(function: Any, words: str):
    """At decoration."""
    with pytest.raises(TypeError, match=words):
        autotune(BLOCKS, None)(function)


# -- as others see them; tests/test_wheel.py has what type checkers say ----------------------------


def scaled(x: int, factor: float = 1.0, *, block: int = 0, **more: Any) -> float:
    """Scale it."""
    return x * factor


def test_help_shows_the_keywords_of_the_tuner():
    """Behind the function's own parameters, before ``**more``; a method's without ``self``."""
    tuned: Any = autotune(BLOCKS, None)(scaled)
    text = re.sub("\x08.", "", pydoc.render_doc(tuned))
    own = "scaled(x: 'int', factor: 'float' = 1.0, *, block: 'int' = 0, "
    keywords = (
        "autotune: 'bool' = True, autotune_verbose: 'bool' = False, autotune_pg: 'ProcessGroup |"
        " None' = None, autotune_allow_arg_overwrite: 'bool' = False"
    )
    # Python 3.13 puts each parameter on a line of its own.
    flat = re.sub(r"(?<=\() | (?=\))", "", " ".join(text.split()))
    assert f"{own}{keywords}, **more: 'Any') -> 'float'" in flat
    assert list(inspect.signature(tuned.__get__(3)).parameters)[:3] == [
        "factor",
        "block",
        "autotune",
    ]


def test_a_decorated_function_looks_like_itself():
    """By both decorators; and one that chooses shows from what."""
    tuned, closure = autotune([*BLOCKS, BLOCKS[0]], None)(scaled), contextual_autotune()(scaled)
    for each in (tuned, closure):
        assert (each.__wrapped__, each.__name__, each.__doc__) == (scaled, "scaled", "Scale it.")
    assert inspect.signature(closure) == inspect.signature(scaled)
    assert (tuned.configs, tuned.records) == (BLOCKS, [])


def tunable(
    function: Callable[..., Any],
    space: Any = BLOCKS,
    key_fn: Any = None,
    prune_fn: Any = None,
    **options: Any,
) -> TunableFunction:
    given = {"check": None, "bucket": None, **options}
    return TunableFunction(
        function, *distinct(as_configs(space, function)), key_fn, prune_fn, **given
    )


def launch(of: TunableFunction, *args: Any, **kwargs: Any) -> FunctionLaunch:
    return FunctionLaunch(of, of.key_of(args, kwargs), args, kwargs, is_whole=True)


# -- what the caller says --------------------------------------------------------------------------


def _spied(space: Any = None, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    ran: list[dict[str, Any]] = []

    def function(x: int, block: int, stages: int = 7) -> int:
        ran.append({"block": block, "stages": stages})
        return x

    space = space or [{"block": block, "stages": stages} for block in (1, 2) for stages in (3, 4)]
    return (
        autotune(space, lambda x: x, options.pop("prune_fn", None), **{**QUICK, **options})(
            function
        ),
        ran,
    )


def test_calls_with_nothing_to_choose():
    """autotune=False uses the first config, with what the caller gives; a config that is wholly
    given is an ordinary call.
    """
    tuned, ran = _spied()
    assert tuned(1, autotune=False) == 1
    tuned(1, autotune=False, autotune_allow_arg_overwrite=True, stages=9)
    tuned(1, block=30, stages=40, autotune_allow_arg_overwrite=True)
    assert ran == [
        {"block": 1, "stages": 3},
        {"block": 1, "stages": 9},
        {"block": 30, "stages": 40},
    ]
    assert tuned.records == []


def test_config_arguments_of_the_caller_are_refused_unless_asked_for():
    """The message says which, and how to ask."""
    tuned, ran = _spied()
    with pytest.raises(
        ValueError, match=r"called with \['block'\].*autotune_allow_arg_overwrite=True"
    ):
        tuned(1, block=3)
    with pytest.raises(ValueError, match=r"\['block', 'stages'\]"):
        tuned(1, block=3, stages=1, autotune=False)
    assert ran == []


def test_a_partly_given_config_is_tuned_for_itself():
    """The rest is chosen with what was given, under a key of its own; key_fn and prune_fn need not
    know.
    """
    pruned: list[Any] = []

    def prune_fn(config: Any, x: int) -> bool:
        pruned.append((config["block"], config["stages"]))
        return True

    tuned, ran = _spied(prune_fn=prune_fn)
    tuned(1, stages=9, autotune_allow_arg_overwrite=True)
    assert {(each["block"], each["stages"]) for each in ran} == {(1, 9), (2, 9)}
    assert pruned == [(1, 9), (2, 9)]
    record = tuned.records[0]
    assert (record.key, [each.config for each in record.candidates]) == (
        "[1,'stages=9']",
        ["block=1 stages=9", "block=2 stages=9"],
    )
    n_ran = len(ran)
    tuned(1, stages=9, autotune_allow_arg_overwrite=True)
    assert len(ran) == n_ran + 1
    tuned(1)
    assert tuned.records[1].key == "[1]"
    assert len(tuned.records[1].candidates) == 4
    tuned(1, stages=8, autotune_allow_arg_overwrite=True)
    assert len(tuned.records) == 3


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "missing a required argument: 'x'"),
        ((1,), {"z": 1}, "unexpected keyword argument 'z'"),
        (
            (1, 2),
            {},
            r"multiple values for argument 'block'; autotune passes \['block'\] as keywords",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_the_callers_mistake(args: Any, kwargs: Any, words: str):
    """And no reason to drop every config."""
    tuned = autotune(BLOCKS, None, **QUICK)(lambda x, block: x)
    with pytest.raises(TypeError, match=f"<lambda>: .*{words}"):
        tuned(*args, **kwargs)
    assert tuned.records == []


# -- keys ------------------------------------------------------------------------------------------


def test_a_key_that_cannot_be_found_again_is_refused():
    """A list cannot be hashed, and a tensor is equal to no other: either would be tuned for
    ever.
    """
    listed: Any = autotune(BLOCKS, cast("Any", lambda x: [1, 2]), **QUICK)(lambda x, block: x)
    with pytest.raises(TypeError, match=r"key_fn of .*<lambda> returned \[1, 2\].*to_hashable"):
        listed(1)
    for key_fn in (lambda x: x, lambda x: (1, (x,)), lambda x: frozenset([x])):
        tensor: Any = autotune(BLOCKS, key_fn, **QUICK)(lambda x, block: x)
        with pytest.raises(TypeError, match=r"returned a tensor.*to_hashable"):
            tensor(torch.ones(1))
    once: Any = autotune(BLOCKS, lambda x: map(int, x), **QUICK)(lambda x, block: x)
    with pytest.raises(
        TypeError,
        match=r"returned an object of type map, which can be gone through once: return a tuple",
    ):
        once((1, 2))
    right = autotune(BLOCKS, lambda x: to_hashable([x, {"a": 1}]), **QUICK)(lambda x, block: x)
    right(torch.ones(1))
    right(torch.ones(1))
    assert len(right.records) == 1
    assert right.records[0].key == "[((1),(1),torch.float32),(('a',1))]"


def test_sizes_in_classes_share_a_config():
    """With a bucket, sizes near each other have one key."""
    tuned = autotune(BLOCKS, lambda x, y: (x, y, "fast"), bucket=power_of_two, **QUICK)(
        lambda x, y, block: x
    )
    for x in (65, 100, 128):
        tuned(x, 1)
    tuned(129, 1)
    assert [record.key for record in tuned.records] == ["[128,1,'fast']", "[256,1,'fast']"]


def test_a_key_reads_the_same_wherever_it_is_one():
    """One value or a tuple of one; nothing at all without key_fn."""
    assert launch(tunable(ordinary, key_fn=lambda x: x), 3).key_text == "[3]"
    assert launch(tunable(ordinary, key_fn=lambda x: (x,)), 3).key_text == "[3]"
    assert launch(tunable(ordinary), 3).key_text == "[]"


# -- candidates and code ---------------------------------------------------------------------------


def test_prune_fn_sees_the_arguments_and_keeps_what_is_true():
    """Of the config it sees mapping and fields; what it keeps stays in order; a rule that keeps
    nothing is an error.
    """
    space = [
        {"gemm_config": triton.Config({"BLOCK_M": block}, num_warps=2)} for block in (16, 32, 64)
    ]

    def rule(config: Any, x: int, least: int = 0) -> Any:
        assert (
            config["gemm_config"]["BLOCK_M"]
            == config["gemm_config"].kwargs["BLOCK_M"]
            == config["BLOCK_M"]
        )
        return config["BLOCK_M"] >= least and x

    def gemm(x: int, gemm_config: triton.Config, least: int = 0) -> int:
        return x

    of = tunable(gemm, space, prune_fn=rule)
    assert launch(of, 1, least=32).candidates() == (
        space[1:],
        [describe(each) for each in space[1:]],
        1,
    )
    with pytest.raises(
        NoValidConfigError, match=r"gemm\[\]: prune_fn keeps none of 3 configs. It must return True"
    ):
        launch(of, 0).candidates()


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        (
            {"prune_fn": lambda config, x: config["BLOCK_M"] > 1},
            ValueError,
            "prune_fn of .*<lambda> raised KeyError: 'BLOCK_M'; {asked}",
        ),
        (
            {"prune_fn": lambda config: True},
            TypeError,
            r"prune_fn of .* raised TypeError: .* takes 1 positional argument.*; {asked}",
        ),
        (
            {"prune_fn": lambda config, x: config.num_ctas},
            ValueError,
            r"AttributeError: this config has no num_ctas; .*; {asked}",
        ),
        (
            {"key_fn": lambda x: x.shape[1]},
            ValueError,
            r"key_fn of .*<lambda> raised IndexError: .*; it was called with \(tensor \[3\]\)",
        ),
        (
            {"key_fn": lambda: 1},
            TypeError,
            r"key_fn of .*<lambda> raised TypeError: .* takes 0 positional arguments",
        ),
        (
            {"key_fn": lambda x: 3, "bucket": lambda n: 1 // 0},
            ValueError,
            "bucket of .* ZeroDivisionError: .* asked of each size in the key 3",
        ),
        (
            {"key_fn": lambda x: x.a, "bucket": power_of_two},
            ValueError,
            "key_fn of .*<lambda> raised AttributeError",
        ),
    ],
)
def test_a_rule_that_raises_is_named_with_the_config(
    given: dict[str, Any], kind: type[Exception], words: str
):
    """Which rule, of which function, asked of which config in which call; the user's own error is
    the cause. The next call asks again.
    """
    tuned: Any = autotune(BLOCKS, **{"key_fn": None, **given, **QUICK})(lambda x, block: x)
    words = words.format(
        asked=r"it was asked of config \"block=1\" in a call with \(tensor \[3\]\)"
    )
    for _ in range(2):
        with pytest.raises(kind, match=words) as raised:
            tuned(torch.ones(3))
        assert type(raised.value) is kind
        assert type(raised.value.__cause__).__name__ in str(raised.value)


def test_the_code_of_configs_and_check_counts():
    """A record is found again by the code that runs: that of the function, of functions among its
    configs, of hooks, of the check.
    """

    def made(scale: int) -> Any:
        return lambda x: scale * x

    def of(value: Any, **options: Any) -> str:
        return tunable(lambda x, act: act(x), [{"act": value}], **options).code_for(())

    assert of(made(1)) == of(made(1))
    assert of(made(1)) != of(made(2))
    assert of(1, check=made(1)) != of(1, check=made(2))
    hooked = [triton.Config({}, pre_hook=made(scale)) for scale in (1, 2, 2)]
    assert of(hooked[0]) != of(hooked[1]) == of(hooked[2])


def test_a_methods_source_is_that_of_its_class():
    """It may call other methods through self; a function whose first argument has a method of its
    name is none.
    """

    def tuned(value: int) -> Any:
        class Layer:
            def helper(self) -> int:
                return value

            @autotune([{"n": 1}], None, n_warmup=0, n_repeat=1)
            def step(self, n: int) -> int:
                return self.helper() * n

        return Layer

    def source(value: int) -> str:
        layer = tuned(value)
        layer().step()
        return str(vars(layer)["step"].records[0].cache_key.source)

    assert source(1) == source(1) != source(2)
