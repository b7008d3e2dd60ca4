"""What the steps of kernels/ queue on a GPU that is not there: on which stream, in which order, on how many SMs, and what they refuse."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels import gather, partials, push_gemm, shard_gemm, symmetric
from kernels.gemm_allreduce import config_space, prune_fn
from kernels.partials import Exchange, PartialSums, Plan
from kernels.push_gemm import drop_hopeless, gpu_configs, make_config, start_cycles

HOPPER = {"max_shared_mem": 227 * 1024, "max_num_regs": 65536, "multiprocessor_count": 132, "warpSize": 32}
N_SMS, RANK, N_RANKS, ROWS, N = 132, 1, 3, 300, 40
BF16, GROUP = torch.bfloat16, cast(Any, None)


class Gpu:
    """Streams, kernels and a driver that note what is queued; copies and writes of words are made at once."""

    def __init__(self) -> None:
        self.queued: list[tuple[str, str, Any]] = []
        self.given: list[tuple[Any, ...]] = []
        """Arguments of the launches that Triton did not look up."""
        self.n_streams = 0
        self.current = self.main = self.stream()

    def stream(self, *_: Any, **__: Any) -> Any:
        name = ("main", "second", "third")[self.n_streams]
        self.n_streams += 1

        def wait(what: Any) -> None:
            self.queued.append((name, "waits for", what.name))

        return SimpleNamespace(name=name, cuda_stream=name, wait_event=wait, wait_stream=wait)

    def event(self) -> Any:
        return SimpleNamespace(name="start", record=lambda *_: self.queued.append((self.current.name, "records", "start")))

    @contextmanager
    def on(self, stream: Any) -> Generator[None]:
        self.current = stream
        yield
        self.current = self.main

    def kernel(self, name: str, arg_names: list[str]) -> Any:
        def kept(grid: tuple[int, int, int]) -> Any:
            def launch(*args: Any) -> None:
                self.queued.append((self.current.name, name, grid[0]))
                self.given.append(args)

            return launch

        def launcher(grid: Any) -> Any:
            def launch(*_: Any, **meta: Any) -> Any:
                (n_programs,) = grid(meta) if callable(grid) else grid
                self.queued.append((self.current.name, name, n_programs))
                return type("Compiled", (), {"__getitem__": lambda _, grid: kept(grid)})()

            return launch

        own = {"__init__": lambda _: None, "__getitem__": lambda _, grid: launcher(grid), "pre_run_hooks": ()}
        kernel = type("Kernel", (JITFunction,), own)()
        kernel.fn, kernel.arg_names = kernel, arg_names
        return kernel

    def driver(self, function: str) -> Any:
        def call(*args: Any) -> int:
            if function == "cuMemcpyAsync":
                self.queued.append((args[3], "copies", args[2]))
                ctypes.memmove(*args[:3])
                return 0
            self.queued.append((args[0], {1: "waits for words", 2: "writes words"}[args[2][0].operation], args[1]))
            for op in args[2]:
                if op.operation == gather.WRITE:
                    ctypes.c_uint32.from_address(op.address).value = op.value
            return 0

        return call


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Rank 1 of three, whose peers' memory is in this process."""
    found = Gpu()
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)  # behind the import, which other tests share
    monkeypatch.setattr(partials, "FLAG_ROWS", 64)  # fewer where it was first imported for the interpreter
    collectives = {"get_rank": lambda _: RANK, "get_world_size": lambda _: N_RANKS}
    for name, fake in {**collectives, "all_gather_object": lambda by_rank, own, group: by_rank.__setitem__(slice(None), [own] * 3)}.items():
        monkeypatch.setattr(dist, name, fake)
    fakes = {"Stream": found.stream, "Event": found.event, "stream": found.on, "current_stream": lambda: found.current}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(symmetric, "_mapped_blocks", lambda n, group: [torch.zeros(n, dtype=torch.uint8) for _ in range(N_RANKS)])
    monkeypatch.setattr(gather, "driver_function", found.driver)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_device=lambda: 0))
    for module in (partials, push_gemm, shard_gemm):
        monkeypatch.setattr(module, "device_properties", lambda: HOPPER)
    for name in ("push_gemm_kernel", "sum_kernel"):
        monkeypatch.setattr(partials, name, found.kernel(name, getattr(partials, name).arg_names))
    return found


