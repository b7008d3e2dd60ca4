r"""Start jobs that know nothing of dist_tune, with it and without it, and time them from outside.

    python -m benchmarks.jobs.watch --cpu --steps 3000 --after 100 --out FOLDER
    python -m benchmarks.jobs.watch --gpu --size device --vanilla fla --steps 5000 --after 100 \
        --budget-s 480 --regret --out FOLDER

All times come from the jobs' own clocks and from this process's, which are one on Linux: steps and
losses from the files that the jobs write, the end of a tuning from the line on its terminal. What
was told stands beside what was seen. Each way of a job has fresh processes; those that are cold
have fresh folders too. FOLDER gets results.md, results.json and a log for each job, as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.jobs.beside import Line, Way, read_times, told_beside_seen, winners_in

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LAUNCHER = ROOT / "dist_tune/launch.sh"
_LOOK_S = 0.25
_MIN_S = 10.0
"""With less time than that left no way of a job is started."""
_CUT = 200_000
"""Characters of each stream and log of a way that are kept."""


@dataclass(frozen=True)
class Job:
    """A script of this folder."""

    script: Path
    step: str
    """As ``dist-tune launch --step`` takes it."""
    sizes: Mapping[str, str]
    """Arguments for each size."""


JOBS = {
    "fla": Job(
        HERE / "fla_ddp/train.py",
        "hybrid:Trainer.step",
        {
            "small": "--dim 64 --heads 2 --layers 2 --vocab 64 --batch 1 --tokens 128",
            "host": "--dim 1024 --heads 8 --layers 4 --batch 4 --tokens 2048",
            "device": "--dim 2048 --heads 16 --layers 4 --batch 4 --tokens 4096",
        },
    ),
    "trainer": Job(
        HERE / "hf_trainer/train.py",
        "transformers.trainer:Trainer.training_step",
        {
            "small": "--dim 64 --heads 2 --layers 2 --vocab 64 --batch 1 --tokens 128",
            "host": "--dim 1024 --heads 4 --layers 4 --batch 4 --tokens 2048",
            "device": "--dim 2048 --heads 8 --layers 4 --batch 4 --tokens 4096",
        },
    ),
    "mamba2": Job(
        HERE / "mamba2_fsdp/train.py",
        "mamba2:Trainer.step",
        {
            "small": "--dim 64 --state 32 --layers 2 --vocab 64 --batch 1 --tokens 256",
            "host": "--dim 1024 --layers 4 --batch 4 --tokens 2048",
            "device": "--dim 2048 --layers 8 --batch 4 --tokens 4096",
        },
    ),
}
WAYS = {
    "tuned": "tuned",
    "records": "tuned",
    "first": "tuned",
    "vanilla cold": "vanilla",
    "vanilla compiled": "vanilla",
}
"""Way -> the folder of its caches, in which later ways find what earlier ones compiled."""


class Watch:
    """A run of all jobs, with what has been found so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out = Path(options.out).resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.scratch = Path(tempfile.mkdtemp(prefix="jobs-"))
        self.console = Console(width=160, soft_wrap=False)
        self.ends_s: float = time.monotonic() + options.budget_s
        self.found: dict[str, dict[str, Way]] = {}
        self.regrets: list[dict[str, Any]] = []

    def left_s(self) -> float:
        """Seconds of the budget."""
        return self.ends_s - time.monotonic()

    def run(self) -> None:
        """All jobs, each with its share of the time that is left."""
        try:
            for i, name in enumerate(self.options.jobs):
                n_left = len(self.options.jobs) - i
                self.run_job(name, time.monotonic() + self.left_s() / n_left)
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def run_job(self, name: str, ends_s: float) -> None:
        """One job in all ways."""
        ways = self.found[name] = {}
        has_vanilla = name in self.options.vanilla
        for way in self.options.ways:
            if way.startswith("vanilla") and not has_vanilla:
                continue
            left_s = min(self.options.way_s, ends_s - time.monotonic())
            if left_s < _MIN_S:
                ways[way] = Way(way, ended="not run: no time was left")
            else:
                ways[way] = self.run_way(name, way, left_s)
            row = ways[way].row(self.options.plain_steps)
            print(f"{name}: " + ", ".join(f"{k} {v}" for k, v in row.items()), flush=True)
            self.write()
            sys.stdout.flush()
            if way == "tuned" and name == "fla" and self.options.regret:
                self.run_regret(name, ends_s)
        for table in self.tables(name):
            self.console.print(table)
        sys.stdout.flush()

    def run_way(self, name: str, way: str, timeout_s: float) -> Way:
        """One job in one way, in fresh processes."""
        folder = self.scratch / name / way.replace(" ", "-")
        folder.mkdir(parents=True)
        command = self.command(name, way, folder)
        is_enough = self.enough(folder, is_tuned=way == "tuned")
        environment = self.environment(name, way, folder)
        ran = run_watched(command, environment, folder, timeout_s, is_enough)
        texts = [each.read_text() for each in sorted(folder.glob("times.*"))]
        logs = [each.read_text() for each in sorted(folder.glob("logs/rank-*.log"))]
        self.keep_log(name, way, command, folder)
        return Way(
            way,
            ended=ran.ended,
            wall_s=ran.wall_s,
            began_s=ran.began_s,
            ranks=[read_times(each) for each in texts],
            lines=ran.lines,
            winners=[winners_in(each) for each in logs],
        )

    def command(self, name: str, way: str, folder: Path) -> list[str]:
        """By the launcher with the step's name, or by torchrun alone."""
        job, options = JOBS[name], self.options
        n_ranks = f"--nproc-per-node={options.ranks}"
        if way.startswith("vanilla"):
            start = [sys.executable, "-m", "torch.distributed.run", "--standalone", n_ranks]
        else:
            start = ["bash", str(LAUNCHER), n_ranks, "--is-dist", "--step", job.step]
        sizes = job.sizes[options.size].split()
        program = [str(job.script), *sizes, "--steps", str(options.steps)]
        if options.cpu:
            program = [str(HERE / "on_cpu.py"), *program]
        if name == "trainer":
            program += ["--output", str(folder / "checkpoints")]
        return [*start, *program, "--times", str(folder / "times")]

    def environment(self, name: str, way: str, folder: Path) -> dict[str, str]:
        """Of one way, with the folders of its caches."""
        caches = self.scratch / name / f"{WAYS[way]}-caches"
        paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
        own = {
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "TRITON_INTERPRET": "0",
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "DIST_TUNE_CACHE_DIR": str(caches / "records"),
            "DIST_TUNE_LOG_DIR": str(folder / "logs"),
            # As the launcher sets it, for the ways that do not use it.
            "NCCL_NVLS_ENABLE": "0",
        }
        if way == "first":
            own["DIST_TUNE_MODE"] = "first"
        if self.options.cpu:
            own["DIST_TUNE_DEADLINE_S"] = "120"  # ranks share two cores with compilers
            own["CUDA_VISIBLE_DEVICES"] = ""
            own["JOBS_CONFIGS"] = str(self.options.configs)
        return {**os.environ, **own}

    def enough(self, folder: Path, *, is_tuned: bool) -> Callable[[Sequence[Line]], bool]:
        """Whether a job has run long enough: a tuned one behind the end of its tuning."""
        n_after: int = self.options.after
        n_plain: int = self.options.plain_steps

        def is_enough(lines: Sequence[Line]) -> bool:
            way = Way("", lines=list(lines))
            path = folder / "times.0"
            if not path.exists() or not (n_after if is_tuned else n_plain):
                return False
            times, at_s = read_times(path.read_text()), way.told.calls_at_s
            if not is_tuned:
                return times.n_steps > n_plain
            return at_s is not None and times.n_steps > times.step_at(at_s) + n_after

        return is_enough

    def run_regret(self, name: str, ends_s: float) -> None:
        """The winners of the tuned job beside all their configs, each timed alone by graphs."""
        folder = self.scratch / name / "regret"
        folder.mkdir()
        result = folder / "regret.json"
        environment = self.environment(name, "tuned", folder)
        records = environment["DIST_TUNE_CACHE_DIR"]
        limit_s = max(_MIN_S, min(self.options.regret_s, ends_s - time.monotonic()))
        arguments = ["--records", records, "--out", str(result), "--limit-s", f"{limit_s - 5:.0f}"]
        program = [str(JOBS[name].script), *JOBS[name].sizes[self.options.size].split()]
        program += ["--steps", "2", "--times", str(folder / "times")]
        command = [sys.executable, "-m", "benchmarks.jobs.regret", *arguments, *program]
        run_watched(command, environment, folder, limit_s, None)
        self.keep_log(name, "regret", command, folder)
        if result.exists():
            self.regrets = json.loads(result.read_text())
        self.write()

    def tables(self, name: str) -> list[Table]:
        """Of a job, as they stand on a terminal."""
        ways = self.found[name]
        rows = {
            f"{name}: each way": [each.row(self.options.plain_steps) for each in ways.values()],
            f"{name}: told beside seen": told_beside_seen(ways),
        }
        if name == "fla" and self.regrets:
            regrets = [shown_regret(each) for each in self.regrets]
            rows[f"{name}: winners beside all configs"] = regrets
        return [_table(title, each) for title, each in rows.items()]

    def write(self) -> None:
        """What has been found so far."""
        text = [f"`python -m benchmarks.jobs.watch {' '.join(sys.argv[1:])}`\n"]
        for name, ways in self.found.items():
            arguments = JOBS[name].sizes[self.options.size]
            script = "/".join(JOBS[name].script.parts[-2:])
            text += [f"## {name}\n", f"`{script} {arguments}`\n"]
            text += [markdown([each.row(self.options.plain_steps) for each in ways.values()])]
            text += [markdown(told_beside_seen(ways))]
            if name == "fla" and self.regrets:
                text += [markdown([shown_regret(each) for each in self.regrets])]
        (self.out / "results.md").write_text("\n".join(text))
        found: dict[str, Any] = {}
        for name, ways in self.found.items():
            found[name] = {way: each.facts() for way, each in ways.items()}
        content = {"jobs": found, "regret": self.regrets}
        (self.out / "results.json").write_text(json.dumps(content, indent=1))

    def keep_log(self, name: str, way: str, command: Sequence[str], folder: Path) -> None:
        """Add what a way has written, to the one file of its job."""
        paths = [folder / "stderr", folder / "stdout", *sorted(folder.glob("logs/rank-[01].log"))]
        with (self.out / f"{name}.log").open("a") as log:
            log.write(f"==== {way}: {' '.join(command)}\n")
            for path in filter(Path.exists, paths):
                text = path.read_text(errors="replace")
                n_left = len(text) - _CUT
                cut = f"[{n_left} characters left out]\n" if n_left > 0 else ""
                log.write(f"---- {path.name}\n{cut}{text[-_CUT:]}\n")


