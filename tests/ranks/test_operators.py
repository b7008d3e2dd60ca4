"""``torch.compile`` and ``as_operator``: launchers in compiled graphs, on a host where Dynamo does
not know Triton's kernels.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from triton.runtime.autotuner import Autotuner

from dist_tune import as_operator, autotune, contextual_autotune, to_hashable, tune_all
from tests.steps import QUICK, Filed, autotuned, best, is_unpatched, launch, made, quiet, tuned
from tests.worlds import further, on_each_rank

if TYPE_CHECKING:
    from pathlib import Path

    from torch import SymInt as Unknown


class Graphs(list[torch.fx.GraphModule]):
    """A backend that keeps what it is given to compile: "eager" as Dynamo gives it, "aot" as
    AOTAutograd does.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.backend: Any = self.keep if kind == "eager" else aot_autograd(fw_compiler=self.keep)

    def keep(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.append(graph)
        return graph.forward

    def nodes(self, name: str) -> list[int]:
        """Nodes of each graph that call the operator."""
        return [
            sum(f".{name}." in f".{node.target}." for node in graph.graph.nodes) for graph in self
        ]


def shifted(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """A launch, in a function with defaults."""
    return launch(KERNELS[0], x) * scale


KERNELS = list[Any]()


def fake_of(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return torch.empty_like(x)


@on_each_rank(cases=["eager", "aot"])
def test_one_node_of_the_graph_that_all_ranks_tune(rank: int, kind: str):
    """It is tuned where the compiled graphs of both ranks first run it, and again for a size that
    the same graph serves.
    """
    KERNELS[:] = [autotuned()]
    launcher = contextual_autotune(is_dist=True, **QUICK)(shifted)
    operator = as_operator(launcher, name=f"dist_tune_tests::shifted_{kind}", fake=fake_of)
    graphs = Graphs(kind)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: operator(x + rank, 3.0) + operator(x), backend=graphs.backend, fullgraph=True
    )
    for size in (64, 64, 128):
        x = torch.arange(float(size))
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), (x + rank + 1) * 3 + x + 1)
    assert (graphs.nodes(f"shifted_{kind}"), len(operator.records), len(KERNELS[0].cache)) == (
        [2],
        2,
        2,
    )
    assert operator.records is launcher.records
    return best(KERNELS[0]), [each.key for each in operator.records]


@on_each_rank()
def test_a_function_with_configs(rank: int):
    """What its configs fill, and what a call says of tuning, is no argument of the operator."""

    @autotune(
        [{"factor": 2.0}, {"factor": 2.0, "n_parts": 2}], lambda x, add: to_hashable(x), **QUICK
    )
    def scaled(x: torch.Tensor, add: int, factor: float = 0.0, n_parts: int = 1) -> torch.Tensor:
        return torch.cat([factor * part for part in x.chunk(n_parts)]) + add

    operator = as_operator(
        scaled, name="dist_tune_tests::scaled", fake=lambda x, add: torch.empty_like(x)
    )
    assert str(inspect.signature(operator)) == "(x: torch.Tensor, add: int) -> torch.Tensor"
    graphs = Graphs("aot")
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: operator(x, 1) - 1, backend=graphs.backend, fullgraph=True)
    assert [compiled(torch.ones(4)).tolist() for _ in range(2)] == [[2.0] * 4] * 2
    assert graphs.nodes("scaled") == [1]
    tune_all(operator, [(torch.ones(8), 1)])
    return len(operator.records), [each.best.config for each in scaled.records]


