"""The watcher of jobs: what it reads out of lines and times, and a small job that it starts."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.jobs import regret, watch
from benchmarks.jobs.beside import (
    Line,
    Times,
    Told,
    Way,
    agreement,
    read_times,
    slowdown,
    step_time,
    told_beside_seen,
    told_in,
    winners_in,
)

TOLD = """\
W1128 torch/distributed/run.py: something -> else
dist_tune: tuning Trainer.step on 2 ranks while it runs: 3 kernels, 20 configs
dist_tune: tuned in 210 calls, 150 of them timed, which took 3.1% of the job's time (at most 5%)
dist_tune: Trainer.step 1,012.5 -> 9.05 ms (1.12x faster), tuned in 40.0 s; slowest rank 1 (+14 %)
  scale_kernel [65536]  298 -> 26.1 ms  BLOCK=4096 num_warps=4
"""


def lines(text: str = TOLD) -> list[Line]:
    """A second between two."""
    return [Line(float(i), each) for i, each in enumerate(text.splitlines())]


def times_text(n: int, ms: float, *, slow_until: int = 0, slow_ms: float = 0.0) -> str:
    """Of steps that take ``ms`` each, or ``slow_ms`` up to one of them."""
    at, rows = 0.0, []
    for step in range(1, n + 1):
        begin = at
        at += (slow_ms if step <= slow_until else ms) / 1e3
        is_read = step == 1 or step % 10 == 0
        rows.append(f"{step} {begin}" + f" {1 / step} {at}" * is_read)
    return "\n".join(rows) + "\n"


def test_what_is_told_is_read_out_of_the_lines():
    """Of the step and not of its kernels; thousands have commas; the calls' line has its time."""
    assert told_in(lines()) == Told(1012.5, 9.05, 210, 2.0, 3.1, 1, 14.0, 1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", Told()),
        ("dist_tune: step 9.1 ms, tuned in 3.2 s", Told()),
        ("dist_tune: step 9.1 ms -> 8 ms; tuned in 7 calls", Told(9.1, 8.0, 7, 0.0, n_tunings=1)),
        ("dist_tune: it took 12 % of the job's time", Told(share=12.0)),
    ],
)
def test_what_is_not_told_is_none(text: str, told: Told):
    """Other words and fewer of them are no error."""
    assert told_in(lines(text)) == told


def test_a_step_s_time_is_taken_between_losses_that_were_read():
    """Begins of steps say nothing while the host runs ahead; the first steps are left out."""
    times = read_times(times_text(100, 5.0, slow_until=10, slow_ms=50.0))
    found = step_time(times)
    assert found is not None
    assert found.median_ms == pytest.approx(5.0)
    assert found.mean_ms == pytest.approx(5.0)
    assert found.n_steps == 90
    assert step_time(times, after=0, until=10) is not None
    assert step_time(times, after=95) is None
    assert [each.last for each in times.windows][:2] == [10, 20]


def test_a_line_that_is_half_written_is_left_out():
    """As of a job that was ended."""
    times = read_times("1 0.5 2.0 1.5\n2 1.6\n3 1.7 0.")
    assert (times.n_steps, times.losses) == (2, {1: 2.0})
    assert (times.step_at(1.55), times.step_at(1.65), times.step_at(0.1)) == (1, 2, 0)


def test_the_slowdown_is_what_the_tuning_added_to_the_job():
    """40 steps of 10 ms in place of 8 ms, up to the loss that is read next."""
    times = read_times(times_text(100, 8.0, slow_until=40, slow_ms=10.0))
    assert slowdown(times, 37, 8.0) == pytest.approx(20.0)
    assert slowdown(times, 200, 8.0) is None
    assert slowdown(Times(), 37, 8.0) is None


def test_ranks_are_compared_by_kernel_and_key():
    """The winner of a later tuning counts."""
    log = """\
12:00:00.000 INFO    step 303 -> 30.4 ms (9.95x faster), tuned in 4.9 s
12:00:00.000 INFO      site 1  k [1]  298 -> 26.1 ms (11.4x faster)  A=1 num_warps=4  fastest step
12:00:00.000 INFO      site 2  k [2]  26.1 ms                 A=1
12:00:09.000 INFO      site 1  k [1]  298 -> 26.1 ms (11.4x faster)  A=2 num_warps=4  fastest step
"""
    assert winners_in(log) == {"k [1]": "A=2 num_warps=4", "k [2]": "A=1"}
    assert agreement([{"a": "1"}, {"a": "1"}]) == "yes, 1 sites"
    assert agreement([{"a": "1", "b": "2"}, {"a": "2"}]).startswith("NO: 1 of 1")
    assert agreement([]) == "-"


def test_told_stands_beside_seen():
    """A job of 8 ms a step, which the tuning makes 4 ms; what is not known is a dash."""
    tuned = read_times(times_text(100, 4.0, slow_until=40, slow_ms=10.0))
    told = lines(TOLD.replace("1,012.5 -> 9.05", "8.1 -> 4.05"))
    told = [Line(0.395 if "calls" in each.text else each.at_s, each.text) for each in told]
    ways = {
        "tuned": Way("tuned", ranks=[tuned, tuned], lines=told, winners=[{"a": "1"}] * 2),
        "first": Way("first", ranks=[read_times(times_text(60, 8.0))]),
    }
    rows = {each[""]: (each["told"], each["seen"]) for each in told_beside_seen(ways)}
    assert rows["step before, ms"] == ("8.100", "8.00, mean 8.00 of 50 (job of first configs)")
    assert rows["step after, ms"] == ("4.050", "4.00, mean 4.00 of 60")
    assert rows["times as fast"] == ("2.000", "2.000")
    assert rows["tuned in calls"] == ("210", "40 steps, 0.4 s")
    assert rows["% of the job's time"] == ("3.10", "20.00")
    assert rows["slowest rank"] == ("rank 1, +14 %", "4.00, 4.00")
    assert rows["step with records, ms"] == ("-", "-")
    assert all("-" in each["seen"] for each in told_beside_seen({}))