def plan_of(n_parts: int = N_RANKS, *, gathers: bool = False) -> Plan:
    return Plan(m=ROWS * N_RANKS, n=N, n_parts=n_parts, dtype=BF16, partial_dtype=BF16, gathers=gathers)


def queued(gpu: Gpu, exchange: Exchange, plan: Plan | None = None, per_sm: int = 1) -> list[tuple[str, str, Any]]:
    """What a step queues, behind a first one that made streams and tables."""
    plan = plan or plan_of()
    sums = PartialSums(plan, torch.device("cpu"), GROUP)
    on_gpu: Any = SimpleNamespace(type="cuda")
    sums._device = on_gpu
    a, b, c = torch.zeros(plan.m, 64, dtype=BF16), torch.zeros(N, 64, dtype=BF16), torch.zeros(plan.m, N, dtype=BF16)
    for _ in range(2):
        del gpu.queued[:]
        sums.step(a, b, c, exchange, config=make_config(64, 64, 64, warps=4, stages=4, per_sm=per_sm))
    return gpu.queued


STARTED, PRODUCT = ("main", "records", "start"), ("main", "push_gemm_kernel", 15)
FOLLOWS, JOINED = ("second", "waits for", "start"), ("main", "waits for", "second")


def copied(n_flags: int, rows: int) -> list[tuple[str, str, int]]:
    return [("second", "waits for words", n_flags), ("second", "copies", rows * N * 2), ("second", "writes words", n_flags)]


@pytest.mark.parametrize(
    ("exchange", "gathers", "per_sm", "expected"),
    [
        # The copy stream waits for counts of each chunk, copies it and writes flags; what comes next waits for the copies.
        (
            Exchange("copy", "behind", 0, 128),
            *(False, 1),
            [STARTED, PRODUCT, FOLLOWS, *(copied(2, 128) * 2 + copied(1, 44)) * 2, ("main", "sum_kernel", 3), JOINED],
        ),
        # A product that sums waits for its peers' copies, and no kernel follows.
        (Exchange("copy", "inside", 0, 1024), False, 1, [STARTED, PRODUCT, FOLLOWS, *copied(5, ROWS) * 2, JOINED]),
        # Product and sum fit on the GPU at once in either order; the current stream goes on behind the sum.
        (
            Exchange("push", "beside", 120, 64),
            *(False, 1),
            [STARTED, ("main", "push_gemm_kernel", N_SMS - 120), FOLLOWS, ("second", "sum_kernel", 5), JOINED],
        ),
        # A sum is given multiprocessors, not programs: 4 are left, with two programs of the product each.
        (
            Exchange("push", "beside", N_SMS - 4, 64),
            *(False, 2),
            [STARTED, ("main", "push_gemm_kernel", 8), FOLLOWS, ("second", "sum_kernel", 5), JOINED],
        ),
        # The kernel that gathers the sums has the GPU to itself.
        (Exchange("pull"), True, 1, [PRODUCT, ("main", "sum_kernel", 6)]),
    ],
)
def test_a_step_queues_its_product_its_copies_and_its_sum(
    gpu: Gpu, exchange: Exchange, gathers: bool, per_sm: int, expected: list[tuple[str, str, Any]]
):
    assert queued(gpu, exchange, plan_of(gathers=gathers), per_sm) == expected


def test_copies_bring_the_parts_of_peers_and_set_their_flags_to_what_counting_would_make_of_them(gpu: Gpu):
    """Each element of a part for a peer, in the slot of the step; behind each step the flags have as many elements as were ever sent."""
    plan = plan_of()
    memory = PartialSums(plan, torch.device("cpu"), GROUP)._memory
    copier, elements = partials.Copier(plan, memory), torch.tensor(plan.flag_elements(0)).int()
    for epoch in (1, 2):
        copier.staged.fill_(epoch)
        copier.queue(epoch % 2, epoch, 128, gpu.event())
        for peer in (0, 2):
            at_peer = memory.on(peer)
            assert torch.equal(at_peer["arrivals"][RANK, : len(elements)], epoch * elements)
            assert (at_peer["received"][epoch % 2, RANK, : ROWS * N] == epoch).all()
    assert not memory.own["received"].any()


