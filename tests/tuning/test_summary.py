"""The end of a tuning for people: lines on the terminal and in the log, and the tables that explain
them.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from dist_tune.records import CandidateRecord, TuningRecord, account
from dist_tune.tuning.results import Settled, outcome, page, site_lines, table_rows
from tests.cached_records import candidate, record

SMEM = "rank 1: needs 300000 bytes of shared memory, the device has 232448"


def row(index: int, ms: float | None, **changes: Any) -> CandidateRecord:
    """A candidate of an AllGather-GEMM; with a hook, as Triton's own configs have."""
    fields = {
        "BLOCK_M": 128,
        "BLOCK_N": 64 + index,
        "num_warps": 8,
        "pre_hook": "kernels.ag_gemm.clear",
    }
    values = {
        "config": f"BLOCK_M=128 BLOCK_N={64 + index} num_warps=8 pre_hook=kernels.ag_gemm.clear",
        "fields": fields,
        "left": None,
        "latency_ms": ms,
        "closure_ms": None if ms is None else ms + 0.1,
        "spread_ms": None if ms is None else 0.0,
        "rank_latencies_ms": {} if ms is None else {0: ms / 1.018, 3: ms},
        **changes,
    }
    return candidate(index, **values)


def ag_gemm(**changes: Any) -> TuningRecord:
    """The record of the issue's example: 216 candidates, of which one is chosen."""
    rows = [
        row(0, 0.209, left="left the race after round 1"),
        row(1, 0.146),
        row(2, 0.146 * 1.021),
        row(3, 0.16),
        row(4, 0.17),
    ]
    rows += [row(i, 0.5, left="left the race after round 1") for i in range(5, 148)]
    rows += [row(i, None, failure=SMEM) for i in range(148, 216)]
    values = {
        "kernel": "kernels.ag_gemm.ag_gemm",
        "key": "[4096,11008,4096]",
        "candidates": rows,
        "winner": 1,
        "reason": "fastest step",
        "seconds": 3.4,
    }
    return record(**{**values, **changes})


def test_a_tuning_ends_with_the_step_then_its_sites():
    """The step before and after, the seconds, the slowest rank; of a site times, fields that
    differ, reason, lead; where to read on.
    """
    assert (
        outcome("step", [ag_gemm()], 14.42)
        == "step 0.309 -> 0.246 ms (1.26x faster), tuned in 14.4 s; slowest rank 3 (+2 %)"
    )
    assert page([Settled(1, ag_gemm(), "085d29")], has_log=True) == [
        (
            "  ag_gemm [4096, 11008, 4096]  0.209 -> 0.146 ms  BLOCK_N=65  fastest step, 2.1 %"
            " ahead of the next"
        ),
        "  why: dist-tune show 085d29   report: dist-tune report",
    ]


GAINS = {
    23.94: "23.9x faster",
    1.1: "1.1x faster",
    1.08: "8 % faster",
    1.004: "as fast as before",
    0.97: "3 % slower",
    0.5: "100 % slower",
}


@pytest.mark.parametrize(("ratio", "told"), GAINS.items())
def test_a_gain_is_told_as_it_is_meant(ratio: float, told: str):
    """A number of times from 1.1 on, and percent below: "0.97x" would read like a gain."""
    assert account.faster(ratio) == told


@pytest.mark.parametrize(
    ("ms", "told"),
    [
        (0.146, "1.43x faster than"),
        (0.2, "4 % faster than"),
        (0.2088, "as fast as"),
        (0.22, "5 % slower by its kernel than"),
    ],
)
def test_the_gain_of_a_record_is_told_as_it_is_meant(ms: float, told: str):
    """In ``dist-tune show`` and the report: "1.43x the first config" read like a loss."""
    rows = [row(0, 0.209), row(1, ms)]
    assert account.facts(ag_gemm(candidates=rows))["measured"].endswith(
        f", {told} the first config (0.209 ms)"
    )


