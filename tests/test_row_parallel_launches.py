"""kernels/partials.py and kernels/copier.py on a GPU: what is queued on which stream, in which order, on how many SMs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

pytestmark = pytest.mark.once

N_SMS, RANK, N_RANKS, ROWS, N = 132, 1, 3, 300, 40


class Gpu:
    """Streams and kernels that only note what is queued."""

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
        return SimpleNamespace(name="start", record=lambda: self.queued.append((self.current.name, "records", "start")))

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
            else:
                assert args[1] == len(args[2]) < 256
                self.queued.append((args[0], {1: "waits for words", 2: "writes words"}[args[2][0].operation], args[1]))
            return 0

        return call


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Rank 1 of three, whose peers' memory is in this process."""
    from kernels import copier, gather, partials, push_gemm, symmetric

    found = Gpu()
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)  # behind the import, which other tests share
    for module in (copier, partials):  # fewer where they were first imported for the interpreter
        monkeypatch.setattr(module, "FLAG_ROWS", 64)
    collectives = {"get_rank": lambda _: RANK, "get_world_size": lambda _: N_RANKS}
    for name, fake in {**collectives, "all_gather_object": lambda by_rank, own, group: by_rank.__setitem__(slice(None), [own] * 3)}.items():
        monkeypatch.setattr(dist, name, fake)
    fakes = {"Stream": found.stream, "Event": found.event, "stream": found.on, "current_stream": lambda: found.current}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(symmetric, "_mapped_blocks", lambda n, group: [torch.zeros(n, dtype=torch.uint8) for _ in range(N_RANKS)])
    monkeypatch.setattr(gather, "driver_function", found.driver)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_device=lambda: 0))
    properties = {"multiprocessor_count": N_SMS, "max_shared_mem": 227 * 1024, "max_num_regs": 65536, "warpSize": 32}
    for module in (partials, push_gemm):
        monkeypatch.setattr(module, "device_properties", lambda: properties)
    for name in ("push_gemm_kernel", "sum_kernel"):
        monkeypatch.setattr(partials, name, found.kernel(name, getattr(partials, name).arg_names))
    return found


def queued(gpu: Gpu, exchange: Any, *, gathers: bool = False, per_sm: int = 1) -> list[tuple[str, str, Any]]:
    """What a step queues, behind a first one that made streams and tables."""
    from kernels.partials import PartialSums, Plan
    from kernels.push_gemm import make_config

    bf16, config, group = torch.bfloat16, make_config(64, 64, 64, warps=4, stages=4, per_sm=per_sm), None
    plan = Plan(m=ROWS * N_RANKS, n=N, n_parts=N_RANKS, dtype=bf16, partial_dtype=bf16, gathers=gathers)
    sums = PartialSums(plan, torch.device("cpu"), group)  # type: ignore[arg-type]
    on_gpu: Any = SimpleNamespace(type="cuda")
    sums._device = on_gpu
    if exchange.move == "copy":
        from kernels.copier import Copier

        sums._copier = Copier(plan, sums._memory)
        sums._copier._stream = torch.cuda.Stream()
    a, b, c = torch.zeros(plan.m, 64, dtype=bf16), torch.zeros(N, 64, dtype=bf16), torch.zeros(plan.m, N, dtype=bf16)
    for _ in range(2):
        del gpu.queued[:]
        sums.step(a, b, c, exchange, config=config)
    return gpu.queued


def test_copies_follow_the_product_and_the_sum_follows_them(gpu: Gpu):
    """The copy stream waits for counts of each chunk, copies it and writes flags; what comes next waits for the copies."""
    from kernels.partials import Exchange

    steps = queued(gpu, Exchange("copy", "behind", 0, 128))
    chunk = [("second", "waits for words", 2), ("second", "copies", 128 * N * 2), ("second", "writes words", 2)]
    last = [("second", "waits for words", 1), ("second", "copies", 44 * N * 2), ("second", "writes words", 1)]
    assert steps == [
        ("main", "records", "start"),
        ("main", "push_gemm_kernel", 15),
        ("second", "waits for", "start"),
        *(chunk + chunk + last) * 2,
        ("main", "sum_kernel", 3),
        ("main", "waits for", "second"),
    ]


def test_a_product_that_sums_waits_for_copies_of_its_peers_and_no_kernel_follows(gpu: Gpu):
    """The own copies run on a stream of their own; the next step waits for them, as it overwrites their source."""
    from kernels.partials import Exchange

    steps = queued(gpu, Exchange("copy", "inside", 0, 1024))
    copied = [("second", "waits for words", 5), ("second", "copies", ROWS * N * 2), ("second", "writes words", 5)]
    assert steps == [
        ("main", "records", "start"),
        ("main", "push_gemm_kernel", 15),
        ("second", "waits for", "start"),
        *copied * 2,
        ("main", "waits for", "second"),
    ]


