"""Rules for prune_fn: they drop what cannot be worth it, and keep what they do not understand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from triton.runtime.driver import driver

from dist_tune import pruning
from dist_tune.configs import ConfigView
from dist_tune.pruning import prune_by_group_size_m, prune_by_shared_memory
from dist_tune.testing import FakeH200

A = torch.empty(4096, 1024, dtype=torch.bfloat16, device="meta")
B = torch.empty(2048, 1024, dtype=torch.bfloat16, device="meta")


def config(
    m: int = 128, n: int = 256, k: int = 64, group: int = 8, stages: int = 4, warps: int = 8, name: str = "BLOCK_SIZE_"
) -> triton.Config:
    constants = {f"{name}M": m, f"{name}N": n, f"{name}K": k, "GROUP_SIZE_M": group}
    return triton.Config(constants, num_stages=stages, num_warps=warps)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that says what an H200 has: 232448 bytes of shared memory for a block."""
    monkeypatch.setattr(driver, "_active", FakeH200())


def keeps(given: Any, *others: Any, a: torch.Tensor = A, **named: Any) -> bool:
    return prune_by_shared_memory(given, a, *others, **named)


@pytest.mark.usefixtures("h200")
def test_what_cannot_fit_is_dropped(monkeypatch: pytest.MonkeyPatch):
    """One stage is (128 + 256) * 64 * 2 = 49152 bytes; 232448 hold 4.7 of them, so five buffers are too many for every kernel."""
    assert [keeps(config(stages=n)) for n in (1, 2, 5, 6, 9)] == [True, True, True, False, False]
    monkeypatch.setattr(FakeH200, "shared_limit_bytes", 2 * 49152)  # exactly the limit fits
    assert keeps(config(stages=3))
    monkeypatch.setattr(FakeH200, "shared_limit_bytes", 2 * 49152 - 1)
    assert not keeps(config(stages=3))


@pytest.mark.usefixtures("h200")
def test_a_config_is_read_in_every_form():
    """By itself, in a mapping, as prune_fn sees it, or as a mapping of its own; with either naming of tiles."""
    for name in ("BLOCK_SIZE_", "BLOCK_"):
        for stages, fits in ((5, True), (6, False)):
            one = config(stages=stages, name=name)
            for given in (one, {"gemm_config": one}, ConfigView({"n": 3, "gemm_config": one}), {**one.kwargs, "num_stages": stages}):
                assert keeps(given, B) is fits
    outer = {"gemm_config": config(stages=6), "comm_config": config(stages=2)}
    assert not keeps(outer)  # the first one is meant
    assert keeps(dict(reversed(outer.items())))


@pytest.mark.usefixtures("h200")
def test_what_is_not_understood_is_kept():
    """No tiles, tiles that are no numbers, no config at all, operands that are no matrices."""
    no_k = triton.Config({"BLOCK_SIZE_M": 4096, "BLOCK_SIZE_N": 4096}, num_stages=9)
    texts = {"BLOCK_M": "large", "BLOCK_N": 1 << 20, "BLOCK_K": 1 << 20, "num_stages": 9}
    for given in (no_k, texts, {}, {"method": "pull"}, None, 3):
        assert keeps(given)
        assert prune_by_group_size_m(given, A, B)
    assert keeps(config(stages=9), a=torch.empty(8))


@pytest.mark.usefixtures("h200")
def test_elements_count_with_their_size():
    """Those of B as well, where it is among the arguments, by its shape; else it is like A."""
    assert keeps(config(stages=6), a=A.to(torch.float8_e4m3fn))
    assert not keeps(config(stages=6), a=A.float())
    assert not keeps(config(stages=6))
    narrow = B.to(torch.float8_e4m3fn)
    assert keeps(config(stages=6), narrow)  # 5 * (128 * 2 + 256) * 64 = 163840
    assert keeps(config(stages=6), "context", weight=narrow)
    assert not keeps(config(stages=6), torch.empty(7, 9))  # no B: nothing of it is as long as a row of A
    assert not keeps(config(stages=9), narrow)