def test_of_many_sites_the_slowest_five_are_told():
    """And how many there are besides; the id of the slowest that is kept.

    A site that was not timed comes last.
    """
    sites = [
        Settled(i, ag_gemm(key=f"[{i}]", candidates=[row(0, 1.0 + i), row(1, 0.5 + i)]), f"{i:06}")
        for i in range(51)
    ]
    sites.insert(0, Settled(51, ag_gemm(key="[51]", candidates=[row(0, None), row(1, None)])))
    *lines, more, further = page(sites, has_log=True)
    assert [re.findall(r"\[(\d+)\]", line)[0] for line in lines] == [
        str(i) for i in range(50, 45, -1)
    ]
    assert (more, further) == (
        "  and 47 more",
        "  why: dist-tune show 000050   report: dist-tune report",
    )
    *_, untimed = page(sites[:5], has_log=False)[:-1]
    assert untimed.startswith("  ag_gemm [51]  not timed")
    assert (
        outcome("f", [each.record for each in sites[:5]], 2.0)
        == "f not timed, tuned in 2.0 s; slowest rank 3 (+2 %)"
    )


def test_the_table_is_aligned_and_names_a_reason_for_each():
    """Fastest first, then what cannot run; each that did not win has its reason, a finalist,
    too.
    """
    title, head, *rows = table_rows(Settled(1, ag_gemm()))
    told = (
        "the step's time weighs 50 % beside the kernel's, because the step varies by itself; all"
        " with BLOCK_M=128 num_warps=8"
    )
    fates = "216 tried: 4 in the finals, 144 raced out, 68 cannot run here (shared memory)"
    assert (
        title
        == f"site 1 = kernels.ag_gemm.ag_gemm[4096,11008,4096]: {fates}; fastest first; {told}"
    )
    assert len(rows) == 216
    at = head.index("BLOCK_N") + len("BLOCK_N")
    assert all(re.fullmatch(r".*\d", each[:at]) for each in rows)
    assert [int(each.split()[0]) for each in rows[:5]] == [1, 2, 3, 4, 0]
    assert rows[0].endswith("winner: fastest step")
    assert re.search(r"not chosen: \+2.1% by its kernel, \+0.0031 ms by the step$", rows[1])
    assert rows[4].endswith("left the race after round 1")
    assert rows[-1].endswith(f"dropped: {SMEM}")
    assert not any("pre_hook" in each for each in rows)


def test_the_log_has_a_line_for_each_site():
    """With the number of each, by which the lines before name it."""
    sites = [Settled(k, ag_gemm(key=f"[{k},torch.bfloat16]"), "085d29") for k in range(1, 21)]
    lines = site_lines(sites, has_numbers=True)
    assert len(lines) == 20
    assert lines[0].split("  ")[1:4] == ["site 1", " ag_gemm [1]", " 0.209 -> 0.146 ms"]


DTYPES = ",triton.language.bfloat16,torch.bfloat16,torch.int64,torch.int32"


def test_a_site_is_named_by_the_values_of_its_key():
    """With dtypes only where sites differ in these alone; those of one kernel and key have the
    log's number.
    """
    (first,) = site_lines([Settled(1, ag_gemm(key=f"[4096,True{DTYPES}]"))])
    assert first.startswith("  ag_gemm [4096, True, bf16]  0.209 -> 0.146 ms  ")
    keys = ["[64,torch.bfloat16,torch.float32]", "[64,torch.bfloat16,torch.bfloat16]", "[8]", "[8]"]
    heads = [
        line.strip().partition("  ")[0]
        for line in site_lines([Settled(i, ag_gemm(key=key)) for i, key in enumerate(keys)])
    ]
    of_one_key = [f"ag_gemm [8] (site {k} of the log)" for k in (2, 3)]
    assert heads == [
        "kernels.ag_gemm.ag_gemm [64, bf16, fp32]",
        "kernels.ag_gemm.ag_gemm [64, bf16, bf16]",
        *of_one_key,
    ]


