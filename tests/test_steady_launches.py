"""What the host does in a steady step of kernels/: launches that Triton need not look up again. No GPU is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.once


class Kernel:
    """A `triton.jit` kernel that notes its launches, by Triton and by its compiled form."""

    arg_names = ("x", "y", "n", "BLOCK", "WIDTH")

    def __init__(self, *, is_interpreted: bool = False) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.is_interpreted = is_interpreted

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def looked_up(*args: Any, **fixed: Any) -> Any:
            self.launches.append(("looked up", grid, args, fixed))
            return None if self.is_interpreted else {(*grid, 1, 1)[:3]: lambda *args: self.launches.append(("kept", grid, args))}

        return looked_up


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


def test_an_interpreted_kernel_is_launched_by_triton_each_time():
    """It has no compiled form."""
    from kernels.steady_launch import launch

    kernel, x = Kernel(is_interpreted=True), torch.zeros(64)
    for _ in range(2):
        launch(kernel, (3,), (x, x, 5), {"BLOCK": 4, "WIDTH": 8}, key="shape")
    assert [how for how, *_ in kernel.launches] == ["looked up"] * 2


def test_a_launch_is_seen_where_triton_s_look_up_is_replaced(monkeypatch: pytest.MonkeyPatch):
    """As in replays of a tuner, which records launches, or leaves them out."""
    from triton.runtime.jit import JITFunction

    from kernels.steady_launch import launch

    kernel, x = Kernel(), torch.zeros(64)
    for _ in range(2):
        launch(kernel, (2, 3), (x, x, 5), {"BLOCK": 4, "WIDTH": 8}, key="shape")
    monkeypatch.setattr(JITFunction, "run", lambda *_: None)
    launch(kernel, (2, 3), (x, x, 5), {"BLOCK": 4, "WIDTH": 8}, key="shape")
    assert [how for how, *_ in kernel.launches] == ["looked up", "kept", "looked up"]
