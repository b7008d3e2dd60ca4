"""What the steps of kernels/ queue on a GPU that is not there: on which stream, in which order, on
how many SMs, and what they refuse.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torchs
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels import gather, partials, steady_launch, symmetric
from kernels.moe_reduce_rs import MoeReduceScatter
from kernels.partials import Exchange, PartialSums, Plan
from kernels.push_gemm import make_config

N_SMS, RANK, N_RANKS, ROWS, N = 132, 1, 3, 300, 40
BF16, GROUP, CUDA = torch.bfloat16, cast(Any, "a group of three"), torch.device("cuda")


class Kernel(JITFunction[Any]):  # type: ignore[misc]  # Triton has no types
    """A `triton.jit` kernel that notes its launches, by Triton and by its compiled form: how, grid,
    arguments, those by name.
    """

    def __init__(self, arg_names: Sequence[str], note: Callable[..., None]) -> None:
        self.arg_names, self.note, self.fn, self.pre_run_hooks = arg_names, note, self, list[Any]()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def looked_up(*args: Any, **fixed: Any) -> Any:
            self.note("looked up", grid, args, fixed)
            return {(*grid, 1, 1)[:3]: lambda *args: self.note("kept", grid, args, {})}

        return looked_up


class Gpu:
    """Streams, kernels and a driver that note what is queued; copies and writes of words are made
    at once.
    """

    def __init__(self) -> None:
        self.queued: list[tuple[str, str, Any]] = []
        self.given: dict[str, dict[str, Any]] = {}
        """Arguments of the launches that Triton did not look up."""
        self.memories: list[symmetric.SymmetricMemory] = []
        self.mappings: list[Any] = []
        """Of peers' blocks: each lives as long as one is mapped."""
        self.status = 0
        """What the driver answers."""
        self.names = iter(("main", "second", "third"))
        self.current = self.main = self.stream()

    def stream(self, *_: Any, **__: Any) -> Any:
        name = next(self.names)

        def wait(what: Any) -> None:
            self.queued.append((name, "waits for", what.name))

        return SimpleNamespace(name=name, cuda_stream=name, wait_event=wait, wait_stream=wait)

    def event(self) -> Any:
        return SimpleNamespace(
            name="start",
            record=lambda *_: self.queued.append((self.current.name, "records", "start")),
        )

    @contextmanager
    def on(self, stream: Any) -> Generator[None]:
        self.current = stream
        yield
        self.current = self.main

    def kernel(self, name: str, arg_names: Sequence[str]) -> Kernel:
        def note(how: str, grid: tuple[int, ...], args: Any, fixed: Any) -> None:
            self.queued.append((self.current.name, name, grid[0]))
            if how == "kept":
                self.given[name] = dict(zip(arg_names, args, strict=True))

        return Kernel(arg_names, note)

    def driver(self, function: str) -> Any:
        def call(*args: Any) -> int:
            if function == "cuMemcpyAsync":
                self.queued.append((args[3], "copies", args[2]))
                ctypes.memmove(*args[:3])
                return self.status
            self.queued.append(
                (
                    args[0],
                    {gather.WAIT: "waits for words", gather.WRITE: "writes words"}[
                        args[2][0].operation
                    ],
                    args[1],
                )
            )
            for op in args[2]:
                if op.operation == gather.WRITE:
                    ctypes.c_uint32.from_address(op.address).value = op.value
            return self.status

        return call

    def rendezvous(self, own: torch.Tensor, group: object) -> Any:
        class Handle:
            def get_buffer(self, rank: int, sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
                return torch.zeros(sizes, dtype=dtype)

        self.mappings.append(weakref.ref(handle := Handle()))
        return handle


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Rank 1 of three, whose peers' memory is in this process."""
    found = Gpu()

    class Memory(symmetric.SymmetricMemory):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.device = torch.device("cpu")  # of its tables
            found.memories.append(self)

    def same(by_rank: list[Any], own: object, group: object) -> None:
        by_rank[:] = [own] * N_RANKS

    everyone = {
        "get_rank": lambda _: RANK,
        "get_world_size": lambda *_: N_RANKS,
        "get_process_group_ranks": lambda _: range(N_RANKS),
    }
    hopper = {
        "max_shared_mem": 227 * 1024,
        "max_num_regs": 65536,
        "multiprocessor_count": N_SMS,
        "warpSize": 32,
    }
    utils = SimpleNamespace(get_device_properties=lambda _: hopper)
    streams = {
        "Stream": found.stream,
        "Event": found.event,
        "stream": found.on,
        "current_stream": lambda: found.current,
    }
    kernels = {
        name: found.kernel(name, getattr(partials, name).arg_names)
        for name in ("push_gemm_kernel", "sum_kernel")
    }
    fakes: dict[Any, dict[str, Any]] = {
        dist: {**everyone, "barrier": lambda _: None, "all_gather_object": same},
        torch.cuda: {**streams, "synchronize": lambda _: None},
        torchs: {
            "empty": lambda n, dtype, device: torch.empty(n, dtype=dtype),
            "rendezvous": found.rendezvous,
        },
        # Without a GPU the kernels were imported for the interpreter, whose flags have fewer rows.
        knobs.runtime: {"interpret": False},
        partials: {**kernels, "FLAG_ROWS": 64, "SymmetricMemory": Memory},
        gather: {"driver_function": found.driver, "SymmetricMemory": Memory},
        driver: {"_active": SimpleNamespace(get_current_device=lambda: 99, utils=utils)},
    }
    for owner, name in [(owner, name) for owner, named in fakes.items() for name in named]:
        monkeypatch.setattr(owner, name, fakes[owner][name])
    return found


# -- row-parallel products -------------------------------------------------------------------------


def plan_of(n_parts: int = N_RANKS, *, gathers: bool = False) -> Plan:
    return Plan(
        m=ROWS * N_RANKS, n=N, n_parts=n_parts, dtype=BF16, partial_dtype=BF16, gathers=gathers
    )


def queued(gpu: Gpu, exchange: Exchange, plan: Plan, per_sm: int = 1) -> list[tuple[str, str, Any]]:
    """What a step queues, behind a first one that made streams and tables."""
    sums = PartialSums(plan, CUDA, GROUP)
    a, b, c = (
        torch.zeros(plan.m, 64, dtype=BF16),
        torch.zeros(N, 64, dtype=BF16),
        torch.zeros(plan.m, N, dtype=BF16),
    )
    for _ in range(2):
        del gpu.queued[:]
        sums.step(
            a, b, c, exchange, config=make_config(64, 64, 64, warps=4, stages=4, per_sm=per_sm)
        )
    return gpu.queued


STARTED, PRODUCT = ("main", "records", "start"), ("main", "push_gemm_kernel", 15)
FOLLOWS, JOINED = ("second", "waits for", "start"), ("main", "waits for", "second")
BESIDE = [FOLLOWS, ("second", "sum_kernel", 5), JOINED]


def copied(n_flags: int, rows: int) -> list[tuple[str, str, int]]:
    return [
        ("second", "waits for words", n_flags),
        ("second", "copies", rows * N * 2),
        ("second", "writes words", n_flags),
    ]


@pytest.mark.parametrize(
    ("exchange", "gathers", "per_sm", "expected"),
    [
        # The copy stream waits for counts of each chunk, copies it and writes flags; what comes
        # next waits for the copies.
        (
            Exchange("copy", "behind", 0, 128),
            *(False, 1),
            [
                STARTED,
                PRODUCT,
                FOLLOWS,
                *(copied(2, 128) * 2 + copied(1, 44)) * 2,
                ("main", "sum_kernel", 3),
                JOINED,
            ],
        ),
        # A product that sums waits for its peers' copies, and no kernel follows.
        (
            Exchange("copy", "inside", 0, 1024),
            False,
            1,
            [STARTED, PRODUCT, FOLLOWS, *copied(5, ROWS) * 2, JOINED],
        ),
        # Product and sum fit on the GPU at once in either order; the current stream goes on behind
        # the sum.
        (
            Exchange("push", "beside", 120, 64),
            False,
            1,
            [STARTED, ("main", "push_gemm_kernel", N_SMS - 120), *BESIDE],
        ),
        # A sum is given multiprocessors, not programs: 4 are left, with two programs of the product
        # each.
        (
            Exchange("push", "beside", N_SMS - 4, 64),
            False,
            2,
            [STARTED, ("main", "push_gemm_kernel", 8), *BESIDE],
        ),
        # The kernel that gathers the sums has the GPU to itself.
        (Exchange("pull"), True, 1, [PRODUCT, ("main", "sum_kernel", 6)]),
    ],
)
def test_a_step_queues_its_product_its_copies_and_its_sum(
    gpu: Gpu, exchange: Exchange, gathers: bool, per_sm: int, expected: list[tuple[str, str, Any]]
):
    assert queued(gpu, exchange, plan_of(gathers=gathers), per_sm) == expected


def test_a_second_step_with_a_given_config_looks_up_no_launch(gpu: Gpu):
    """The product and the sum, with all arguments: what is given by name, and the config's blocks,
    too.
    """
    queued(gpu, Exchange("push", "behind", 0, 128), plan_of())
    assert gpu.given.keys() == {"push_gemm_kernel", "sum_kernel"}
    product = gpu.given["push_gemm_kernel"]
    assert [product[name] for name in ("N", "BLOCK_M", "PER_SM", "WORLD")] == [N, 64, 1, N_RANKS]
    assert product["a"].block_shape == [64, 64]


def test_a_step_on_another_stream_waits_for_the_last_one(gpu: Gpu):
    """Credits say that stream order has ended a step."""
    order = symmetric.StepOrder()
    order.follow(CUDA)
    with gpu.on(gpu.stream()):
        order.follow(CUDA)
        order.follow(CUDA)
    assert gpu.queued == [("second", "waits for", "main")]


def test_copies_bring_the_parts_of_peers_and_set_their_flags_to_what_counting_would_make_of_them(
    gpu: Gpu,
):
    """Each element of a part for a peer, in the slot of the step; behind each step the flags have
    as many elements as were ever sent.
    """
    plan = plan_of()
    PartialSums(plan, CUDA, GROUP)
    (memory,) = gpu.memories
    copier, elements = partials.Copier(plan, memory), torch.tensor(plan.flag_elements(0)).int()
    for epoch in (1, 2):
        copier.staged.fill_(epoch)
        copier.queue(epoch % 2, epoch, 128, gpu.event())
        for at_peer in (memory.on(0), memory.on(2)):
            assert torch.equal(at_peer["arrivals"][RANK, : len(elements)], epoch * elements)
            assert (at_peer["received"][epoch % 2, RANK, : ROWS * N] == epoch).all()
    assert not memory.own["received"].any()


@pytest.mark.parametrize(
    ("exchange", "n_parts", "told"),
    [
        # Copies are queued when the product is: where the launch returns at its end, all ranks
        # would wait for ever.
        (
            Exchange("copy", "inside", 0, 1024),
            N_RANKS,
            r"CUDA_LAUNCH_BLOCKING=1 .* reduction='behind'",
        ),
        # Programs of the sum may come first and wait, on all multiprocessors, for a product that
        # finds no room.
        (
            Exchange("push", "beside", N_SMS, 64),
            N_RANKS,
            r"sms, .* must be 1 to 131 on this GPU of 132 SMs, got 132",
        ),
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


@pytest.mark.usefixtures("gpu")
def test_what_no_step_could_do_is_refused_where_it_is_said():
    """A push on no multiprocessor, for which peers would wait, or on all, where a product finds no
    room; a sum on none; odd chunks.
    """
    step: Any = MoeReduceScatter(GROUP)
    for n_push_sms in (0, N_SMS):
        with pytest.raises(
            ValueError, match=rf"n_push_sms.* 1 to 131 .* 132 SMs, got {n_push_sms}"
        ):
            step(None, None, None, 1, n_push_sms)
    with pytest.raises(ValueError, match="needs multiprocessors, got sms=0"):
        Exchange("push", "beside")
    with pytest.raises(ValueError, match="power of two"):
        Exchange(chunk_rows=100)


def test_the_flags_of_a_part_count_all_its_elements():
    """Whatever the rows, also where the last ranks have few rows or none; each fits into the flags
    of its line.
    """
    for m, rows in ((37, [10, 10, 10, 7]), (5, [2, 2, 1, 0]), (4000, [1000] * 4)):
        plan = Plan(m=m, n=5, n_parts=4, dtype=BF16, partial_dtype=BF16, gathers=False)
        assert [plan.rows_of(part) for part in range(4)] == rows
        assert [sum(plan.flag_elements(part)) for part in range(4)] == [5 * each for each in rows]
        assert len(plan.flag_elements(0)) <= plan.n_flags


# -- memory and copies -----------------------------------------------------------------------------


def test_a_shard_goes_to_its_place_at_each_peer_and_raises_its_flag(gpu: Gpu):
    """Rank 1 of three: two steps use both slots; flags have the number of the step, credits that of
    the one before.
    """
    pushes = gather.PushGather(torch.Size((2, 8)), BF16, CUDA, GROUP)
    (memory,) = gpu.memories
    for epoch in (1, 2):
        shard = torch.full((2, 8), float(epoch), dtype=BF16)
        gathered = pushes.start(shard)
        pushes.finish()
        assert (gathered.epoch, list(gathered.shards.shape), gathered.flags.tolist()) == (
            epoch,
            [6, 8],
            [0, 0, 0],
        )
        for at_peer in (memory.on(0), memory.on(2)):
            assert torch.equal(at_peer["slots"][epoch % 2, 1], shard)
            assert not at_peer["slots"][:, [0, 2]].any()
            assert (at_peer["ready"].tolist(), at_peer["credits"].tolist()) == (
                [0, epoch, 0],
                [0, epoch - 1, 0],
            )
    assert not memory.own["slots"].any()


def test_a_failing_driver_call_names_the_function(gpu: Gpu):
    """And the number of the error; values wrap around, each with its weight, and the driver takes
    less than 256 at once.
    """
    gpu.status, words = 700, torch.zeros(4, dtype=torch.int32)
    with pytest.raises(
        RuntimeError, match="cuStreamBatchMemOp_v2 failed with CUDA driver error 700"
    ):
        gather.MemoryOps([(gather.WRITE, words, 3), (gather.WRITE, words, 1)], [1, 2]).queue(
            gpu.stream(), 2**32 + 5
        )
    assert words.tolist() == [0, 10, 0, 5]
    with pytest.raises(ValueError, match="at most 255 operations at once, got 256"):
        gather.MemoryOps([(gather.WAIT, words, 0)] * 256)


def test_epochs_wrap_around_and_slots_take_turns():
    """Also across the wrap."""
    assert [symmetric.next_step(2**31 - 2 + i) for i in range(3)] == [
        (2**31 - 1, 1),
        (-(2**31), 0),
        (-(2**31) + 1, 1),
    ]


def test_tensors_of_a_block_start_at_multiples_of_128_bytes():
    """None overlaps the next one, and none is empty of bytes."""
    starts, n_bytes = symmetric.offsets(
        {"a": ((3,), BF16), "b": ((65, 2), torch.int32), "c": ((0,), torch.int32)}
    )
    assert (starts, n_bytes) == ({"a": 0, "b": 128, "c": 768}, 768)


LAYOUT: symmetric.Layout = {"slots": ((2,), torch.float32)}


def test_peers_blocks_stay_mapped_as_long_as_the_memory_lives(gpu: Gpu):
    """Torch's buffers are bare addresses: the memory itself holds the handle that keeps them
    mapped.
    """
    memory = symmetric.SymmetricMemory(LAYOUT, CUDA, GROUP)
    (mapping,) = gpu.mappings
    assert mapping()
    del memory
    assert not mapping()


@pytest.mark.parametrize(
    ("own", "other", "told"),
    [
        (
            "slots [2] torch.float32",
            "slots [3]",
            (
                r"ValueError: .* one layout on all ranks, got \['slots \[2\] torch.float32', 'slots"
                r" \[3\]'"
            ),
        ),
        (
            "",
            "out of memory",
            r"RuntimeError: no symmetric memory of 128 bytes on all ranks: rank 1: out of memory",
        ),
    ],
)
def test_what_one_rank_lacks_is_told_on_all(
    gpu: Gpu, own: str, other: str, told: str, monkeypatch: pytest.MonkeyPatch
):
    """Another layout, or no memory, by a peer: before the rendezvous, in which ranks would wait for
    it for ever.
    """

    def gathered(by_rank: list[str], text: str, group: object) -> None:
        by_rank[:] = [text, other if text == own else text, text]

    monkeypatch.setattr(dist, "all_gather_object", gathered)
    with pytest.raises((ValueError, RuntimeError)) as refused:
        symmetric.SymmetricMemory(LAYOUT, CUDA, GROUP)
    assert re.match(told, f"{refused.typename}: {refused.value}")
    assert gpu.mappings == []


# -- launches that Triton need not look up again ---------------------------------------------------


class Steady:
    """A kernel's launches, always the same but for the second tensor and the key."""

    def __init__(self) -> None:
        self.noted: list[Any] = []
        self.kernel: Any = Kernel(
            ("x", "y", "n", "BLOCK", "WIDTH"), lambda *launch: self.noted.append(launch)
        )

    def launch(
        self, y: torch.Tensor | None = None, key: str = "shape", module: Any = steady_launch
    ) -> str:
        """How the kernel was launched."""
        y = torch.zeros(64) if y is None else y
        module.launch(
            self.kernel,
            (2, 3),
            (torch.zeros(64), y, 5),
            {"WIDTH": 8, "BLOCK": 4, "num_warps": 2},
            key=key,
        )
        return str(self.noted[-1][0])


@pytest.mark.usefixtures("gpu")
def test_the_second_launch_of_a_key_and_alignment_is_that_of_the_compiled_kernel():
    """With all arguments in the order of the kernel's, and none of the compiler's options.

    Triton compiles another kernel for addresses that are no multiple of 16 bytes, and for another
    key what the caller says.
    """
    steady, x = Steady(), torch.zeros(65)
    ways = [
        steady.launch(y, key)
        for key, y in (("shape", x[:64]), ("other", x[:64]), ("shape", x[1:]), ("shape", x[:64]))
    ]
    assert ways == ["looked up"] * 3 + ["kept"]
    assert [
        (launch[1], launch[2][2:], launch[3]) for launch in (steady.noted[0], steady.noted[-1])
    ] == [
        ((2, 3), (5,), {"WIDTH": 8, "BLOCK": 4, "num_warps": 2}),
        ((2, 3), (5, 4, 8), {}),
    ]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("owner", "name", "value", "is_kept_apart"),
    [
        # A compiled kernel is loaded on the device that was current then, wherever the tensors are.
        (driver, "_active", SimpleNamespace(get_current_device=lambda: 1), True),
        (knobs.runtime, "debug", True, True),
        (knobs.compilation, "instrumentation_mode", "cycles", True),
        (
            None,
            "pre_run_hooks",
            [lambda *args, **kwargs: None],
            False,
        ),  # Triton calls them in its look-up
        (knobs.runtime, "add_stages_inspection_hook", lambda *_: ("key", "hash"), False),
        (
            JITFunction,
            "run",
            lambda *_: "a note",
            False,
        ),  # as in replays of a tuner, which records launches, or leaves them out
    ],
)
def test_what_triton_s_look_up_decides_is_looked_up(
    owner: Any, name: str, value: Any, is_kept_apart: bool, monkeypatch: pytest.MonkeyPatch
):
    """Changed, as before, changed, as before: what Triton compiles anew for has a kernel of its
    own, and what is seen there alone none.
    """
    steady, ways = Steady(), []
    for _ in range(2):
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(owner or steady.kernel, name, value)
            ways.append(steady.launch())
        ways.append(steady.launch())
    assert ways == ["looked up", "looked up", "kept" if is_kept_apart else "looked up", "kept"]


@pytest.mark.usefixtures("gpu")
def test_a_launch_is_seen_also_by_who_has_replaced_the_look_up_before_the_import(
    monkeypatch: pytest.MonkeyPatch,
):
    """As in a step that imports its kernels when it first runs, in a tuner's recording."""
    monkeypatch.setattr(JITFunction, "run", lambda *_: None)
    fresh = importlib.util.module_from_spec(steady_launch.__spec__)
    steady_launch.__spec__.loader.exec_module(fresh)  # type: ignore[union-attr]
    steady = Steady()
    assert [steady.launch(module=fresh) for _ in range(2)] == ["looked up"] * 2