def test_a_second_step_with_a_given_config_looks_up_no_launch(gpu: Gpu):
    """The product and the sum, with all arguments: what is given by name, and the config's blocks, too."""
    product, total = (getattr(partials, name) for name in ("push_gemm_kernel", "sum_kernel"))
    queued(gpu, Exchange("push", "behind", 0, 128))
    assert [len(args) for args in gpu.given] == [len(product.arg_names), len(total.arg_names)]
    by_name = dict(zip(product.arg_names, gpu.given[0], strict=True))
    assert (by_name["N"], by_name["BLOCK_M"], by_name["PER_SM"], by_name["WORLD"]) == (N, 64, 1, N_RANKS)
    assert by_name["a"].block_shape == [64, 64]


@pytest.mark.parametrize(
    ("exchange", "n_parts", "told"),
    [
        # Copies are queued when the product is: where the launch returns at its end, all ranks would wait for ever.
        (Exchange("copy", "inside", 0, 1024), N_RANKS, r"CUDA_LAUNCH_BLOCKING=1 .* reduction='behind'"),
        # Programs of the sum may come first and wait, on all multiprocessors, for a product that finds no room.
        (Exchange("push", "beside", N_SMS, 64), N_RANKS, r"sms, .* must be 1 to 131 on this GPU of 132 SMs, got 132"),
        (Exchange("copy", "behind", 0, 64), 1, "where all ranks sum all rows, push or pull"),
        (Exchange("push"), 1, "all ranks sum all rows: reduction='beside' or 'behind'"),
    ],
)
def test_a_step_that_could_not_end_is_refused_before_anything_is_queued(
    gpu: Gpu, exchange: Exchange, n_parts: int, told: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(ValueError, match=told):
        queued(gpu, exchange, plan_of(n_parts))
    assert gpu.queued == []


def test_what_no_step_could_do_is_refused_where_it_is_said(gpu: Gpu):
    """A push on no multiprocessor, for which peers would wait, or on all, where a product finds no room; a sum on none; odd chunks."""
    from kernels import moe_reduce_rs

    step: Any = moe_reduce_rs.MoeReduceScatter.__call__
    for n_push_sms in (0, N_SMS):
        with pytest.raises(ValueError, match=rf"n_push_sms.* 1 to 131 .* 132 SMs, got {n_push_sms}"):
            step(SimpleNamespace(n_ranks=2), None, None, None, 1, n_push_sms)
    with pytest.raises(ValueError, match="needs multiprocessors, got sms=0"):
        Exchange("push", "beside")
    with pytest.raises(ValueError, match="power of two"):
        Exchange(chunk_rows=100)


def test_a_shard_goes_to_its_place_at_each_peer_and_raises_its_flag(gpu: Gpu):
    """Rank 1 of three: two steps use both slots; flags have the number of the step, credits that of the one before."""
    pushes = gather.PushGather(torch.Size((2, 8)), BF16, torch.device("cpu"), GROUP)
    for epoch in (1, 2):
        shard = torch.full((2, 8), float(epoch), dtype=BF16)
        gathered = pushes.start(shard)
        pushes.finish()
        assert (gathered.epoch, list(gathered.shards.shape), gathered.flags.tolist()) == (epoch, [6, 8], [0, 0, 0])
        for peer in (0, 2):
            at_peer = pushes._memory.on(peer)
            assert torch.equal(at_peer["slots"][epoch % 2, 1], shard)
            assert not at_peer["slots"][:, [0, 2]].any()
            assert (at_peer["ready"].tolist(), at_peer["credits"].tolist()) == ([0, epoch, 0], [0, epoch - 1, 0])
    assert not pushes._memory.own["slots"].any()


def test_a_failing_driver_call_names_the_function(monkeypatch: pytest.MonkeyPatch):
    """And the number of the error; values wrap around, each with its weight, and the driver takes less than 256 at once."""
    calls: list[Any] = []

    def fail(*args: Any) -> int:
        calls.append(args)
        return 700

    monkeypatch.setattr(gather, "driver_function", lambda name: fail)
    stream, words = cast(Any, SimpleNamespace(cuda_stream=7)), torch.zeros(4, dtype=torch.int32)
    ops = gather.MemoryOps([(gather.WRITE, words, 3), (gather.WAIT, words, 1)], [1, 2])
    with pytest.raises(RuntimeError, match="cuStreamBatchMemOp_v2 failed with CUDA driver error 700"):
        ops.queue(stream, 2**32 + 5)
    assert [(op.operation, op.address - words.data_ptr(), op.value) for op in calls[0][2]] == [(2, 12, 5), (1, 4, 10)]
    with pytest.raises(RuntimeError, match="cuMemcpyAsync failed with CUDA driver error 700"):
        gather.copy(40, words, stream)
    assert calls[1] == (40, words.data_ptr(), 16, 7)
    with pytest.raises(ValueError, match="at most 255 operations at once, got 256"):
        gather.MemoryOps([(gather.WAIT, words, 0)] * 256)


def test_the_flags_of_a_part_count_all_its_elements():
    """Whatever the rows, also where the last ranks have few rows or none; each fits into the flags of its line."""
    plan = Plan(m=37, n=5, n_parts=4, dtype=BF16, partial_dtype=BF16, gathers=False)
    assert [plan.rows_of(part) for part in range(4)] == [10, 10, 10, 7]
    assert [sum(plan.flag_elements(part)) for part in range(4)] == [50, 50, 50, 35]
    assert Plan(m=5, n=5, n_parts=4, dtype=BF16, partial_dtype=BF16, gathers=False).rows_of(3) == 0
    assert all(len(plan.flag_elements(part)) <= plan.n_flags for part in range(4))


def test_tiles_of_a_part_are_a_permutation():
    """`tile_block` names each tile of an odd part once, columns of four tiles together."""
    tiles = [shard_gemm.tile_block.fn(tile, 7, 5, 4) for tile in range(35)]
    assert sorted(tiles) == [(row, col) for row in range(7) for col in range(5)]
    assert tiles[:5] == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1)]


