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

from kernels import steady_launch


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


def launch(kernel: Any, y: torch.Tensor | None = None, key: str = "shape", module: Any = steady_launch) -> None:
    """A launch, always the same but for the second tensor and the key."""
    y = torch.zeros(64) if y is None else y
    module.launch(kernel, (2, 3), (torch.zeros(64), y, 5), {"WIDTH": 8, "BLOCK": 4, "num_warps": 2}, key=key)


def test_the_second_launch_of_a_key_is_that_of_the_compiled_kernel():
    """With all arguments in the order of the kernel's, and none of the compiler's options."""
    kernel = Kernel()
    launch(kernel)
    launch(kernel)
    (how, grid, args, fixed), (kept, kept_grid, kept_args) = kernel.launches
    assert (how, grid, len(args), fixed) == ("looked up", (2, 3), 3, {"WIDTH": 8, "BLOCK": 4, "num_warps": 2})
    assert (kept, kept_grid, kept_args[2:]) == ("kept", (2, 3), (5, 4, 8))


def test_another_key_or_alignment_is_looked_up():
    """Triton compiles another kernel for addresses that are no multiple of 16 bytes, and for another key what the caller says."""
    kernel, x = Kernel(), torch.zeros(65)
    for key, y in (("shape", x[:64]), ("other", x[:64]), ("shape", x[1:]), ("shape", x[:64])):
        launch(kernel, y, key)
    assert kernel.ways == ["looked up"] * 3 + ["kept"]


@pytest.mark.parametrize(
    ("owner", "name", "value", "is_kept_apart"),
    [
        # A compiled kernel is loaded on the device that was current then, wherever the tensors are.
        (driver, "_active", SimpleNamespace(get_current_device=lambda: 1), True),
        (knobs.runtime, "debug", True, True),
        (knobs.compilation, "instrumentation_mode", "cycles", True),
        (None, "pre_run_hooks", [lambda *args, **kwargs: None], False),  # Triton calls them in its look-up
        (knobs.runtime, "add_stages_inspection_hook", lambda *_: ("key", "hash"), False),
        (JITFunction, "run", lambda *_: "a note", False),  # as in replays of a tuner, which records launches, or leaves them out
    ],
)
def test_what_triton_s_look_up_decides_is_looked_up(
    owner: Any, name: str, value: Any, is_kept_apart: bool, monkeypatch: pytest.MonkeyPatch
):
    """Changed, as before, changed, as before: what Triton compiles anew for has a kernel of its own, and what is seen there alone none."""
    kernel = Kernel()
    for _ in range(2):
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(kernel if owner is None else owner, name, value)
            launch(kernel)
        launch(kernel)
    assert kernel.ways == ["looked up", "looked up", "kept" if is_kept_apart else "looked up", "kept"]


def test_an_interpreted_kernel_is_launched_by_triton_each_time():
    """It has no compiled form."""

    class Interpreted:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **fixed: grids.append(grid)

    grids: list[tuple[int, ...]] = []
    for _ in range(2):
        launch(Interpreted())
    assert grids == [(2, 3)] * 2


def test_a_launch_is_seen_also_by_who_has_replaced_the_look_up_before_the_import(monkeypatch: pytest.MonkeyPatch):
    """As in a step that imports its kernels when it first runs, in a tuner's recording."""
    kernel = Kernel()
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(JITFunction, "run", lambda *_: None)
        fresh = importlib.util.module_from_spec(steady_launch.__spec__)
        steady_launch.__spec__.loader.exec_module(fresh)  # type: ignore[union-attr]
        for _ in range(2):
            launch(kernel, module=fresh)
    assert kernel.ways == ["looked up"] * 2
