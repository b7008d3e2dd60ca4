"""Tuned closures and functions that are traced and not run: first config, nothing tuned, nothing kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dist_tune import autotune, contextual_autotune, to_hashable
from tests.function_options import quiet

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    quiet(monkeypatch, tmp_path)
    return tmp_path / "logs" / "rank-0.log"


class Made:
    """A function whose configs are told apart by its result, and a closure that calls it."""

    def __init__(self, **options: Any) -> None:
        given = {"n_warmup": 0, "n_repeat": 1, **options}

        @autotune([{"scale": 2.0}, {"scale": 3.0}], lambda x: to_hashable(x), **given)
        def scaled(x: torch.Tensor, scale: float = 0.0) -> torch.Tensor:
            return x * scale

        @contextual_autotune(n_warmup=0, n_repeat=1)
        def step(x: torch.Tensor) -> torch.Tensor:
            return scaled(x) + 1

        self.scaled, self.step = scaled, step


def kept(folder: Path) -> list[Path]:
    return list(folder.rglob("*.json"))


@pytest.mark.parametrize("name", ["scaled", "step"])
@pytest.mark.parametrize("kind", ["mode", "symbolic", "argument", "meta", "functional"])
def test_tensors_without_data(name: str, kind: str, log: Path, tmp_path: Path):
    """The shapes are right, no record is made, one line in the log; the first call with data tunes."""
    made = Made()
    function: Any = getattr(made, name)
    mode = FakeTensorMode(shape_env=ShapeEnv() if kind == "symbolic" else None)
    for _ in range(2):
        if kind == "mode":
            with mode:
                got = function(torch.ones(4))
        elif kind == "meta":
            got = function(torch.ones(4, device="meta"))
        elif kind == "functional":
            wrapped = torch._to_functional_tensor(torch.ones(4))
            torch._enable_functionalization(reapply_views=False)
            try:
                got = function(wrapped)
            finally:
                torch._disable_functionalization()
        else:
            got = function(mode.from_tensor(torch.ones(4), static_shapes=kind == "argument"))
        assert tuple(got.shape) == (4,)
    assert (made.scaled.records, made.step.records, kept(tmp_path)) == ([], [], [])
    assert len(re.findall(f"DEBUG .*{name} was traced, or called with tensors without data: first config", log.read_text())) == 1
    function(torch.ones(4))
    assert len(function.records) == 1


@pytest.mark.parametrize("name", ["scaled", "step"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_in_one_graph(name: str, backend: str, dynamic: bool, log: Path, tmp_path: Path):
    """Without a graph break: the first config is compiled in, also after the function was tuned."""
    made = Made()
    function: Any = getattr(made, name)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: function(x).sum(), backend=backend, fullgraph=True, dynamic=dynamic)
    expected = 8.0 if name == "scaled" else 12.0
    assert [compiled(torch.ones(4)).item() for _ in range(2)] == [expected] * 2
    assert (made.scaled.records, made.step.records, kept(tmp_path)) == ([], [], [])
    assert log.read_text().count(f"{name} was traced") == 1
    function(torch.ones(4))
    assert len(function.records) == 1
    assert compiled(torch.ones(4)).item() == expected


@pytest.mark.parametrize("strict", [False, True])
def test_torch_export(strict: bool, tmp_path: Path):
    made = Made()

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = made.step(x)
            return result

    sizes = {"x": {0: torch.export.Dim("n", min=2, max=64)}}
    program = torch.export.export(Model(), (torch.ones(4),), dynamic_shapes=sizes, strict=strict)
    assert program.module()(torch.ones(8)).tolist() == [3.0] * 8
    assert (made.scaled.records, made.step.records, kept(tmp_path)) == ([], [], [])


def test_a_compiled_step_inside_a_closure():
    """Dynamo meets the function while the closure listens."""
    made = Made()
    torch._dynamo.reset()
    inner = torch.compile(lambda x: made.scaled(x).sum(), backend="eager", fullgraph=True)
    closure = contextual_autotune(n_warmup=0, n_repeat=1)(lambda x: inner(x))
    assert [closure(torch.ones(4)).item() for _ in range(2)] == [8.0, 8.0]
    assert closure.records == []


def test_a_missing_shape_beside_a_traced_one(tmp_path: Path):
    """With nearest=, too, the cache is not asked."""
    made = Made(nearest=True)
    assert made.scaled(torch.ones(4, device="meta"), autotune=False).is_meta
    assert not (tmp_path / "cache").exists()
