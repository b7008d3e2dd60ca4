"""Steps whose kernel counts tiles in flags of the next rank: all ranks must launch the same config, or they wait for ever."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from dist_tune import contextual_autotune
from dist_tune.errors import DistTuneError
from dist_tune.runtime.kernel_launch import tuning_key
from dist_tune.testing import FakeH200

BLOCKS = (16, 32, 64)
N = 64


@triton.jit
def counting_kernel(x_ptr, y_ptr, mine, following, n, BLOCK: tl.constexpr):
    tile, n_tiles = tl.program_id(0), tl.cdiv(n, BLOCK)
    # Addresses and not tensors, because the interpreter writes a tensor's memory back after a launch, over what peers have added.
    mine_ptr, next_ptr = mine.to(tl.pointer_type(tl.int32)), following.to(tl.pointer_type(tl.int32))
    at = tile * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1.0, mask=at < n)
    tl.atomic_add(next_ptr, 1)
    if tile == n_tiles - 1:
        count = tl.atomic_add(mine_ptr, 0)
        while count < n_tiles:  # of the rank before, as many as its config has
            count = tl.atomic_add(mine_ptr, 0)
        tl.atomic_add(mine_ptr, -n_tiles)


@triton.jit
def plain_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1.0, mask=at < n)


class Launched:
    """Blocks that a kernel was launched with on this rank, in order."""

    def __init__(self, kernel: Any, fails: tuple[int, str] | None) -> None:
        """``fails``: a block, and where its launch raises: before it is made ("fit"), or after ("end")."""
        self.blocks: list[int] = []
        self.n_failed = 0
        vars(kernel.fn).pop("run", None)  # of the case before
        self._run, self._fails = kernel.fn.run, fails
        kernel.fn.run = self.run

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the kernel's own launch."""
        block, way = self._fails or (0, "")
        if kwargs["BLOCK"] == block and way == "fit" and not kwargs.get("warmup"):
            self.n_failed += 1
            raise triton.OutOfResources(10**6, 1, "shared memory")
        made = self._run(*args, **kwargs)
        if not kwargs.get("warmup"):
            self.blocks.append(kwargs["BLOCK"])
        if kwargs["BLOCK"] == block and way == "end" and not kwargs.get("warmup"):
            self.n_failed += 1
            raise RuntimeError("the launch failed")
        return made


def configs_of(fails: tuple[int, str] | None) -> list[triton.Config]:
    """One a block; the hook of one may raise ("hook")."""

    def hook(given: dict[str, Any]) -> None:
        if fails == (given["BLOCK"], "hook"):
            raise ValueError("no workspace")

    return [triton.Config({"BLOCK": block}, pre_hook=hook) for block in BLOCKS]


def step_of(rank: int, flags: torch.Tensor, fails: tuple[int, str] | None, *, has_mark: bool = False, **options: Any) -> Any:
    """A tuned step, its kernel, and what that was launched with. ``has_mark``: the kernel itself says that it is coupled."""
    kernel = triton.autotune(configs_of(fails), key=["n"])(counting_kernel)
    if has_mark:
        kernel.coupled = True
        options = {**options, "coupled": False}
    launched = Launched(kernel, fails)
    n_ranks = dist.get_world_size()
    mine, following = flags[rank:].data_ptr(), flags[(rank + 1) % n_ranks :].data_ptr()

    @contextual_autotune(**{"is_dist": True, "n_repeat": 2, "n_warmup": 0, "cache": False, "coupled": True, **options})
    def step(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        kernel[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](x, y, mine, following, N)
        dist.all_reduce(y)
        return y

    return step, kernel, launched


def flags_in(folder: Path, name: str) -> torch.Tensor:
    """Memory of all ranks, one counter each."""
    return torch.from_file(str(folder / name), shared=True, size=dist.get_world_size(), dtype=torch.int32)


def tune(rank: int, folder: Path, cases: list[dict[str, Any]]) -> list[Any]:
    """For each case: what was launched, the winner, failures in the record, whether the value is right, and counts that are left."""
    found = []
    for k, case in enumerate(cases):
        flags = flags_in(folder, f"flags-{k}")
        fails = case.get("fails") if rank == case.get("rank", 1) else None
        step, kernel, launched = step_of(
            rank, flags, fails, **{name: case[name] for name in case if name not in ("fails", "rank", "known")}
        )
        x = torch.full((N,), float(rank))
        if rank == 0 and "known" in case:  # as after vanilla tuning of this rank alone
            key = tuning_key(kernel, (x, x, 0, 0, N), {})
            kernel.cache[key] = next(each for each in kernel.configs if each.kwargs["BLOCK"] == case["known"])
        value = step(x)
        if "known" in case:  # and a call that is new to one rank alone, which the other makes without a meeting
            value = step(x, torch.zeros(rank + 1)) if rank == 1 else step(x)
        right = torch.equal(value, torch.full((N,), sum(each + 1.0 for each in range(dist.get_world_size()))))
        dist.barrier()
        (record,) = step.records
        failed = sorted(each.fields["BLOCK"] for each in record.candidates if each.failure is not None)
        found.append((launched.blocks, record.best.fields["BLOCK"], failed, right, flags.tolist()))
    return found


def tune_from_caches(rank: int, folder: Path) -> Any:
    """A tuning, and the same step anew in which rank 1 has lost its cache, and a config that it had won with does not fit there."""
    found: list[Any] = []
    for k, case in enumerate([None, None, "fit"]):
        if rank == 1 and k > 0:
            os.environ["DIST_TUNE_CACHE_DIR"] = str(folder / f"empty-{k}")
        fails = (found[0][1], "fit") if case and rank == 1 else None
        flags = flags_in(folder, f"flags-{k}")  # alive as long as kernels write there
        step, _, launched = step_of(rank, flags, fails, cache=True)
        step(torch.full((N,), float(rank)))
        dist.barrier()
        (record,) = step.records
        found.append((launched.blocks, record.best.fields["BLOCK"], record.is_recalled))
    return found


@triton.jit
def epoch_kernel(x_ptr, y_ptr, n, epoch, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x_ptr + at, mask=at < n) + epoch)
    tl.store(y_ptr + at, total, mask=at < n)


