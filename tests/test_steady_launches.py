"""What the host does in a steady step of kernels/: launches that Triton need not look up again. No GPU is needed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of the current GPU."""
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_device=lambda: 0))


class Kernel(JITFunction[Any]):  # type: ignore[misc]  # Triton has no types
    """A `triton.jit` kernel that notes its launches, by Triton and by its compiled form."""

    arg_names = ("x", "y", "n", "BLOCK", "WIDTH")

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.pre_run_hooks: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def looked_up(*args: Any, **fixed: Any) -> Any:
            self.launches.append(("looked up", grid, args, fixed))
            return {(*grid, 1, 1)[:3]: lambda *args: self.launches.append(("kept", grid, args))}

        return looked_up

    @property
    def ways(self) -> list[str]:
        """How each launch was made."""
        return [how for how, *_ in self.launches]


class Interpreted:
    """A kernel that Triton interprets; a launch answers with nothing."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **fixed: self.launches.append(grid)


def launch_once(kernel: Any) -> None:
    """A launch, always the same."""
    from kernels.steady_launch import launch

    launch(kernel, (2, 3), (torch.zeros(64), torch.zeros(64), 5), {"BLOCK": 4, "WIDTH": 8}, key="shape")


def test_the_second_launch_of_a_key_is_that_of_the_compiled_kernel():
    """With all arguments in the order of the kernel's, and none of the compiler's options."""
    from kernels.steady_launch import launch

    kernel, x, y = Kernel(), torch.zeros(64), torch.zeros(64)
    for n in (5, 6):
        launch(kernel, (3,), (x, y, n), {"WIDTH": 8, "BLOCK": 4, "num_warps": 2}, key="shape")
    assert kernel.launches[0] == ("looked up", (3,), (x, y, 5), {"WIDTH": 8, "BLOCK": 4, "num_warps": 2})
    assert kernel.launches[1] == ("kept", (3,), (x, y, 6, 4, 8))


def test_another_key_or_alignment_is_looked_up():
    """Triton compiles another kernel for addresses that are no multiple of 16 bytes, and for another key what the caller says."""
    from kernels.steady_launch import launch

    kernel, x = Kernel(), torch.zeros(65)
    for key, y in (("shape", x[:64]), ("other", x[:64]), ("shape", x[1:]), ("shape", x[:64])):
        launch(kernel, (3,), (x, y, 5), {"BLOCK": 4, "WIDTH": 8}, key=key)
    assert [how for how, *_ in kernel.launches] == ["looked up"] * 3 + ["kept"]


def on_another_device(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_device=lambda: 1))


def with_asserts(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    monkeypatch.setattr(knobs.runtime, "debug", True)


def with_a_profiler(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    monkeypatch.setattr(knobs.compilation, "instrumentation_mode", "cycles")


def with_hooks(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    monkeypatch.setattr(kernel, "pre_run_hooks", [lambda *args, **kwargs: None])


def with_a_pipeline_of_its_own(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", lambda *_: ("key", "hash"))


def with_another_look_up(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    monkeypatch.setattr(JITFunction, "run", lambda *_: "a note")


@pytest.mark.parametrize(
    ("changed", "is_kept_apart"),
    [
        (on_another_device, True),  # a compiled kernel is loaded on the device that was current then, wherever the tensors are
        (with_asserts, True),
        (with_a_profiler, True),
        (with_hooks, False),  # Triton calls them in its look-up
        (with_a_pipeline_of_its_own, False),
        (with_another_look_up, False),  # as in replays of a tuner, which records launches, or leaves them out
    ],
)
def test_what_triton_s_look_up_decides_is_looked_up(changed: Callable[..., None], is_kept_apart: bool, monkeypatch: pytest.MonkeyPatch):
    """Changed, as before, changed, as before: what Triton compiles anew for has a kernel of its own, and what is seen there alone none."""
    kernel = Kernel()
    for _ in range(2):
        with monkeypatch.context() as meanwhile:
            changed(meanwhile, kernel)
            launch_once(kernel)
        launch_once(kernel)
    assert kernel.ways == ["looked up", "looked up", "kept" if is_kept_apart else "looked up", "kept"]


def test_an_interpreted_kernel_is_launched_by_triton_each_time():
    """It has no compiled form."""
    kernel = Interpreted()
    for _ in range(2):
        launch_once(kernel)
    assert kernel.launches == [(2, 3)] * 2


def test_a_launch_is_seen_also_by_who_has_replaced_the_look_up_before_the_import(monkeypatch: pytest.MonkeyPatch):
    """As in a step that imports its kernels when it first runs, in a tuner's recording."""
    from kernels import steady_launch

    kernel = Kernel()
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(JITFunction, "run", lambda *_: None)
        fresh = importlib.util.module_from_spec(steady_launch.__spec__)
        steady_launch.__spec__.loader.exec_module(fresh)  # type: ignore[union-attr]
        for _ in range(2):
            fresh.launch(kernel, (2, 3), (torch.zeros(64), torch.zeros(64), 5), {"BLOCK": 4, "WIDTH": 8}, key="shape")
    assert kernel.ways == ["looked up"] * 2