def left_race(ms: float, step_ms: float) -> CandidateRecord:
    return row(0, ms, closure_ms=step_ms, left="left the race after round 1")


CHOICES: list[Any] = [
    (
        [row(0, 0.2169, closure_ms=0.3), row(1, 0.2293, closure_ms=0.25)],
        {},
        "0.217 -> 0.229 ms",
        "fastest step, though its kernel is slower, 5.4 % behind the fastest kernel",
    ),
    # Not "263.2 % ahead"
    (
        [row(0, 0.5), row(1, 0.1)],
        {},
        "0.500 -> 0.100 ms",
        "fastest step, 5.0x faster than the next",
    ),
    (
        [row(0, None), row(1, 0.5), row(2, 0.6)],
        {},
        "0.500 ms",
        "fastest step, 20.0 % ahead of the next",
    ),
    (
        [row(0, None, failure=SMEM), row(1, 0.5)],
        {},
        "0.500 ms",
        "fastest step, the first config cannot run here",
    ),
    (
        [row(0, 0.1), row(1, 0.2)],
        {"winner": 0, "reason": "tied within noise"},
        "0.100 ms",
        "tied within noise, 2.0x faster than the next, the first config",
    ),
]


@pytest.mark.parametrize(("rows", "changes", "times", "why"), CHOICES)
def test_a_choice_reads_as_it_is_meant(
    rows: list[CandidateRecord], changes: dict[str, Any], times: str, why: str
):
    told = ag_gemm(candidates=rows, **changes)
    assert (account.before_and_after(told), account.why_chosen(told)) == (times, why)


STEPS: list[Any] = [
    # Of two sites the differences that their first configs make are added up; without one of them
    # there is no first.
    ([[row(0, 1.0 + i), row(1, 0.5)] for i in (1, 2)], 1, (0.6 + 1.5 + 2.5, 0.6)),
    (
        [
            *([row(0, 1.0 + i), row(1, 0.5)] for i in (1, 2)),
            [row(0, None, failure=SMEM), row(1, 0.5)],
        ],
        1,
        (None, 0.6),
    ),
    # In the race other sites tried candidates beside the first config: 3.4 ms was told of a step
    # that its kernels slow down by 0.2 ms.
    ([[left_race(0.7, 3.0), row(1, 0.5, closure_ms=1.0)]] * 2, 1, (1.4, 1.0)),
    (
        [
            [
                row(0, 0.7, closure_ms=1.1, left="left the finals after round 0"),
                row(1, 0.5, closure_ms=1.0),
            ]
        ],
        1,
        (1.1, 1.0),
    ),
    # A site that was decided in the race was timed beside others' candidates: 37.6 ms were told of
    # a step that took 23 ms.
    (
        [
            [left_race(2.0, 4.0), row(1, 0.5, closure_ms=3.7)],
            [row(0, 0.6, closure_ms=1.1), row(1, 0.5, closure_ms=1.0)],
        ],
        1,
        (2.6, 1.0),
    ),
    # The winner's kernel is slower, and its step faster: by how much, the race does not tell.
    ([[left_race(0.4, 3.0), row(1, 0.5, closure_ms=1.0)]], 1, (None, 1.0)),
    ([[row(0, 0.4), row(1, 0.5)]], 0, (0.5, 0.5)),
]


@pytest.mark.parametrize(("sites", "winner", "expected"), STEPS)
def test_the_step_before_and_after(sites: list[list[CandidateRecord]], winner: int, expected: Any):
    """No sum of what other sites tried in the race, and nothing where only a race has timed it;
    the calls of a job, where these were timed.
    """
    online = [ag_gemm(candidates=rows, winner=winner, step_ms=(9.0, None)) for rows in sites]
    assert account.step_times(online) == (9.0, None)
    assert account.step_times(
        [ag_gemm(candidates=rows, winner=winner) for rows in sites]
    ) == pytest.approx(expected)