def tune_compiled(rank: int, limit_bytes: int | None) -> Any:
    """Warps of each launch on the fake driver, and who was dropped. Rank 1 has less shared memory, or else an argument that changes."""
    warps: list[int] = []

    def launch_ms(src: Any, metadata: Any) -> float:
        warps.append(metadata.num_warps)
        return 0.0

    FakeH200.launch_ms = launch_ms
    if rank == 1 and limit_bytes is not None:
        FakeH200.shared_limit_bytes = limit_bytes
    kernel = triton.autotune([triton.Config({"BLOCK": 64}, num_warps=n) for n in (2, 4, 1)], key=["n"])(epoch_kernel)
    x, y, n_runs = torch.zeros(N), torch.zeros(N), 0

    @contextual_autotune(is_dist=True, n_repeat=2, n_warmup=0, cache=False, coupled=True)
    def step() -> None:
        nonlocal n_runs
        n_runs += 1
        kernel[(1,)](x, y, N, n_runs if rank == 1 and limit_bytes is None else 3)
        dist.all_reduce(torch.ones(1))

    step()
    FakeH200.launch_ms = lambda src, metadata: 0.0
    (record,) = step.records
    return warps, [each.failure is not None for each in record.candidates]


def tune_apart(rank: int, folder: Path) -> None:
    """A step whose coupled kernel has another key on each rank."""
    flags = flags_in(folder, "flags")
    step, kernel, _ = step_of(rank, flags, None)
    kernel.keys = ["n", "mine"]  # an address
    step(torch.full((N,), float(rank)))


def tune_twice(rank: int, folder: Path) -> Any:
    """A tuning that is cut off in its race, and the call again: rank 1's journal alone bars the config that failed there."""
    flags = flags_in(folder, "flags")
    n_runs, last = 0, 8
    step, _, launched = step_of(rank, flags, (16, "fit") if rank == 1 else None, cache=True, search="exhaustive", n_repeat=4)
    whole = step.__wrapped__

    @contextual_autotune(is_dist=True, coupled=True, search="exhaustive", n_repeat=4, n_warmup=0)
    def cut_off(x: torch.Tensor) -> torch.Tensor:
        nonlocal n_runs
        n_runs += 1
        if n_runs == last:
            raise ValueError("cut off")
        y: torch.Tensor = whole(x)
        return y

    with suppress(ValueError, DistTuneError):  # its own, or that of the rank that raised first
        cut_off(torch.full((N,), float(rank)))
    dist.barrier()
    last = 0
    n_before, first = n_runs, list(launched.blocks)
    cut_off(torch.full((N,), float(rank)))
    dist.barrier()
    (record,) = cut_off.records
    return first, launched.blocks[len(first) :], n_runs - n_before, record.best.fields["BLOCK"] != 16, flags.tolist()
