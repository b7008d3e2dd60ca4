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

from dist_tune import contextual_autotune
from dist_tune.output.events import EVENT
from dist_tune.testing import values
from tests.ranks.kernels import add_kernel, configs
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once

TOO_LARGE = 2**21
"""Elements of a block that Triton refuses."""


def _tune(rank: int) -> Any:
    """Two sites, of which one candidate each cannot run, and a second call that hits."""
    kernel: Any = triton.autotune(configs(16, 32, 64, TOO_LARGE), key=["n"])(add_kernel)

    @contextual_autotune(is_dist=True, n_warmup=1, n_repeat=2)
    def step(x: torch.Tensor) -> None:
        for n in (64, 128):
            kernel[lambda named, n=n: (triton.cdiv(n, named["BLOCK"]),)](x, torch.zeros_like(x), n)

    with contextlib.redirect_stderr(io.StringIO()) as terminal:
        step(torch.zeros(128))
    folder = Path(os.environ["DIST_TUNE_LOG_DIR"])
    texts = [(folder / f"rank-{rank}.{ending}").read_text() for ending in ("jsonl", "log")]
    return *texts, [each.model_dump(mode="json") for each in step.records], terminal.getvalue()


@pytest.fixture(scope="module")
def told() -> list[Any]:
    return values(on_ranks(2, _tune, env={"DIST_TUNE_VERBOSITY": "normal"}))


def test_the_events_agree_with_the_records(told: list[Any]):
    """On each rank every line is an event; sites, candidates, drops, winners and seconds are those of the records."""
    for rank, (lines, _, records, _) in enumerate(told):
        events: list[Any] = [EVENT.validate_json(line) for line in lines.splitlines()]
        of = {kind: [each for each in events if each.kind == kind] for kind in {each.kind for each in events}}
        assert {each.rank for each in events} == {rank}
        assert [len(of[kind]) for kind in ("run", "tuning", "winner", "done")] == [1, 1, 2, 1]
        sites = {each.site: each for each in of["site"]}
        assert sorted(sites) == [1, 2]
        assert all(each.miss.startswith("There is no record of ") for each in sites.values())
        for won in of["winner"]:
            (record,) = [each for each in records if each["key"] == sites[won.site].key]
            assert won.record == record
            assert won.winner == record["winner"]
            assert re.fullmatch(r"[0-9a-f]{6}", won.record_id)
            assert [each["config"] for each in record["candidates"]] == sites[won.site].configs
            launched = {each.candidate for each in of["started"] if each.site == won.site}
            assert launched >= {each["index"] for each in record["candidates"] if each["latency_ms"] is not None}
            dropped = {each.candidate for each in of["dropped"] if each.site == won.site}
            assert dropped == {each["index"] for each in record["candidates"] if each["failure"] is not None} == {3}
        (done,) = of["done"]
        assert all(done.seconds[name] >= seconds for name, seconds in records[0]["spent"].items())  # the last run comes after the record
        assert sum(done.seconds[name] for name in ("discover", "compile", "race", "finals", "settle")) <= done.seconds["total"]
        assert done.seconds["meetings"] == pytest.approx(sum(each.seconds for each in of["meeting"]))
        assert done.seconds["meetings"] <= done.seconds["total"]
        assert done.n_replays == records[0]["n_replays"] == 1 + max(each.replay for each in of["replay"])
        phases = [each.phase for each in of["phase"]]
        assert (phases[0], phases[-1]) == ("discover", "settle")


def test_a_candidate_is_told_before_it_is_launched(told: list[Any]):
    """Each that a replay has launched was started in a line before the end of that replay, by its time."""
    for lines, *_ in told:
        events: list[Any] = [EVENT.validate_json(line) for line in lines.splitlines()]
        started = {(each.site, each.candidate): each.at for each in events if each.kind == "started"}
        for each in events:
            if each.kind == "replay":
                assert all(started[pair] <= each.at for pair in each.candidates.items())


def test_the_log_ends_with_a_summary(told: list[Any]):
    """Sites by their numbers, which the lines before explain; the reason of each that left; where the time went."""
    for _, log, records, _ in told:
        numbers = dict(re.findall(r"site (\d) = tests\.ranks\.kernels\.add_kernel(\[\S+\]): 4 configs", log))
        assert sorted(numbers) == ["1", "2"]
        end = log[log.rindex("summary of ") :]
        for number, key in numbers.items():
            (record,) = [each for each in records if each["key"] == key]
            assert f"site {number} winner={record['winner']} " in end
        assert "1 cannot run here" in end
        assert re.search(r"slowest rank [01] \(\+", end)
        assert re.search(r"seconds: total=\S+ discover=\S+ .* meetings=\S+ compile_cpu=", log)


def test_the_first_ranks_terminal_has_three_lines_for_each_site(told: list[Any]):
    """And the other rank's is silent."""
    assert told[1][3] == ""
    lines = told[0][3].splitlines()
    assert re.fullmatch(r"dist_tune: tuning \S+: 2 sites, 8 candidates on 2 ranks", lines[0])
    firsts = [k for k, line in enumerate(lines) if line.startswith("add_kernel [")]
    assert len(firsts) == 2
    for k in firsts:
        assert re.search(r"  \d+\.\d+ ms, .*(fastest|tied within noise|only one)", lines[k])
        assert re.fullmatch(
            r"  BLOCK=\d+ \S+ \S+   4 tried: .*cannot run here \(.*\)   \d+\.\d s, slowest rank [01] \(\+\d+\.\d %\)", lines[k + 1]
        )
        assert re.fullmatch(r"  why: dist-tune show [0-9a-f]{6}   log: \S+/rank-0\.log", lines[k + 2])