def test_the_next_step_waits_for_copies_also_where_the_sum_was_not_launched(gpu: Gpu, monkeypatch: pytest.MonkeyPatch):
    """Its product overwrites their source, and a push counts at the peer on top of the flags that the copies leave there."""
    from kernels.partials import Exchange, PartialSums

    def fail(*_: Any) -> None:
        raise RuntimeError("does not compile")

    monkeypatch.setattr(PartialSums, "_sum", fail)
    with pytest.raises(RuntimeError, match="does not compile"):
        queued(gpu, Exchange("copy", "behind", 0, 1024))
    assert gpu.queued[-1] == ("main", "waits for", "second")


def test_a_product_that_waits_for_copies_is_refused_where_launches_block(gpu: Gpu, monkeypatch: pytest.MonkeyPatch):
    """Copies are queued when the product is: where the launch returns at its end, all ranks would wait for ever."""
    from kernels.partials import Exchange

    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(ValueError, match=r"CUDA_LAUNCH_BLOCKING=1 .* reduction='behind'"):
        queued(gpu, Exchange("copy", "inside", 0, 1024))
    assert gpu.queued == []
    assert queued(gpu, Exchange("copy", "behind", 0, 1024))


def test_a_copy_that_fails_on_a_cpu_is_the_error_of_its_own_rank(gpu: Gpu, monkeypatch: pytest.MonkeyPatch):
    """The peers' flags are raised all the same, as their products spin on them; the next step's copies are made."""
    from kernels.copier import Copier
    from kernels.partials import PartialSums, Plan

    bf16, group = torch.bfloat16, None
    plan = Plan(m=ROWS * N_RANKS, n=N, n_parts=N_RANKS, dtype=bf16, partial_dtype=bf16, gathers=False)
    memory = PartialSums(plan, torch.device("cpu"), group)._memory  # type: ignore[arg-type]
    copier, ends = Copier(plan, memory), Copier._ends
    elements = torch.tensor(plan.flag_elements(0)).int()

    def fail(*_: Any) -> Any:
        raise RuntimeError("no memory")

    for epoch in (1, 2):
        monkeypatch.setattr(Copier, "_ends", fail if epoch == 1 else ends)
        copier.begin(epoch % 2, epoch, 128)
        copier.staged.fill_(epoch)
        copier.counts[:, : len(elements)] += elements
        copier.queue(epoch % 2, epoch, 128, None)
        with pytest.raises(RuntimeError, match="no memory") if epoch == 1 else nullcontext():
            copier.join()
        assert all(torch.equal(memory.on(peer)["arrivals"][RANK, : len(elements)], epoch * elements) for peer in (0, 2))
    assert all((memory.on(peer)["received"][0, RANK, : ROWS * N] == 2).all() for peer in (0, 2))


def test_a_sum_beside_the_product_starts_with_it_and_leaves_it_its_multiprocessors(gpu: Gpu):
    """Product and sum fit on the GPU at once in either order; the current stream goes on behind the sum."""
    from kernels.partials import Exchange

    steps = queued(gpu, Exchange("push", "beside", 120, 64))
    assert steps == [
        ("main", "records", "start"),
        ("main", "push_gemm_kernel", N_SMS - 120),
        ("second", "waits for", "start"),
        ("second", "sum_kernel", 5),
        ("main", "waits for", "second"),
    ]


def test_a_sum_that_leaves_the_product_no_multiprocessor_is_refused(gpu: Gpu):
    """Its programs may come first and wait, on all of them, for a product that finds no room: before anything is queued."""
    from kernels.partials import Exchange

    with pytest.raises(ValueError, match=r"sms=132 .* has 132: .* 131"):
        queued(gpu, Exchange("push", "beside", N_SMS, 64))
    assert gpu.queued == []


def test_two_programs_of_a_product_share_a_multiprocessor_which_a_sum_beside_it_has_alone(gpu: Gpu):
    """A sum is given multiprocessors, not programs: 4 are left, with two programs of the product each."""
    from kernels.partials import Exchange

    steps = queued(gpu, Exchange("push", "beside", N_SMS - 4, 64), per_sm=2)
    assert [step for step in steps if step[1].endswith("kernel")] == [("main", "push_gemm_kernel", 8), ("second", "sum_kernel", 5)]


def test_a_second_step_with_a_given_config_looks_up_no_launch(gpu: Gpu):
    """The product and the sum, with all arguments: what is given by name, and the config's blocks, too."""
    from kernels import partials

    product, total, exchange = partials.push_gemm_kernel, partials.sum_kernel, partials.Exchange("push", "behind", 0, 128)  # type: ignore[attr-defined]
    queued(gpu, exchange)
    assert [len(args) for args in gpu.given] == [len(product.arg_names), len(total.arg_names)]
    by_name = dict(zip(product.arg_names, gpu.given[0], strict=True))
    assert (by_name["N"], by_name["BLOCK_M"], by_name["PER_SM"], by_name["WORLD"]) == (N, 64, 1, N_RANKS)
    assert by_name["a"].block_shape == [64, 64]


def test_gathered_sums_are_taken_behind_the_own_one(gpu: Gpu):
    """A product that sums needs no kernel for that; the kernel that gathers has the GPU to itself."""
    from kernels.partials import Exchange

    assert queued(gpu, Exchange("pull"), gathers=True) == [("main", "push_gemm_kernel", 15), ("main", "sum_kernel", 6)]
