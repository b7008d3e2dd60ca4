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
def device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of the current GPU."""
    current = [0]
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_device=lambda: current[0]))
    return current


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


def test_another_current_device_is_looked_up(device: list[int]):
    """A compiled kernel is loaded on the device that was current then, wherever the tensors are."""
    kernel = Kernel()
    for device[0] in (0, 1, 0, 1):
        launch_once(kernel)
    assert kernel.ways == ["looked up"] * 2 + ["kept"] * 2


@pytest.mark.parametrize(
    ("knobs_of", "name", "value"), [(knobs.runtime, "debug", True), (knobs.compilation, "instrumentation_mode", "cycles")]
)
def test_what_triton_compiles_anew_for_is_looked_up(knobs_of: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch):
    """Asserts and a profiler's instruments that are switched on between two steps, and off again."""
    kernel = Kernel()
    launch_once(kernel)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(knobs_of, name, value)
        launch_once(kernel)
    launch_once(kernel)
    assert kernel.ways == ["looked up", "looked up", "kept"]


def test_a_kernel_with_hooks_is_launched_by_triton():
    """Triton calls them in its look-up."""
    kernel = Kernel()
    launch_once(kernel)
    kernel.pre_run_hooks.append(lambda *args, **kwargs: None)
    launch_once(kernel)
    del kernel.pre_run_hooks[:]
    launch_once(kernel)
    assert kernel.ways == ["looked up", "looked up", "kept"]


def test_a_pipeline_of_its_own_is_triton_s_to_look_up(monkeypatch: pytest.MonkeyPatch):
    """What it has compiled is not kept, because it is of that pipeline alone."""
    kernel = Kernel()
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(knobs.runtime, "add_stages_inspection_hook", lambda *_: ("key", "hash"))
        launch_once(kernel)
    launch_once(kernel)
    assert kernel.ways == ["looked up"] * 2


def test_an_interpreted_kernel_is_launched_by_triton_each_time():
    """It has no compiled form."""
    kernel = Interpreted()
    for _ in range(2):
        launch_once(kernel)
    assert kernel.launches == [(2, 3)] * 2


def test_a_launch_is_seen_where_triton_s_look_up_is_replaced(monkeypatch: pytest.MonkeyPatch):
    """As in replays of a tuner, which records launches, or leaves them out."""
    kernel = Kernel()
    for _ in range(2):
        launch_once(kernel)
    monkeypatch.setattr(JITFunction, "run", lambda *_: None)
    launch_once(kernel)
    assert kernel.ways == ["looked up", "kept", "looked up"]


def test_what_another_look_up_answers_is_not_kept(monkeypatch: pytest.MonkeyPatch):
    """It need not be a compiled kernel."""
    kernel = Kernel()
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(JITFunction, "run", lambda *_: "a note")
        launch_once(kernel)
    launch_once(kernel)
    assert kernel.ways == ["looked up"] * 2


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
