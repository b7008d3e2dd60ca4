"""A tuning of four ranks on two hosts, two on each, with torchrun's c10d rendezvous; and what
happens to the network and the hosts.

    .venv/bin/python -m tests.faults.hosts --write logs/faults-cpu/README.md
    .venv/bin/python -m tests.faults.hosts --gpus

The last has a rank for each GPU, half of them on each host, and NCCL through sockets.

Hosts are network namespaces of this machine (see ``link``), so it runs as root. The fake driver
compiles real kernels, so that each host's cache of compiled kernels shows which were compiled
there.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import write_table
from tests.faults.link import HOSTS, Link, address

ROOT = Path(__file__).parents[2]
DEADLINE_S = 4.0
TOLD_WITHIN_S = 3 * DEADLINE_S + 0.5
"""Ranks that are cut off leave within three deadlines (docs/reliability.md); the step sleeps
meanwhile.
"""
BLOCKS = (16, 32, 64, 128)
FAULT_AT = 6
"""Run of the step, in the race, at whose beginning the fault happens."""
FAULTS = ("link cut", "host lost", "agent killed")
"""A lost host says nothing more.

An agent that is killed, its host's first process, takes its ranks along, and connections close.
"""
CASES = ("nothing", "50 ms", "clocks apart", *FAULTS)
HEAD = ["| fault | told | seconds | kernels compiled on each host |", "|---|---|---|---|"]


@dataclass(frozen=True)
class Result:
    """What came of one case."""

    case: str
    n_ranks: int
    seconds: float
    """From the fault until the last rank that is left knew; without a fault, the tuning."""
    ranks: dict[int, Any] = field(default_factory=dict)
    """Rank -> what it returned or raised; ranks that ended without a word are left out."""
    n_compiled: dict[str, int] = field(default_factory=dict)
    """Host -> kernels that were compiled on it, with those that were compiled twice."""

    @property
    def row(self) -> str:
        """A line of the table."""
        told = sorted(
            {each.get("error") or f"right, {each['winner']}" for each in self.ranks.values()}
        )
        silent = [f"rank {rank} ended" for rank in range(self.n_ranks) if rank not in self.ranks]
        compiled = (
            "-" if self.case in FAULTS else ", ".join(f"{n}" for n in self.n_compiled.values())
        )
        return f"| {self.case} | {'; '.join(told + silent)} | {self.seconds:.1f} | {compiled} |"


# -- a rank ----------------------------------------------------------------------------------------


def rank_main(case: str, folder: Path) -> None:
    """Tune a step of one kernel and an all-reduce; write what came of it."""
    if case == "clocks apart" and os.environ["HOST"] == "b":
        now = time.time
        time.time = lambda: now() + 3600.0
    import torch
    import torch.distributed as dist
    from triton.backends.nvidia.compiler import CUDABackend

    from dist_tune import contextual_autotune
    from dist_tune.testing import ExactTime, FakeH200, install_fake_driver
    from tests.steps import autotuned, best, launch

    if has_gpus := bool(os.environ["CUDA_VISIBLE_DEVICES"]):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        install_fake_driver()
        ExactTime.keep()  # else four ranks on two cores choose by who was kept waiting
    FakeH200.launch_ms = staticmethod(
        lambda src, metadata: (
            1.0 if src.constants[(src.fn.arg_names.index("BLOCK"),)] == 64 else 6.0
        )
    )
    make_cubin, compiled = CUDABackend.make_cubin, []

    def counting(*args: Any) -> Any:
        compiled.append(1)
        return make_cubin(*args)

    CUDABackend.make_cubin = counting
    dist.init_process_group("nccl" if has_gpus else "gloo")
    if has_gpus:
        dist.barrier()  # NCCL connects ranks at their first collective, which takes seconds
    lock = (folder / f"lock-{dist.get_rank()}").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)  # until this process ends
    rank, kernel, n_runs = dist.get_rank(), autotuned(blocks=BLOCKS), 0

    @contextual_autotune(is_dist=True, n_repeat=5, n_warmup=1)
    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal n_runs
        n_runs += 1
        if n_runs == FAULT_AT:
            (folder / f"at-{rank}").touch()
            time.sleep(0.5 if case in FAULTS else 0.0)
        y = launch(kernel, x)
        dist.all_reduce(y[:256])
        return y

    told: dict[str, Any] = {}
    began = time.perf_counter()
    try:
        step(torch.ones(1 << 22, device="cuda") if has_gpus else torch.ones(256))
        told = {"winner": best(kernel)}
    except Exception as error:  # noqa: BLE001  # the driver shall see it
        told = {"error": type(error).__name__, "message": str(error)}
    told |= {
        "host": os.environ["HOST"],
        "compiled": len(compiled),
        "seconds": time.perf_counter() - began,
    }
    (folder / f"part-{rank}").write_text(json.dumps(told))
    os.replace(folder / f"part-{rank}", folder / f"told-{rank}")
    time.sleep(10.0 if "error" in told else 0.5)  # torchrun ends the others when one rank ends
    os._exit(0)


# -- the driver ------------------------------------------------------------------------------------


def play(case: str, n_gpus: int = 0) -> Result:
    """Start the job on both hosts, let the fault happen, wait for all ranks."""
    n_each = n_gpus // 2 or 2  # ranks of a host
    every, delay_s = range(2 * n_each), 0.025 if case == "50 ms" else 0.0
    with tempfile.TemporaryDirectory() as name, Link(delay_s) as link:
        folder = Path(name)
        jobs = {
            host: _start(link, host, case, folder, n_each, has_gpus=n_gpus > 0) for host in HOSTS
        }
        began = _wait(folder, "at", every)
        link.is_cut = case in ("link cut", "host lost")  # a host without power sends no resets
        if case in ("host lost", "agent killed"):
            _kill(jobs["b"])
        try:
            left = every[:n_each] if case in ("host lost", "agent killed") else every
            ended = _wait(folder, "told", left)
        finally:
            for job in jobs.values():
                _kill(job)
        ranks = {
            rank: json.loads(path.read_text())
            for rank in every
            if (path := folder / f"told-{rank}").exists()
        }
        hosts = {
            host: sum(each["compiled"] for each in ranks.values() if each["host"] == host)
            for host in HOSTS
        }
        is_fault = case in FAULTS
        return Result(
            case,
            len(every),
            ended - began if is_fault else max(each["seconds"] for each in ranks.values()),
            ranks,
            hosts,
        )


def _start(
    link: Link, host: str, case: str, folder: Path, n_each: int, *, has_gpus: bool
) -> subprocess.Popen[bytes]:
    own, first = folder / host, HOSTS.index(host) * n_each
    through_sockets = {
        "NCCL_HOSTID": host,
        "NCCL_SOCKET_IFNAME": "wire",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
    }
    env = {
        **os.environ,
        "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT)),
        "HOST": host,
        "CUDA_VISIBLE_DEVICES": (
            ",".join(map(str, range(first, first + n_each))) if has_gpus else ""
        ),
        **through_sockets,
        "TRITON_INTERPRET": "0",
        "GLOO_SOCKET_IFNAME": "wire",
        "OMP_NUM_THREADS": "1",
        "DIST_TUNE_DEADLINE_S": f"{2 * DEADLINE_S if has_gpus else DEADLINE_S:g}",
        "DIST_TUNE_VERBOSITY": "quiet",
        "DIST_TUNE_CACHE_DIR": str(own / "records"),
        "DIST_TUNE_LOG_DIR": str(own / "logs"),
        "TRITON_CACHE_DIR": str(own / "triton"),
    }
    rendezvous = [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={address('a')}:29400",
        "--rdzv-id=hosts",
        f"--local-addr={address(host)}",
    ]
    place = [
        f"--node-rank={HOSTS.index(host)}",
        f"--rdzv-conf=is_host={host == 'a'}",
        "--nnodes=2",
        f"--nproc-per-node={n_each}",
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *rendezvous,
        *place,
        "-m",
        "tests.faults.hosts",
        "--rank",
        case,
        str(folder),
    ]
    return link.start(
        host, command, env, ahead_s=3600 if case == "clocks apart" and host == "b" else 0
    )


def _wait(folder: Path, what: str, ranks: range) -> float:
    """The time when these ranks had come there, or ended."""
    end = time.monotonic() + 240.0
    while time.monotonic() < end:
        if all(
            (folder / f"{what}-{rank}").exists()
            or (what == "told" and _has_ended(folder / f"lock-{rank}"))
            for rank in ranks
        ):
            return time.monotonic()
        time.sleep(0.02)
    raise TimeoutError(
        f"ranks have not come to {what!r}, and told:"
        f" {[each.read_text() for each in sorted(folder.glob('told-*'))]}"
    )


def _has_ended(path: Path) -> bool:
    """True once a rank's process is gone: torchrun's agent may hang."""
    if not path.exists():
        return False
    with path.open() as file, suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _kill(job: subprocess.Popen[bytes]) -> None:
    """All processes of a host: the agent's session and those of its ranks."""
    for pid in [*_descendants(job.pid), job.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.wait()


def _descendants(pid: int) -> list[int]:
    children = [
        int(each)
        for task in Path(f"/proc/{pid}/task").glob("*/children")
        for each in task.read_text().split()
    ]
    return [found for child in children for found in (*_descendants(child), child)]


def main() -> None:
    """Play all cases; or be a rank of one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument(
        "--gpus",
        action="store_true",
        help="all GPUs of this machine, an even number, in place of the fake driver",
    )
    parser.add_argument("--write", type=Path, help="put the table into this page")
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rank[0], Path(options.rank[1]))
        return
    results, n_gpus = [], 0
    if options.gpus:
        import torch

        n_gpus = torch.cuda.device_count()
        if not n_gpus or n_gpus % 2:
            parser.error(f"--gpus needs two GPUs, or another even number; here are {n_gpus}")
    for case in CASES:
        results.append(play(case, n_gpus))
        print(results[-1].row, flush=True)
        for rank, told in results[-1].ranks.items():
            if "message" in told:
                print(f"  rank {rank}: {told['message']}", flush=True)
    if options.write:
        write_table(options.write, "hosts", [*HEAD, *(each.row for each in results)])


if __name__ == "__main__":
    main()