def test_a_winner_is_compared_with_all_configs_that_can_be_timed(monkeypatch: pytest.MonkeyPatch):
    """Regret is that of the graphs' times; a told time is near within 3 us or 5 %."""

    def run(config: float, undo: None, *, is_trial: bool) -> float:
        return 1 / config

    best = Namespace(config="B=0.5", latency_ms=2.09)
    record: Any = Namespace(kernel="k", key="[1]", best=best, reason="fastest step")
    candidates = [0.5, 0.0, 0.8], ["B=0.5", "B=0", "B=0.8"], 0
    launch: Any = Namespace(candidates=lambda: candidates, run=run)
    monkeypatch.setattr(regret, "graph_ms", lambda launched: launched())
    found_ms, failed = regret.timed(launch)
    assert list(failed) == ["B=0"]
    row = regret.beside(record, found_ms)
    assert row is not None
    assert (row["n_timed"], row["best"], row["is_near"]) == (2, "B=0.8", True)
    assert row["regret"] == pytest.approx(0.6)
    assert watch.shown_regret(row)["regret"] == "60.0 %"
    assert regret.beside(record, {"B=0.8": 1.0}) is None
    assert regret.is_near(0.012, 0.01)
    assert not regret.is_near(0.014, 0.01)
    assert not regret.is_near(None, 1.0)


@pytest.mark.processes
def test_a_job_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path):
    """A child in a session of its own, as torchrun's ranks are, too."""
    child = f"{sys.executable} -c 'import time; time.sleep(60)'"
    script = f"setsid {child} & echo $! > child; echo told >&2; wait"
    done = watch.run_watched(["bash", "-c", script], {"PATH": "/usr/bin:/bin"}, tmp_path, 2.0, None)
    assert (done.ended, [each.text for each in done.lines]) == ("out of time", ["told"])
    stat = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    ends_s = time.monotonic() + 20
    while stat.exists() and ") Z " not in stat.read_text():  # a kill takes a busy machine a moment
        assert time.monotonic() < ends_s
        time.sleep(0.05)


STEP = """
import torch, torch.distributed as dist, triton, triton.language as tl

@triton.autotune([triton.Config({"BLOCK": b}) for b in (128, 256)], key=["n"])
@triton.jit
def double_kernel(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)

class Loop:
    def __init__(self):
        self.total = torch.zeros(1)
    def step(self):
        x = torch.ones(1024)
        double_kernel[lambda config: (triton.cdiv(1024, config["BLOCK"]),)](x, 1024)
        dist.all_reduce(x)
        self.total += x.sum()
        return self.total.clone()
"""
SCRIPT = """
import argparse, os, time
import torch.distributed as dist
from looped import Loop

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--times")
options = parser.parse_args()
dist.init_process_group("gloo")
loop = Loop()
with open(f"{options.times}.{dist.get_rank()}", "w", buffering=1) as times:
    for step in range(1, options.steps + 1):
        began = time.perf_counter()
        loss = loop.step()
        time.sleep(0.002)
        read = (loss.item(), time.perf_counter()) if step == 1 or step % 10 == 0 else ()
        print(step, began, *read, file=times)
dist.destroy_process_group()
"""


@pytest.mark.processes
@pytest.mark.slow  # a whole job; what is read out of one is tested above
def test_a_job_is_tuned_and_timed_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two ranks on the fake driver, compiled for real; it is ended some steps behind its tuning."""
    (tmp_path / "looped.py").write_text(STEP)
    (tmp_path / "script.py").write_text(SCRIPT)
    job = watch.Job(tmp_path / "script.py", "looped:Loop.step", {"small": ""})
    monkeypatch.setitem(watch.JOBS, "loop", job)
    options = Namespace(
        jobs=["loop"],
        ways=["tuned"],
        cpu=True,
        gpu=False,
        size="small",
        ranks=2,
        steps=20_000,  # the watcher ends it
        after=30,
        way_s=90.0,
        budget_s=100.0,
        regret=False,
        vanilla=["loop"],
        configs=0,
        plain_steps=20,
        out=str(tmp_path / "out"),
    )
    watch.Watch(options).run()
    found = json.loads((tmp_path / "out/results.json").read_text())["jobs"]["loop"]
    log = (tmp_path / "out/loop.log").read_text()
    assert found["tuned"]["told"]["n_tunings"] == 1, log
    assert found["tuned"]["ended"] == "enough seen", log
    assert found["tuned"]["winners"][0] == found["tuned"]["winners"][1] != {}
    assert found["tuned"]["tuned_at_step"] >= found["tuned"]["told"]["calls"]
    assert found["tuned"]["steady"]["n_steps"] > 0
    assert "| tuned in calls |" in (tmp_path / "out/results.md").read_text()
