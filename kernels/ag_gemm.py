"""AllGather-GEMM: C[M, N / W] = all_gather(A[M / W, K]) @ B[N / W, K].T, the gather hidden behind the matrix product.

The step (`AllGatherGemm`) and its command line; the kernel is in shard_gemm.py, the gather in gather.py, the clocks in
step_times.py. Without a GPU the same step runs under the Triton interpreter on gloo ranks.

    torchrun --nproc_per_node=4 kernels/ag_gemm.py --case check
    launch/launch.sh kernels/ag_gemm.py --case tune --shape 4096,11008,4096
    launch/launch.sh kernels/ag_gemm.py --case perf --shape 4096,11008,4096 --shape 8192,28672,8192
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, also where torchrun started the file itself
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where a kernel is defined, so before the imports below
# NVLink multicast is of no use here, and torch and NCCL would set it up: a crash with it open can cost a host its GPUs.
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import triton
from rich.console import Console
from rich.table import Table

from dist_tune import contextual_autotune
from kernels import step_times
from kernels.gather import CollectiveGather, Gather, PushGather
from kernels.shard_gemm import TMA_ALIGNMENT_BYTES, make_config, multiply_shards

Shape = tuple[int, int, int]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
N_CHECK_INPUTS = 5


class AllGatherGemm:
    """One step of AllGather-GEMM on a process group; calling it queues the step on the current stream and returns C.

    Collective: every rank of the group calls it, with the same shapes and dtype. M / W, N / W and K can be any number from 1;
    where K is no multiple of 8, both operands are padded first, which costs a copy of each.

    Args:
        group: the ranks that hold A and B; the default group if None.
        config: the launch config to use. None: the one in the kernel's cache, tuned on a miss.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, config: triton.Config | None = None) -> None:
        group = dist.group.WORLD if group is None else group
        if group is None:
            raise ValueError("AllGatherGemm needs a process group: call torch.distributed.init_process_group first")
        self._group = group
        self._rank, self._n_ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._gathers: dict[tuple[torch.Size, torch.dtype, torch.device], Gather] = {}
        self.config = config

    def __call__(self, a_shard: torch.Tensor, b_shard: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """C [M, N / W], written to `out` if given; `a_shard` is [M / W, K], `b_shard` [N / W, K]."""
        c = self._result_for(a_shard, b_shard, out)
        a_shard, b_shard = loadable(a_shard), loadable(b_shard)
        gather = self.gather_for(a_shard)
        # The copies first: nothing that a peer waits for is queued behind a kernel that waits for a peer.
        gathered = gather.start(a_shard)
        try:
            multiply_shards(a_shard, gathered.shards, b_shard, c, gathered.flags, gathered.epoch, self._rank, self.config)
        finally:
            gather.finish()
        return c

    def gather_for(self, a_shard: torch.Tensor) -> Gather:
        """The gather used by steps with shards like `a_shard`. Collective where there is none yet."""
        shape, dtype, device = a_shard.shape, a_shard.dtype, a_shard.device
        if (shape, dtype, device) not in self._gathers:
            by_rank: list[Any] = [None] * self._n_ranks
            dist.all_gather_object(by_rank, (tuple(shape), str(dtype)), group=self._group)
            if len(set(by_rank)) > 1:
                raise ValueError(f"the shards of A need one shape and dtype on all ranks, got {by_rank}")
            self._gathers[shape, dtype, device] = (
                PushGather(shape, dtype, device, self._group) if device.type == "cuda" else CollectiveGather(shape, dtype, self._group)
            )
        return self._gathers[shape, dtype, device]

    def _result_for(self, a_shard: torch.Tensor, b_shard: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        reason = unusable(a_shard, b_shard)
        if reason:
            given = f"A's shard {list(a_shard.shape)} {a_shard.dtype}, B's {list(b_shard.shape)} {b_shard.dtype}"
            raise ValueError(f"{reason}; got {given}")
        shape = (a_shard.shape[0] * self._n_ranks, b_shard.shape[0])
        if out is None:
            return a_shard.new_empty(shape)
        if out.shape != shape or out.dtype != a_shard.dtype or out.device != a_shard.device or not out.is_contiguous():
            raise ValueError(f"need out as contiguous {list(shape)} {a_shard.dtype} on {a_shard.device}; got {list(out.shape)} {out.dtype}")
        return out


def unusable(a_shard: torch.Tensor, b_shard: torch.Tensor) -> str:
    """Why two operands cannot be multiplied; empty if they can."""
    if a_shard.dim() != 2 or b_shard.dim() != 2 or a_shard.shape[1] != b_shard.shape[1]:
        return "need A's shard as [M / W, K] and B's as [N / W, K]"
    if a_shard.dtype not in DTYPES.values() or b_shard.dtype != a_shard.dtype or b_shard.device != a_shard.device:
        return "need bfloat16 or float16, the same for both, on one device"
    return "" if a_shard.numel() and b_shard.numel() else "nothing to multiply"


def loadable(operand: torch.Tensor) -> torch.Tensor:
    """`operand` as a tensor descriptor can read it: contiguous, aligned, K padded with zeros to a multiple of 16 bytes."""
    alignment = TMA_ALIGNMENT_BYTES // operand.element_size()
    if operand.shape[1] % alignment:
        return F.pad(operand, (0, -operand.shape[1] % alignment))
    if not operand.is_contiguous() or operand.data_ptr() % TMA_ALIGNMENT_BYTES:
        return operand.clone(memory_format=torch.contiguous_format)
    return operand


def random_operands(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's shards of A and B, normally distributed; other ranks' differ."""
    (m, n, k), n_ranks = shape, dist.get_world_size()
    if m % n_ranks or n % n_ranks:
        raise ValueError(f"M and N must be multiples of the {n_ranks} ranks, got --shape {m},{n},{k}")
    a, b = (torch.randn(rows // n_ranks, k, device=device, dtype=dtype) for rows in (m, n))
    return a, b


def relative_error(c: torch.Tensor, a_shard: torch.Tensor, b_shard: torch.Tensor) -> float:
    """||C - reference|| / ||reference||, in float32, MAX over ranks; inf where a rank has a NaN."""
    a = a_shard.new_empty(c.shape[0], a_shard.shape[1])
    dist.all_gather_into_tensor(a, a_shard)
    reference = a.float() @ b_shard.float().T
    error = (c.float() - reference).norm() / reference.norm()
    worst = error.nan_to_num(nan=float("inf"), posinf=float("inf")).reshape(1)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def check(shape: Shape, dtype: torch.dtype, device: torch.device, config: triton.Config) -> float:
    """The worst relative error of steps on fresh inputs, queued without a host sync and with ranks out of step."""
    step = AllGatherGemm(config=config)
    inputs = [random_operands(shape, dtype, device) for _ in range(N_CHECK_INPUTS)]
    a_live = torch.empty_like(inputs[0][0])
    rounds = inputs * (4 if device.type == "cuda" else 1)
    outs = [torch.full((shape[0], b.shape[0]), float("nan"), dtype=dtype, device=device) for _, b in rounds]
    for i, ((a, b), out) in enumerate(zip(rounds, outs, strict=True)):
        if device.type == "cuda" and (i + dist.get_rank()) % 3 == 0:
            torch.cuda._sleep(1_000_000)  # half a millisecond: longer than a step, so that peers run ahead of this rank
        a_live.copy_(a)  # the same memory for every step's A: a copy engine still at the last one would send this one
        step(a_live, b, out)
    return max(relative_error(out, a, b) for (a, b), out in zip(rounds, outs, strict=True))


def check_configs(device: torch.device) -> list[triton.Config]:
    """Configs that between them take every path of the kernel."""
    if device.type == "cpu":
        return [make_config(64, 64, 64, warps=4, stages=2), make_config(32, 64, 64, warps=4, stages=2, flatten=True, split=True)]
    wide = [make_config(128, 256, 64, warps=8, stages=3, flatten=f, split=s) for f in (False, True) for s in (False, True)]
    square = [make_config(128, 128, 64, warps=4, stages=6, flatten=True), make_config(64, 64, 64, warps=4, stages=4, flatten=True)]
    return [*wide, make_config(256, 128, 64, warps=8, stages=3), *square]


def tune(shape: Shape, dtype: torch.dtype, device: torch.device, console: Console) -> Callable[..., torch.Tensor]:
    """Tune the step at a shape, show how that went, and return the tuned step."""
    ag_gemm = AllGatherGemm()

    @contextual_autotune(is_dist=True, n_warmup=3, n_repeat=5)
    def step(a_shard: torch.Tensor, b_shard: torch.Tensor) -> torch.Tensor:
        return ag_gemm(a_shard, b_shard)

    a, b = random_operands(shape, dtype, device)
    error = relative_error(step(a, b), a, b)
    record = step.records[-1]
    by_latency = sorted(record.candidates, key=lambda c: float("inf") if c.latency_ms is None else c.latency_ms)
    table = Table("", "agreed ms", "step ms", "failure", "config", title=f"{record.kernel} {record.key}")
    for candidate in by_latency:
        is_winner = candidate.index == record.winner
        times = [f"{ms:.4f}" if ms is not None else "-" for ms in (candidate.latency_ms, candidate.closure_ms)]
        table.add_row("*" if is_winner else "", *times, candidate.failure or "", candidate.config.split(" pre_hook=")[0])
    console.print(table)
    winners: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(winners, (record.winner, record.best.config))
    console.print(f"winner: {winners[0][1].split(' pre_hook=')[0]}; the same on all {len(winners)} ranks: {len(set(winners)) == 1}")
    console.print(f"{record.n_replays} replays, {record.seconds:.2f} s; relative error {error:.1e}; why: .autotune_logs/rank-<i>.log")
    if len(set(winners)) > 1:
        raise RuntimeError(f"ranks hold different winners: {winners}")
    return step


def gather_only(gather: Gather, a_shard: torch.Tensor) -> None:
    """A step without its product."""
    gather.start(a_shard)
    gather.finish()


def default_shapes(case: str, n_ranks: int, device: torch.device) -> list[Shape]:
    """Shapes for a case; those of `check` include rows, columns and depths that no block divides."""
    w, large = n_ranks, [(4096, 11008, 4096), (2048, 14336, 4096), (8192, 28672, 8192)]
    if case != "check":
        return large if device.type == "cuda" else [(256, 256, 128)]
    if device.type == "cuda":
        return [large[0], (1037 * w, 1000 * w, 1000), (333 * w, 1003 * w, 1001), (w, 8 * w, 8)]
    return [(37 * w, 40 * w, 72), (70 * w, 35 * w, 45), (w, 8 * w, 8)]


def run_case(case: str, shape: Shape, dtype: torch.dtype, device: torch.device, console: Console) -> bool:
    """Run one case at one shape; False if it failed."""
    if case == "check":
        # Accumulation is in float32, so only the result is rounded: by half a unit in the last place, by one where truncated.
        limit, is_good = torch.finfo(dtype).eps, True
        for config in check_configs(device):
            error = check(shape, dtype, device, config)
            is_good &= error <= limit
            verdict = "ok" if error <= limit else f"FAILED, the limit is {limit:.1e}"
            choices = " ".join(f"{name}={value}" for name, value in config.all_kwargs().items() if value is not None)
            console.print(f"check M,N,K={shape} {dtype} relative error {error:.2e} {verdict} {choices}")
        return is_good
    step = tune(shape, dtype, device, console)
    if case == "perf":
        a, b = random_operands(shape, dtype, device)
        gather = AllGatherGemm().gather_for(a)
        runs = step_times.contenders(lambda: step(a, b), lambda: gather_only(gather, a), a, b)
        console.print(step_times.table(step_times.measure(shape, runs)))
    return True


def parse_shape(text: str) -> Shape:
    """`M,N,K`, all of them global."""
    m, n, k = (int(number) for number in text.split(","))
    return m, n, k


def main() -> int:
    """Join the ranks that torchrun started, run the case on every shape, leave; 1 if any failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--case", choices=["check", "tune", "perf"], default="check")
    parser.add_argument("--shape", type=parse_shape, action="append", metavar="M,N,K", help="global shape; may be given again")
    parser.add_argument("--dtype", choices=sorted(DTYPES), action="append", help="may be given again; bf16 if not given")
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("needs ranks: torchrun --nproc_per_node=2 kernels/ag_gemm.py ..., or launch/launch.sh kernels/ag_gemm.py ...")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    elif options.case == "perf":
        parser.error("--case perf needs GPUs: the interpreter's times say nothing about them")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None)
    torch.manual_seed(dist.get_rank())
    # torch 2.13 has a new name for it, which 2.11 has not.
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.* is deprecated", category=FutureWarning)
    # One writer, and a terminal's width where there is none to ask: tables in logs stay in one piece.
    console = Console(width=None if sys.stdout.isatty() else 190, quiet=dist.get_rank() != 0)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, Triton interpreter"
    console.print(f"{dist.get_world_size()} x {name}, torch {torch.__version__}, triton {triton.__version__}")
    shapes = options.shape or default_shapes(options.case, dist.get_world_size(), device)
    try:
        results = [run_case(options.case, shape, DTYPES[dtype], device, console) for shape in shapes for dtype in options.dtype or ["bf16"]]
        dist.barrier()  # nobody frees memory that a peer still writes to
    finally:
        dist.destroy_process_group()
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