# -- processes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """A command that was watched."""

    ended: str
    began_s: float
    """By ``time.perf_counter``, which all processes of a machine share on Linux."""
    wall_s: float
    lines: list[Line]
    """Of its stderr."""


def run_watched(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    timeout_s: float,
    is_enough: Callable[[Sequence[Line]], bool] | None,
) -> Ran:
    """Run a command to its end, to its timeout, or until it is enough; no process of it is left."""
    lines: list[Line] = []
    began_s = time.perf_counter()
    with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            cwd=folder,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stderr is not None

        def read(stream: Iterable[str]) -> None:
            for text in stream:
                lines.append(Line(time.perf_counter(), text.rstrip("\n")))
                stderr.write(text)
                stderr.flush()

        reader = threading.Thread(target=read, args=(process.stderr,), daemon=True)
        reader.start()
        ended = _wait(process, lines, began_s + timeout_s, is_enough)
        wall_s = time.perf_counter() - began_s
        reader.join(timeout=5)
    return Ran(ended, began_s, wall_s, lines)


def _wait(
    process: subprocess.Popen[str],
    lines: Sequence[Line],
    ends_s: float,
    is_enough: Callable[[Sequence[Line]], bool] | None,
) -> str:
    family = dict[int, str]()
    try:
        while process.poll() is None:
            # Kept, because a child whose parent has died is no longer known as its child.
            family |= _family(process.pid)
            if time.perf_counter() > ends_s:
                return "out of time"
            if is_enough is not None and is_enough(list(lines)):
                return "enough seen"
            time.sleep(_LOOK_S)
        return "ended" if process.returncode == 0 else f"FAILED with {process.returncode}"
    finally:
        # torchrun starts each rank in a session of its own: the group of the command is not all.
        for pid, started in (family | _family(process.pid)).items():
            with suppress(OSError):
                if _stat(pid)[1] == started:
                    os.kill(pid, signal.SIGKILL)
        process.wait()