@on_each_rank()
def test_an_argument_that_is_written(rank: int):
    """Functionalized by AOTAutograd; no fake is needed where nothing is returned.

    As part of a larger step it is a site of that.
    """
    kernel = autotuned()

    def fill(x: torch.Tensor, y: torch.Tensor) -> None:
        launch(kernel, x, y)

    operator = as_operator(fill, name="dist_tune_tests::fill", mutates_args=["y"])

    def body(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        operator(x * 2, y)
        return y + 1

    step = contextual_autotune(is_dist=True, **QUICK)(
        torch.compile(body, backend="aot_eager", fullgraph=True)
    )
    assert [step(torch.ones(64)).tolist() for _ in range(2)] == [[4.0] * 64] * 2
    assert (len(step.records), operator.records) == (1, [])
    return best(kernel)


@on_each_rank(cases=[further("inductor")])
def test_inductor_leaves_it_whole(rank: int, backend: str):
    """As the other backends do; its C++ takes a CPU a quarter of a minute."""
    KERNELS[:] = [autotuned()]
    operator = as_operator(contextual_autotune(is_dist=True, **QUICK)(shifted), fake=fake_of)
    compiled = torch.compile(lambda x: operator(2 * x) + 1, backend=backend, fullgraph=True)
    assert [compiled(torch.ones(n))[0].item() for n in (64, 64)] == [4.0] * 2
    assert len(operator.records) == 1


@on_each_rank()
def test_its_backward_is_torchs_own(rank: int):
    """Without one it raises torch's error; with ``register_autograd`` a compiled training step
    tunes forward and backward.
    """
    KERNELS[:] = [autotuned()]
    operator = as_operator(
        contextual_autotune(is_dist=True, **QUICK)(shifted),
        name="dist_tune_tests::differentiable",
        fake=fake_of,
    )
    x = torch.ones(64, requires_grad=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        operator(x).sum().backward()
    torch.library.register_autograd(
        "dist_tune_tests::differentiable",
        lambda context, gradient: (operator(gradient.contiguous()), None),
    )
    torch.compile(lambda x: operator(x).sum(), backend="aot_eager", fullgraph=True)(x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 64


def bare(x, w: torch.Tensor):
    raise AssertionError


def unknown(x: Unknown) -> torch.Tensor:
    raise AssertionError


def written(x: torch.Tensor, y: torch.Tensor) -> None:
    raise AssertionError


class Launcher:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError


MISTAKES: dict[str, tuple[type[Exception], Any, dict[str, Any], str]] = {
    "a tensor as fake": (TypeError, shifted, {"fake": torch.zeros(1)}, "fake must be a function"),
    "a number as launcher": (
        TypeError,
        3,
        {},
        "launcher must be a function, launcher(*args, **kwargs), got 3",
    ),
    "an object without a name": (
        ValueError,
        Launcher(),
        {},
        "of an operator that is not there yet, got 'dist_tune::'",
    ),
    "a number as name": (ValueError, shifted, {"name": 3}, "not there yet, got 3"),
    "writes what it does not name": (
        ValueError,
        written,
        {"fake": lambda x, y: None},
        (
            "dist_tune::written returns nothing and mutates nothing: name what it writes in"
            " mutates_args"
        ),
    ),
    "no annotations": (ValueError, bare, {}, "Parameter x must have a type annotation"),
    "a type of checkers alone": (NameError, unknown, {}, "name 'Unknown' is not defined"),
    "no namespace": (
        ValueError,
        shifted,
        {"name": "shifted"},
        "name must be \"namespace::name\" of an operator that is not there yet, got 'shifted'",
    ),
    "torch's own name": (
        ValueError,
        shifted,
        {"name": "aten::add"},
        "not there yet, got 'aten::add'",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_told(case: str):
    """What torch checks is torch's error."""
    error, launcher, options, told = MISTAKES[case]
    with pytest.raises(error) as raised:
        as_operator(launcher, **options)
    assert told in str(raised.value)


def test_a_name_is_given_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Torch would put the second launcher in the place of the first, also for calls of the
    first.
    """
    quiet(monkeypatch, tmp_path)

    def doubled(x: torch.Tensor) -> torch.Tensor:
        """Twice as much."""
        return 2 * x

    first = as_operator(doubled, name="dist_tune_tests::doubled", fake=torch.empty_like)
    with pytest.raises(ValueError, match="not there yet, got 'dist_tune_tests::doubled'"):
        as_operator(shifted, name="dist_tune_tests::doubled", fake=fake_of)
    assert first(torch.ones(2)).tolist() == [2.0, 2.0]
    assert (first.__name__, first.__doc__, first.records) == ("doubled", "Twice as much.", [])
    assert torch.library.opcheck(first, (torch.ones(2),))  # type: ignore[arg-type]


class Layer:
    scale = 3.0

    def scaled(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return x * self.scale * factor


@pytest.mark.parametrize("kind", ["plain", "closure", "function"])
def test_a_bound_method_is_a_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str):
    """Its object is no argument of the operator, tuned or not."""
    quiet(monkeypatch, tmp_path)
    decorate = {
        "closure": contextual_autotune(),
        "function": autotune([{"factor": 1.0}], None),
    }.get(kind, lambda method: method)
    operator = as_operator(decorate(Layer().scaled), name=f"dist_tune_tests::scaled_{kind}")
    assert operator(torch.ones(2)).tolist() == [3.0, 3.0]
    assert (
        list(inspect.signature(operator).parameters)
        == ["x", "factor"][: 1 if kind == "function" else 2]
    )


# -- kernels of a tuned step in parts that are compiled --------------------------------------------


@on_each_rank(cases=[Autotuner, Filed])
def test_a_compiled_step_that_launches_kernels(rank: int, kind: Any):
    """Dynamo runs the patched launch as it is, whose constants it cannot read; the kernel is tuned,
    and Triton is as before.
    """
    kernel = made(kind)
    inner = torch.compile(lambda x: launch(kernel, x) * 2, backend="eager")
    step = tuned(None, lambda x: inner(x))
    before = dict(vars(kind.run))
    assert [step(torch.zeros(n))[0].item() for n in (64, 64, 32)] == [2.0] * 3
    assert (len(step.records), is_unpatched(), vars(kind.run) == before) == (2, True, True)


@on_each_rank(cases=["operator", further("disabled")])
def test_kernels_of_an_operator_in_a_compiled_part_are_tuned(rank: int, case: str):
    """A custom operator stays in the one graph, a function that is not to be compiled breaks it;
    both run in Python.
    """
    KERNELS[:] = [autotuned(blocks=(16, 32))]
    opaque: Any = torch.compiler.disable(shifted)
    if case == "operator":
        opaque = as_operator(shifted, name="dist_tune_tests::launched", fake=fake_of)
    inner = torch.compile(
        lambda x: opaque(x + 1) * 2, backend="aot_eager", fullgraph=case == "operator"
    )
    step = tuned(None, lambda x: inner(x))
    assert [step(torch.zeros(64))[0].item() for _ in range(2)] == [4.0, 4.0]
    assert (len(step.records), len(KERNELS[0].cache), is_unpatched()) == (1, 1, True)