def test_a_tuner_tries_one_shot_for_few_rows_and_two_shot_for_several():
    """Both algorithms between, as their bytes and latencies are close there."""
    tried = [{config["algorithm"] for config in config_space() if prune_fn(config, torch.empty(m, 1))} for m in (1, 16, 2048)]
    assert tried == [{"one_shot"}, {"one_shot", "two_shot"}, {"two_shot"}]


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
@pytest.mark.usefixtures("gpu")
def test_programs_of_a_config_fit_a_multiprocessor_together(block: tuple[int, int, int], options: Any, is_kept: bool):
    """By the registers that a compiler may take at most, and by the shared memory of the stages; a tuner's own configs do."""
    one: Any = make_config(*block, **options)
    first = make_config(128, 256, 64, warps=8, stages=3)
    assert (one in drop_hopeless([first, one], {"part_rows": 2048})) == is_kept
    assert drop_hopeless(gpu_configs(), {"part_rows": 2048}) == gpu_configs()
    assert 0 < len(drop_hopeless(gpu_configs(), {"part_rows": 16})) < len(gpu_configs())  # tiles of mostly padding


@pytest.mark.parametrize(
    ("stages", "per_sm", "told"),
    [
        (4, 2, r"2 programs .* 131104 bytes .* 115712 .* PER_SM=1"),
        (3, 0, r"PER_SM, the programs .* on each SM, must be 1 or more, got 0"),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_a_launch_whose_programs_do_not_fit_together_is_refused(stages: int, per_sm: int, told: str):
    """A program without room would start when another one ends, which may wait for its tiles: before the launch, with the numbers."""
    config: Any = make_config(128, 128, 64, warps=4, stages=stages, per_sm=per_sm)
    with pytest.raises(ValueError, match=told):
        config.pre_hook({"a": SimpleNamespace(), "b": SimpleNamespace(), **config.all_kwargs()})


def test_programs_of_a_multiprocessor_start_a_tile_apart():
    """So that they send in turn: the first of each SM at once, the second when the tensor cores have had time for a tile of the first."""
    assert {start_cycles.fn(program, 264, 128 * 128, 5504, 2) for program in range(132)} == {0}
    assert {start_cycles.fn(program, 264, 128 * 128, 5504, 2) for program in range(132, 264)} == {2 * 128 * 128 * 5504 // 4096}
    assert {start_cycles.fn(program, 132, 128 * 128, 5504, 1) for program in range(132)} == {0}
    assert all(each.kwargs["PER_SM"] > 1 for each in gpu_configs() if each.kwargs["STAGGER"])  # alone it would only be late


def test_epochs_wrap_around_and_slots_take_turns():
    """Also across the wrap."""
    assert [symmetric.next_step(2**31 - 2 + i) for i in range(3)] == [(2**31 - 1, 1), (-(2**31), 0), (-(2**31) + 1, 1)]


def test_tensors_of_a_block_start_at_multiples_of_128_bytes():
    """None overlaps the next one, and none is empty of bytes."""
    starts, n_bytes = symmetric.offsets({"a": ((3,), BF16), "b": ((65, 2), torch.int32), "c": ((0,), torch.int32)})
    assert (starts, n_bytes) == ({"a": 0, "b": 128, "c": 768}, 768)


@pytest.mark.parametrize("failure", [None, "CUDA out of memory"])
def test_peers_blocks_stay_mapped_as_long_as_the_memory_lives(failure: str | None, monkeypatch: pytest.MonkeyPatch):
    """Torch's buffers are bare addresses: the memory itself holds the handle that keeps them mapped.

    A rank without memory is told of on all ranks before the rendezvous, in which the others would wait for it for ever.
    """
    import torch.distributed._symmetric_memory as torchs

    handles: list[Any] = []

    class Handle:
        """What torch's rendezvous returns: a peer's block is mapped as long as this lives."""

        def get_buffer(self, rank: int, sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(sizes, dtype=dtype)

    def rendezvous(own: torch.Tensor, group: object) -> Handle:
        handles.append(weakref.ref(handle := Handle()))
        return handle

    fakes = {"get_rank": lambda _: 0, "get_world_size": lambda _: 2, "barrier": lambda _: None}
    for name, fake in {**fakes, "all_gather_object": lambda by_rank, own, group: by_rank.__setitem__(slice(None), [own, failure])}.items():
        monkeypatch.setattr(dist, name, fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torchs, "empty", lambda n, dtype, device: torch.empty(n, dtype=dtype))
    monkeypatch.setattr(torchs, "rendezvous", rendezvous)
    if failure:
        with pytest.raises(RuntimeError, match="no symmetric memory of 256 bytes on all ranks: rank 1: CUDA out of memory"):
            symmetric._cuda_blocks(256, torch.device("cpu"), GROUP)
        assert handles == []
        return
    blocks, mappings = symmetric._cuda_blocks(256, torch.device("cpu"), GROUP)
    assert [len(block) for block in blocks] == [256, 256]
    del blocks
    assert handles[0]() is mappings


def test_ranks_with_different_layouts_are_told(gpu: Gpu, monkeypatch: pytest.MonkeyPatch):
    """A ValueError on every rank, with the layouts of all."""
    monkeypatch.setattr(dist, "all_gather_object", lambda by_rank, own, group: by_rank.__setitem__(slice(None), [own, "slots [3]", own]))
    with pytest.raises(ValueError, match=r"needs one layout on all ranks, got \['slots \[2\] torch.float32', 'slots \[3\]'"):
        symmetric.SymmetricMemory({"slots": ((2,), torch.float32)}, torch.device("cpu"), GROUP)
