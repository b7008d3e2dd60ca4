"""Launch configs of kernels/push_gemm.py: which of them may run several programs on a multiprocessor. No GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import triton

pytestmark = pytest.mark.once

HOPPER = {"max_shared_mem": 227 * 1024, "max_num_regs": 65536, "multiprocessor_count": 132, "warpSize": 32}


@pytest.fixture(autouse=True)
def _on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels import push_gemm

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)  # behind the import, which other tests share
    monkeypatch.setattr(push_gemm, "device_properties", lambda: HOPPER)


def config(*block: int, **options: Any) -> triton.Config:
    """A config of (rows, columns, depth)."""
    from kernels.push_gemm import make_config

    return make_config(*block, **options)


@pytest.mark.parametrize(
    ("block", "options", "is_kept"),
    [
        ((128, 128, 64), {"warps": 4, "stages": 3, "per_sm": 2}, True),
        ((128, 128, 64), {"warps": 8, "stages": 3, "per_sm": 2}, False),  # 2 x 256 threads x 255 registers
        ((128, 128, 64), {"warps": 4, "stages": 4, "per_sm": 2}, False),  # 2 x 128 KiB
        ((64, 128, 64), {"warps": 4, "stages": 3, "per_sm": 3}, False),  # 3 x 128 threads x 255 registers
        ((64, 64, 32), {"warps": 2, "stages": 7, "per_sm": 4}, False),  # 4 x 56 KiB fit, the 7 barriers of 8 bytes beside them do not
        ((128, 256, 32), {"warps": 2, "stages": 2, "per_sm": 4}, False),  # 4 x 64 KiB for a tile of float32 on its way out
        ((128, 256, 64), {"warps": 8, "stages": 4, "per_sm": 1}, True),
        ((128, 256, 64), {"warps": 8, "stages": 5, "per_sm": 1}, False),
    ],
)
def test_programs_of_a_config_fit_a_multiprocessor_together(block: tuple[int, int, int], options: dict[str, int], is_kept: bool):
    """By the registers that a compiler may take at most, and by the shared memory of the stages."""
    from kernels.push_gemm import drop_hopeless

    kept, first = config(*block, **options), config(128, 256, 64, warps=8, stages=3)
    assert (kept in drop_hopeless([first, kept], {"part_rows": 2048})) == is_kept


def test_a_launch_whose_programs_do_not_fit_together_is_refused():
    """A program without room would start when another one ends, which may wait for its tiles: before the launch, with the numbers."""
    too_many = config(128, 128, 64, warps=4, stages=4, per_sm=2)
    operands = {name: SimpleNamespace() for name in ("a", "b")}
    assert too_many.pre_hook is not None
    with pytest.raises(ValueError, match=r"2 programs .* 131104 bytes .* 115712 .* PER_SM=1"):
        too_many.pre_hook({**operands, **too_many.all_kwargs()})
    alone = config(128, 128, 64, warps=4, stages=4)
    assert alone.pre_hook is not None
    alone.pre_hook({**operands, **alone.all_kwargs()})
    assert vars(operands["a"]) == {"block_shape": [128, 64]}


def test_a_config_of_no_program_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Nothing would be launched, and peers would wait for its tiles."""
    none = config(128, 128, 64, warps=4, stages=3, per_sm=0)
    assert none.pre_hook is not None
    for is_interpreted in (False, True):
        monkeypatch.setattr(triton.knobs.runtime, "interpret", is_interpreted)
        with pytest.raises(ValueError, match=r"PER_SM, the programs .* on each SM, must be 1 or more, got 0"):
            none.pre_hook({"a": SimpleNamespace(), "b": SimpleNamespace(), **none.all_kwargs()})


def test_each_config_of_several_programs_fits():
    """Those that the tuner tries on a GPU, one of them at least; and the interpreter tries one."""
    from kernels.push_gemm import drop_hopeless, gpu_configs, interpreter_configs

    several = [each for each in gpu_configs() if each.kwargs["PER_SM"] > 1]
    assert several
    assert drop_hopeless(several, {"part_rows": 2048}) == several
    assert any(each.kwargs["PER_SM"] > 1 for each in interpreter_configs())


def test_programs_of_a_multiprocessor_start_a_tile_apart():
    """So that they send in turn: the first of each SM at once, the second when the tensor cores have had time for a tile of the first."""
    from kernels.push_gemm import start_cycles

    assert {start_cycles.fn(program, 264, 128 * 128, 5504, 2) for program in range(132)} == {0}
    assert {start_cycles.fn(program, 264, 128 * 128, 5504, 2) for program in range(132, 264)} == {2 * 128 * 128 * 5504 // 4096}
    assert {start_cycles.fn(program, 132, 128 * 128, 5504, 1) for program in range(132)} == {0}


def test_only_configs_of_several_programs_are_staggered():
    """Alone on its SM a program would only be late."""
    from kernels.push_gemm import gpu_configs

    staggered = [each.kwargs for each in gpu_configs() if each.kwargs["STAGGER"]]
    assert staggered
    assert all(block["PER_SM"] > 1 and block | {"STAGGER": False} in [each.kwargs for each in gpu_configs()] for block in staggered)
