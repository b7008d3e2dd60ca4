"""kernels/symmetric.py: memory that two processes share, and kernels under the interpreter that store and spin there."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from dist_tune.testing import on_ranks, values
from kernels.symmetric import SymmetricMemory, _cuda_blocks, as_int32, element_type, next_step, offsets, pointer_at, signal, wait_until

pytestmark = pytest.mark.processes

N_STEPS, SIZE = 6, 8
CPU = torch.device("cpu")


@triton.jit
def pass_on(
    addresses, flags, own, own_flags, out, slot, rank, epoch, value, SIZE: tl.constexpr, WORLD: tl.constexpr, ELEMENT: tl.constexpr
):
    """Store `value` into the next rank's slot, raise its flag, wait for the own one, keep what came."""
    peer = (rank + 1) % WORLD
    at = tl.arange(0, SIZE)
    tl.store(pointer_at(addresses, peer, ELEMENT) + slot * SIZE + at, (at * 0 + value).to(ELEMENT))
    signal(pointer_at(flags, peer, tl.int32), 1)
    zero = wait_until(own_flags, epoch)
    tl.store(out + at, tl.load(own + slot * SIZE + at + zero))


def ring(rank: int, n_before: int) -> list[list[float]]:
    """The values that came in each step, when the flags start behind `n_before` steps."""
    n_ranks, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    memory = SymmetricMemory({"slots": ((2, SIZE), torch.float32), "flag": ((1,), torch.int32)}, CPU, group)
    memory.own["flag"].fill_(as_int32(n_before))
    dist.barrier()
    came = []
    for step in range(N_STEPS):
        out = torch.full((SIZE,), float("nan"))
        tensors = (*map(memory.addresses, ("slots", "flag")), *map(memory.own.get, ("slots", "flag")), out)
        epoch, slot = next_step(n_before + step)
        numbers = (slot, rank, epoch, 10 * step + rank)
        pass_on[(1,)](*tensors, *numbers, SIZE=SIZE, WORLD=n_ranks, ELEMENT=element_type(torch.float32))
        came.append(out.unique().tolist())
    dist.barrier()
    return came


@pytest.mark.parametrize("n_before", [0, 2**31 - 3, pytest.param(2**32 - 3, marks=pytest.mark.slow)])
def test_a_kernel_stores_into_a_peers_memory_and_spins_on_its_own_flag(n_before: int):
    """Six steps without a reset, also where the epoch wraps around between them."""
    assert values(on_ranks(2, ring, n_before)) == [[[10.0 * step + 1 - rank] for step in range(N_STEPS)] for rank in range(2)]


def test_epochs_wrap_around_and_slots_take_turns():
    """Also across the wrap."""
    assert [next_step(2**31 - 2 + i) for i in range(3)] == [(2**31 - 1, 1), (-(2**31), 0), (-(2**31) + 1, 1)]


def test_tensors_of_a_block_start_at_multiples_of_128_bytes():
    """None overlaps the next one, and none is empty of bytes."""
    starts, n_bytes = offsets({"a": ((3,), torch.bfloat16), "b": ((65, 2), torch.int32), "c": ((0,), torch.int32)})
    assert (starts, n_bytes) == ({"a": 0, "b": 128, "c": 768}, 768)


class FakeHandle:
    """What torch's rendezvous returns: a peer's block is mapped as long as this lives."""

    def get_buffer(self, rank: int, sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(sizes, dtype=dtype)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[object]]:
    """Rank 0 of two with torch's symmetric memory; "failures" is what each rank says of its allocation, None for what was said here."""
    import torch.distributed._symmetric_memory as torchs

    told: dict[str, list[object]] = {"failures": [None, None], "handles": []}

    def all_gather_object(by_rank: list[object], own: object, group: object = None) -> None:
        by_rank[:] = [own if each is None else each for each in told["failures"]]

    def rendezvous(own: torch.Tensor, group: object) -> FakeHandle:
        handle = FakeHandle()
        told["handles"].append(weakref.ref(handle))
        return handle

    fakes = {"get_rank": lambda _: 0, "get_world_size": lambda _: 2, "all_gather_object": all_gather_object, "barrier": lambda _: None}
    for name, fake in fakes.items():
        monkeypatch.setattr(dist, name, fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torchs, "empty", lambda n, dtype, device: torch.empty(n, dtype=dtype))
    monkeypatch.setattr(torchs, "rendezvous", rendezvous)
    return told


def test_peers_blocks_stay_mapped_as_long_as_the_memory_lives(two_gpus: dict[str, list[object]]):
    """Torch's buffers are bare addresses: the memory itself holds the handle that keeps them mapped."""
    group: Any = None
    blocks, mappings = _cuda_blocks(256, CPU, group)
    (handle,) = two_gpus["handles"]
    assert [len(block) for block in blocks] == [256, 256]
    del blocks
    assert handle() is mappings  # type: ignore[operator]


def test_a_rank_without_memory_is_told_of_on_all_ranks(two_gpus: dict[str, list[object]]):
    """Before the rendezvous, in which the others would wait for it for ever."""
    two_gpus["failures"] = [None, "CUDA out of memory"]
    group: Any = None
    with pytest.raises(RuntimeError, match="no symmetric memory of 256 bytes on all ranks: rank 1: CUDA out of memory"):
        _cuda_blocks(256, CPU, group)
    assert two_gpus["handles"] == []


def layouts(rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    SymmetricMemory({"slots": ((2 + rank,), torch.float32)}, CPU, group)


@pytest.mark.slow
def test_ranks_with_different_layouts_are_told():
    """A ValueError on both ranks, with both layouts."""
    outcomes = on_ranks(2, layouts)
    assert [outcome.error for outcome in outcomes] == ["ValueError"] * 2
    assert "slots [2]" in outcomes[0].message
    assert "slots [3]" in outcomes[0].message