def _stat(pid: int) -> tuple[int, str]:
    """Parent and start of a process; the start tells it from a later one of its number."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1]), fields[19]


def _family(pid: int) -> dict[int, str]:
    """A process and all that it has started, directly or not, with the times of their starts."""
    stats: dict[int, tuple[int, str]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            stats[int(path.name)] = _stat(int(path.name))
    found = {pid: stats[pid][1]} if pid in stats else {}
    n_before = 0
    while len(found) > n_before:
        n_before = len(found)
        found |= {each: started for each, (parent, started) in stats.items() if parent in found}
    return found


# -- tables ----------------------------------------------------------------------------------------


def shown_regret(row: Mapping[str, Any]) -> dict[str, str]:
    """A row of ``benchmarks.jobs.regret`` for a table."""
    return {
        "kernel": row["kernel"].rpartition(".")[2],
        "configs": str(row["n_timed"]),
        "winner, us by a graph": f"{1e3 * row['winner_ms']:.1f}",
        "best": f"{1e3 * row['best_ms']:.1f}",
        "regret": f"{100 * row['regret']:.1f} %",
        "told, us": f"{1e3 * row['told_ms']:.1f}" if row["told_ms"] is not None else "-",
        "told within 3 us or 5 %": "yes" if row["is_near"] else "NO",
    }


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A table with the columns of the first row."""
    if not rows:
        return ""
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _table(title: str, rows: Sequence[Mapping[str, str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in rows[0]:
        table.add_column(heading)
    for row in rows:
        table.add_row(*row.values())
    return table


def main() -> None:
    """Run what is asked for."""
    # A killed watcher would leave its jobs behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_is)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=[*JOBS])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="in this order")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--cpu", action="store_true", help="two ranks on the fake driver")
    where.add_argument("--gpu", action="store_true")
    parser.add_argument("--size", choices=("small", "host", "device"), help="small on CPUs")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400, help="of each job")
    parser.add_argument(
        "--after",
        type=int,
        default=0,
        help="end the tuned job so many steps after its tuning; 0: let it run to its end",
    )
    parser.add_argument(
        "--plain-steps",
        type=int,
        default=100,
        help="end each other job after so many; 0: let it run to its end",
    )
    parser.add_argument(
        "--configs",
        type=int,
        default=4,
        help="with --cpu, of each kernel; 0: all that it has",
    )
    parser.add_argument("--way-s", type=float, default=240, help="most seconds of one way")
    parser.add_argument("--budget-s", type=float, default=1800, help="most seconds of all jobs")
    parser.add_argument("--regret", action="store_true", help="on GPUs: all configs of job fla")
    parser.add_argument("--regret-s", type=float, default=90, help="most seconds of it")
    parser.add_argument(
        "--vanilla",
        nargs="*",
        choices=JOBS,
        default=[*JOBS],
        help="jobs that run without dist_tune too",
    )
    parser.add_argument("--out", default="jobs-results", help="folder of the results")
    options = parser.parse_args()
    options.size = options.size or ("small" if options.cpu else "device")
    if options.regret and options.cpu:
        parser.error("--regret times kernels, and --cpu runs none")
    Watch(options).run()


if __name__ == "__main__":
    main()
