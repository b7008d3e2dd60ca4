"""Tuned closures and functions that are traced and not run: first config, nothing tuned, nothing
kept.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dist_tune import autotune, contextual_autotune, to_hashable
from tests.steps import quiet


class Made:
    """A function whose configs are told apart by its result, and a closure that calls it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        @autotune(
            [{"scale": 2.0}, {"scale": 3.0}],
            lambda x: to_hashable(x),
            n_warmup=0,
            n_repeat=1,
            **options,
        )
        def scaled(x: torch.Tensor, scale: float = 0.0) -> torch.Tensor:
            return x * scale

        @contextual_autotune(n_warmup=0, n_repeat=1)
        def step(x: torch.Tensor) -> torch.Tensor:
            return scaled(x) + 1

        self.scaled, self.step, self._folder = scaled, step, folder

    def assert_untuned(self, name: str = "") -> None:
        """No record was made, in memory or on disk, and one line of the log says so of the function
        or closure.
        """
        assert (self.scaled.records, self.step.records, list(self._folder.rglob("*.json"))) == (
            [],
            [],
            [],
        )
        line = f"{name} was traced, or called with tensors without data: first config"
        assert not name or (self._folder / "logs" / "rank-0.log").read_text().count(line) == 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Made:
    quiet(monkeypatch, tmp_path)
    torch._dynamo.reset()
    return Made(tmp_path)


def under_mode(function: Callable[[torch.Tensor], torch.Tensor], kind: str) -> torch.Tensor:
    """The result for a tensor without data."""
    mode = FakeTensorMode(shape_env=ShapeEnv() if kind == "symbolic" else None)
    match kind:
        case "mode":
            with mode:
                return function(torch.ones(4))
        case "meta":
            return function(torch.ones(4, device="meta"))
        case "functional":
            wrapped = torch._to_functional_tensor(torch.ones(4))
            torch._enable_functionalization(reapply_views=False)
            try:
                return function(wrapped)
            finally:
                torch._disable_functionalization()
    return function(mode.from_tensor(torch.ones(4), static_shapes=kind == "argument"))


@pytest.mark.parametrize("name", ["scaled", "step"])
@pytest.mark.parametrize("kind", ["mode", "symbolic", "argument", "meta", "functional"])
def test_tensors_without_data(name: str, kind: str, made: Made):
    """The shapes are right; the first call with data tunes."""
    function = getattr(made, name)
    assert [tuple(under_mode(function, kind).shape) for _ in range(2)] == [(4,), (4,)]
    made.assert_untuned(name)
    function(torch.ones(4))
    assert len(function.records) == 1


@pytest.mark.parametrize("name", ["scaled", "step"])
@pytest.mark.parametrize(("backend", "dynamic"), [("eager", False), ("aot_eager", True)])
def test_torch_compile_in_one_graph(name: str, backend: str, dynamic: bool, made: Made):
    """Without a graph break: the first config is compiled in, also after the function was tuned."""
    function = getattr(made, name)
    compiled = torch.compile(
        lambda x: function(x).sum(), backend=backend, fullgraph=True, dynamic=dynamic
    )
    expected = 8.0 if name == "scaled" else 12.0
    assert [compiled(torch.ones(4)).item() for _ in range(2)] == [expected] * 2
    made.assert_untuned(name)
    function(torch.ones(4))
    assert len(function.records) == 1
    assert compiled(torch.ones(4)).item() == expected


@pytest.mark.parametrize("strict", [False, True])
def test_torch_export(strict: bool, made: Made):
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = made.step(x)
            return result

    sizes = {"x": {0: torch.export.Dim("n", min=2, max=64)}}
    program = torch.export.export(Model(), (torch.ones(4),), dynamic_shapes=sizes, strict=strict)
    assert program.module()(torch.ones(8)).tolist() == [3.0] * 8
    made.assert_untuned()


def test_a_compiled_step_inside_a_closure(made: Made):
    """Dynamo meets the function while the closure listens."""
    inner = torch.compile(lambda x: made.scaled(x).sum(), backend="eager", fullgraph=True)
    closure = contextual_autotune(n_warmup=0, n_repeat=1)(lambda x: inner(x))
    assert [closure(torch.ones(4)).item() for _ in range(2)] == [8.0, 8.0]
    assert closure.records == []


def test_a_missing_shape_beside_a_traced_one(made: Made, tmp_path: Path):
    """With nearest=, too, the cache is not asked."""
    assert Made(tmp_path, nearest=True).scaled(torch.ones(4, device="meta"), autotune=False).is_meta
    assert not (tmp_path / "cache").exists()
