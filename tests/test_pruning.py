"""Rules for prune_fn: they drop what cannot be worth it, and keep what they do not understand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.driver import driver

from dist_tune.configs import ConfigView
from dist_tune.pruning import prune_by_group_size_m, prune_by_shared_memory
from dist_tune.testing import FakeH200

A = torch.empty(4096, 1024, dtype=torch.bfloat16, device="meta")
B = torch.empty(2048, 1024, dtype=torch.bfloat16, device="meta")


def config(
    *mnk: int, group: int = 8, stages: int = 4, warps: int = 8, name: str = "BLOCK_SIZE_"
) -> triton.Config:
    tiles = zip("MNK", mnk or (128, 256, 64), strict=True)
    return triton.Config(
        {"GROUP_SIZE_M": group} | {name + letter: size for letter, size in tiles},
        num_stages=stages,
        num_warps=warps,
    )


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that says what an H200 has: 232448 bytes of shared memory for a block."""
    monkeypatch.setattr(driver, "_active", FakeH200())


def keeps(given: Any, *others: Any, a: torch.Tensor = A, **named: Any) -> bool:
    return prune_by_shared_memory(given, a, *others, **named)


@pytest.mark.usefixtures("h200")
def test_what_cannot_fit_is_dropped(monkeypatch: pytest.MonkeyPatch):
    """One stage is (128 + 256) * 64 * 2 = 49152 bytes; 232448 hold 4.7 of them, so five buffers are
    too many for every kernel.
    """
    assert [keeps(config(stages=n)) for n in (1, 2, 5, 6, 9)] == [True, True, True, False, False]
    monkeypatch.setattr(FakeH200, "shared_limit_bytes", 2 * 49152)  # exactly the limit fits
    assert keeps(config(stages=3))
    monkeypatch.setattr(FakeH200, "shared_limit_bytes", 2 * 49152 - 1)
    assert not keeps(config(stages=3))


@pytest.mark.usefixtures("h200")
def test_a_config_is_read_in_every_form():
    """By itself, in a mapping, as prune_fn sees it, or as a mapping of its own; with either naming
    of tiles.
    """
    for name, stages, fits in (
        ("BLOCK_SIZE_", 5, True),
        ("BLOCK_SIZE_", 6, False),
        ("BLOCK_", 5, True),
        ("BLOCK_", 6, False),
    ):
        one = config(stages=stages, name=name)
        for given in (
            one,
            {"gemm_config": one},
            ConfigView({"n": 3, "gemm_config": one}),
            {**one.kwargs, "num_stages": stages},
        ):
            assert keeps(given, B) is fits
    outer = {"gemm_config": config(stages=6), "comm_config": config(stages=2)}
    assert not keeps(outer)  # the first one is meant
    assert keeps(dict(reversed(outer.items())))


@pytest.mark.usefixtures("h200")
def test_what_is_not_understood_is_kept():
    """No tiles, tiles that are no numbers, no config at all, operands that are no matrices."""
    no_k = triton.Config({"BLOCK_SIZE_M": 4096, "BLOCK_SIZE_N": 4096}, num_stages=9)
    texts = {"BLOCK_M": "large", "BLOCK_N": 1 << 20, "BLOCK_K": 1 << 20, "num_stages": 9}
    for given in (no_k, texts, {}, None):
        assert keeps(given)
        assert prune_by_group_size_m(given, A, B)
    assert keeps(config(stages=9), a=torch.empty(8))


FP8, INT8 = B.to(torch.float8_e4m3fn), torch.empty(4096, 1024, dtype=torch.int8, device="meta")
ACROSS, ALONG = (
    torch.empty(shape, dtype=torch.int8, device="meta") for shape in ((1024, 2048), (2048, 1024))
)
# Half a KB in 256 threads.
LARGE, TINY = (config(128, 256, 128, stages=6), config(16, 16, 32, stages=1000))
# Elements count with their size, those of B as well where it is among the arguments, by its shape;
# else it is like A. What goes through registers does not count: 8-bit operands that do not lie
# along K, and tiles of less than 4 bytes a thread.
OPERANDS = """
False   config(stages=6)
True    config(stages=6), a=A.to(torch.float8_e4m3fn)
False   config(stages=6), a=A.float()
True    config(stages=6), FP8
True    config(stages=6), "context", weight=FP8
False   config(stages=9), FP8
False   config(stages=6), torch.empty(7, 9)
False   LARGE, ALONG, a=INT8
False   LARGE, ALONG.t(), a=INT8
True    LARGE, ACROSS, a=INT8
True    LARGE, ALONG, a=ACROSS.t()
False   LARGE, INT8, a=INT8
True    TINY, a=INT8
False   config(16, 16, 32, stages=1000, warps=1), a=INT8
"""


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("row", OPERANDS.strip().splitlines())
def test_elements_count_with_their_size_where_they_go_through_shared_memory(row: str):
    is_kept, call = row.split(maxsplit=1)
    assert str(eval(f"keeps({call})")) == is_kept


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


def on_gpu(*shapes: Any, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Tensors of these shapes on a GPU that is not there."""
    with FakeTensorMode():
        return [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200's 132 multiprocessors."""
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(multi_processor_count=132),
    )


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "is_kept"),
    [
        (8192, 8192, 8192, torch.bfloat16, False),  # 2731 flops a byte
        (8192, 8192, 256, torch.bfloat16, True),  # 248 flops a byte
        (4096, 4096, 1024, torch.bfloat16, False),  # 683
        (4096, 4096, 1024, torch.int8, False),  # 1365, at twice the speed
        (4096, 4096, 800, torch.int8, True),  # 1150
        (8192, 8192, 8192, torch.float64, True),  # of unknown speed
        (1024, 2048, 65536, torch.bfloat16, True),  # 64 tiles: all run at once, in any order
    ],
)
def test_one_row_a_group_is_for_what_memory_bounds(
    m: int, n: int, k: int, dtype: torch.dtype, is_kept: bool
):
    """However B lies; a product that arithmetic bounds clearly needs no groups of one row, and
    larger groups are kept.
    """
    a, b = on_gpu((m, k), (n, k), dtype=dtype)
    assert [
        prune_by_group_size_m({"gemm_config": config(group=1)}, a, each) for each in (b, b.t())
    ] == [is_kept] * 2
    assert prune_by_group_size_m(config(group=8), a, b)


@pytest.mark.usefixtures("gpu")
def test_groups_of_what_is_no_product_are_kept():
    """Shapes that do not fit, more dimensions than two, no groups, and no tiles."""
    a, unlike, more, large = on_gpu((4096, 4096), (4095, 4097), (4096, 4096, 2), (8192, 8192))
    ungrouped = triton.Config({"BLOCK_M": 128, "BLOCK_N": 128})
    for given, left, right in [
        (config(group=1), a, unlike),
        (config(group=1), a, more),
        (ungrouped, large, large),
        ({"GROUP_SIZE_M": 1}, large, large),
    ]:
        assert prune_by_group_size_m(given, left, right)