@pytest.mark.usefixtures("h200")
def test_what_goes_through_registers_does_not_count():
    """8-bit operands that do not lie along K, and tiles of less than 4 bytes a thread."""
    a = torch.empty(4096, 1024, dtype=torch.int8, device="meta")
    across, along = torch.empty(1024, 2048, dtype=torch.int8, device="meta"), torch.empty(2048, 1024, dtype=torch.int8, device="meta")
    large = config(128, 256, 128, stages=6)
    assert not keeps(large, along, a=a)
    assert not keeps(large, along.t(), a=a)
    assert keeps(large, across, a=a)
    assert keeps(large, along, a=torch.empty(1024, 4096, dtype=torch.int8, device="meta").t())
    assert not keeps(large, a, a=a)
    tiny = config(16, 16, 32, stages=1000, warps=8)  # half a KB in 256 threads
    assert keeps(tiny, a=a)
    assert not keeps(config(16, 16, 32, stages=1000, warps=1), a=a)


def test_without_a_device_everything_is_kept(monkeypatch: pytest.MonkeyPatch):
    """No driver, a driver that cannot say, and the interpreter."""
    assert keeps(config(1024, 1024, 1024, stages=9))
    assert prune_by_group_size_m(config(group=1), A, B)
    monkeypatch.setattr(driver, "_active", FakeH200())
    assert not keeps(config(stages=9))
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "interpret", True)
        assert keeps(config(stages=9))
    monkeypatch.setattr(FakeH200.utils, "get_device_properties", lambda device: {})
    assert keeps(config(stages=9))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200's 132 multiprocessors."""
    monkeypatch.setattr(pruning, "_n_multiprocessors", lambda a: 132)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("group", "m", "n", "k", "dtype", "is_kept"),
    [
        (1, 8192, 8192, 8192, torch.bfloat16, False),  # 2731 flops a byte
        (8, 8192, 8192, 8192, torch.bfloat16, True),
        (1, 8192, 8192, 256, torch.bfloat16, True),  # 248 flops a byte
        (1, 4096, 4096, 1024, torch.bfloat16, False),  # 683
        (1, 4096, 4096, 1024, torch.int8, False),  # 1365, at twice the speed
        (1, 4096, 4096, 800, torch.int8, True),  # 1150
        (1, 8192, 8192, 8192, torch.float64, True),  # of unknown speed
        (1, 64, 65536, 8192, torch.bfloat16, True),  # one row of tiles
        (1, 1024, 2048, 65536, torch.bfloat16, True),  # 64 tiles: all run at once, in any order
    ],
)
def test_one_row_a_group_is_for_what_memory_bounds(group: int, m: int, n: int, k: int, dtype: torch.dtype, is_kept: bool):
    """However B lies; a product that arithmetic bounds clearly needs no groups of one row."""
    a, b = torch.empty(m, k, dtype=dtype, device="meta"), torch.empty(n, k, dtype=dtype, device="meta")
    assert [prune_by_group_size_m({"gemm_config": config(group=group)}, a, each) for each in (b, b.t())] == [is_kept] * 2


@pytest.mark.usefixtures("gpu")
def test_groups_of_what_is_no_product_are_kept():
    """Shapes that do not fit, more dimensions than two, no groups, and no tiles."""
    a, large = (torch.empty(n, n, device="meta") for n in (4096, 8192))
    for given, left, right in [
        (config(group=1), a, torch.empty(4095, 4097, device="meta")), (config(group=1), a, torch.empty(4096, 4096, 2, device="meta")),
        (triton.Config({"BLOCK_M": 128, "BLOCK_N": 128}), A, B), ({"GROUP_SIZE_M": 1}, large, large),
    ]:  # fmt: skip
        assert prune_by_group_size_m(given, left, right)
