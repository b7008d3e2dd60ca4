"""A real tuning of two ranks as its events, its log and its records tell it: one story."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from dist_tune.output.events import EVENT
from tests.steps import add_kernel, configs, tuned
from tests.worlds import log, on_each_rank

TOO_LARGE = 2**21
"""Elements of a block that Triton refuses."""


@on_each_rank()
def test_events_log_and_terminal_agree_with_the_records(rank: int):
    """Two sites, of which one candidate each cannot run: sites, candidates, drops, winners and seconds are those of the records."""
    os.environ["DIST_TUNE_VERBOSITY"] = "normal"
    kernel: Any = triton.autotune(configs(16, 32, 64, TOO_LARGE), key=["n"])(add_kernel)

    def closure(x: torch.Tensor) -> None:
        for n in (64, 128):
            kernel[lambda named, n=n: (triton.cdiv(n, named["BLOCK"]),)](x, torch.zeros_like(x), n)

    step = tuned(None, closure, n_warmup=1, n_repeat=2)
    with contextlib.redirect_stderr(io.StringIO()) as terminal:
        step(torch.zeros(128))
    lines = Path(os.environ["DIST_TUNE_LOG_DIR"], f"rank-{rank}.jsonl").read_text().splitlines()
    records = [each.model_dump(mode="json") for each in step.records]
    _check_events(rank, [EVENT.validate_json(line) for line in lines], records)
    _check_log(records)
    # The first rank's terminal has two lines for the tuning, one for each site and one to read on, the other's none.
    told = terminal.getvalue().splitlines()
    assert [line for line in told if line.startswith("dist_tune: tuning ")] == ([told[0]] if rank == 0 else [])
    assert [len(re.findall(pattern, terminal.getvalue(), re.MULTILINE)) for pattern in (r"^  add_kernel \[", "^  why: ")] == (
        [2, 1] if rank == 0 else [0, 0]
    )


def _check_events(rank: int, events: list[Any], records: list[Any]) -> None:
    of = {kind: [each for each in events if each.kind == kind] for kind in {each.kind for each in events}}
    assert {each.rank for each in events} == {rank}
    assert [len(of[kind]) for kind in ("run", "tuning", "winner", "done")] == [1, 1, 2, 1]
    sites = {each.site: each for each in of["site"]}
    assert sorted(sites) == [1, 2]
    assert all(each.miss.startswith("There is no record of ") for each in sites.values())
    for won in of["winner"]:
        (record,) = [each for each in records if each["key"] == sites[won.site].key]
        assert (won.record, won.winner) == (record, record["winner"])
        assert re.fullmatch(r"[0-9a-f]{6}", won.record_id)
        assert [each["config"] for each in record["candidates"]] == sites[won.site].configs
        dropped = {each.candidate for each in of["dropped"] if each.site == won.site}
        assert dropped == {each["index"] for each in record["candidates"] if each["failure"] is not None} == {3}
    (done,) = of["done"]
    assert all(done.seconds[name] >= seconds for name, seconds in records[0]["spent"].items())  # the last run comes after the record
    assert sum(done.seconds[name] for name in ("discover", "compile", "race", "finals", "settle")) <= done.seconds["total"]
    assert done.seconds["meetings"] == pytest.approx(sum(each.seconds for each in of["meeting"]))
    assert done.seconds["meetings"] <= done.seconds["total"]
    assert done.n_replays == records[0]["n_replays"]
    assert [of["phase"][k].phase for k in (0, -1)] == ["discover", "settle"]


def _check_log(records: list[Any]) -> None:
    """It ends with the step, then sites by their numbers, which the lines before explain, then their tables and where the time went."""
    numbers = dict(re.findall(r"site (\d) = tests\.ranks\.kernels\.add_kernel(\[\S+\]): 4 configs", log()))
    assert sorted(numbers) == ["1", "2"]
    end = log()[log().rindex(", tuned in ") :]
    for number, key in numbers.items():
        (record,) = [each for each in records if each["key"] == key]
        (row,) = re.findall(rf"  site {number}  .*", end)
        assert f"  BLOCK={record['candidates'][record['winner']]['fields']['BLOCK']}  " in row
        assert re.search(rf" site {number} = \S+: \d tried: .*1 cannot run here", end)
    for pattern in (rf" {records[0]['n_replays']} replays", r"seconds: total=\S+ discover=\S+ .* apply=\S+ waits=\S+ compile_cpu="):
        assert re.search(pattern, end), pattern
