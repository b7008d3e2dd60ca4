"""Words about records: times, reasons and counts; the end of a tuning on the terminal and in the
log, with the tables that explain it.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from dist_tune.records import CandidateRecord, TuningRecord
from dist_tune.records.words import (
    TunedSite,
    facts,
    faster,
    fates,
    launch_times,
    origin,
    outcome,
    page,
    short_config,
    site_lines,
    slowest_rank,
    step_times,
    table_rows,
    weighing,
    why_chosen,
    why_not,
)
from dist_tune.search import NOT_TRIED
from tests.cached_records import candidate, environment, record


def of(*rows: dict[str, Any], winner: int = 0, weight: float = 1.0, reason: str = "") -> Any:
    """A record of candidates without noise; a row holds what is said of one.

    ``weight``: of the step's time.
    """
    plain = {"spread_ms": 0.0, "left": None}
    return record(
        candidates=[candidate(i, **{**plain, **each}) for i, each in enumerate(rows)],
        winner=winner,
        closure_weight=weight,
        reason=reason,
    )


def timed(kernel_ms: float, step_ms: float, **changes: Any) -> dict[str, Any]:
    return {"latency_ms": kernel_ms, "closure_ms": step_ms, **changes}


UNTIMED: dict[str, Any] = {
    "latency_ms": None,
    "closure_ms": None,
    "spread_ms": None,
    "rank_latencies_ms": {},
}


LEADS: dict[str, Any] = {
    "next kernel 5.0 % slower (noise 2.0 %)": ((1.05, 1.0, 1.5), 1),
    "next kernel 1.0 % slower (noise 2.0 %)": ((1.0, 1.01), 0),
    "fastest kernel 1.5x faster (noise 1.3 %)": ((1.0, 1.5), 1),  # a winner by its step
    "next kernel 3.5x slower (noise 2.0 %)": ((3.5, 1.0), 1),
    "": ((1.0, None), 0),
}


@pytest.mark.parametrize("words", LEADS)
def test_a_lead_is_told_beside_the_noise(words: str):
    """Both by the winner's time; the noise is the spreads of the winner and of the fastest other,
    added: 0.02 ms here. Nothing where there is nothing to compare with.
    """
    times, winner = LEADS[words]
    rows = [
        timed(ms, 2.0, spread_ms=0.01) if ms is not None else {**UNTIMED, "failure": "no"}
        for ms in times
    ]
    assert why_chosen(of(*rows, winner=winner)) == words
    told = ", ".join(filter(None, ["fastest step", words]))
    assert why_chosen(of(*rows, winner=winner, reason="fastest step")) == told


def test_what_there_is_not_has_no_heading():
    """All of a site that was measured; of the only candidate, which was not, its config."""
    full = facts(record())
    assert (full["kernel"], full["step"]) == ("0.100 -> 1.100 ms (11x slower)", "1.300 ms")
    assert list(full) == [
        "winner",
        "kernel",
        "step",
        "chosen",
        "weight of the step",
        "candidates",
        "slowest rank",
        "all with",
    ]
    assert list(facts(of(UNTIMED))) == ["winner", "kernel", "step", "candidates"]


def test_each_candidate_has_one_fate():
    """Their numbers sum up to all candidates, and failures are counted by cause."""
    rows = [
        timed(1.0, 2.0),
        timed(1.1, 2.1),
        timed(2.0, 3.0, left="left the race after round 1"),
        {**UNTIMED, "left": NOT_TRIED},
        UNTIMED,
        timed(1.0, 2.0, equal_to=0),
        {"failure": "rank 1: needs 9 bytes of shared memory"},
        {"failure": "rank 0: ValueError: no"},
        {
            "failure": "the same kernel as candidate 6: rank 1: needs 9 bytes of shared memory",
            "equal_to": 6,
        },
    ]
    told = "8 tried: 2 in the finals, 1 raced out, 1 not timed, 1 the same kernel as another"
    assert (
        fates(of(*rows)) == f"{told}, 3 cannot run here (2 shared memory, 1 ValueError), 1 untried"
    )
    # What never ran is not raced out: the budget was spent before its turn, or no replay met the
    # site in time.
    spent, missed = (
        {**UNTIMED, "left": left}
        for left in ("not raced: the budget of 1 s was spent", "was not met in time to be measured")
    )
    rows = [
        timed(1.0, 2.0),
        spent,
        missed,
        timed(1.1, 2.0, left="not raced: slower in an earlier tuning"),
    ]
    assert fates(of(*rows)) == "2 tried: 1 timed, 1 not timed, 2 not raced"
    # An exhaustive search has no finals.
    assert fates(of(timed(1.0, 2.0), timed(1.1, 2.1))) == "2 tried: 2 timed"


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("rank 3: OutOfResources: out of resource: shared memory, Required: 1", "shared memory"),
        ("rank 0: the result is wrong: 3 of 4 values differ", "wrong result"),
        (
            "rank 0: it did not return until release= was called, after 1.0 s (race)",
            "did not return",
        ),
        ("rank 0: the process ended 2 times while this config ran", "ended the process"),
        ("rank 1: 2.00 s a launch, where rank 0 needs 0.1 s", "slow on one rank"),
        ("rank 0: CompilationError: at 3:4", "CompilationError"),
        ("rank 0: ???", "other reasons"),
    ],
)
def test_a_failure_has_a_cause_of_few_words(failure: str, words: str):
    assert (
        fates(of(timed(1.0, 2.0), {"failure": failure}))
        == f"2 tried: 1 timed, 1 cannot run here ({words})"
    )


def test_a_step_that_varies_by_itself_says_how_far_it_counted():
    """So that the differences which decided can be found in the table; nothing of it with one
    finalist, or where all counted.
    """
    finals = timed(1.0, 2.0), timed(1.1, 2.1)
    told = "25 % beside the kernel's, as the step varies by itself"
    assert weighing(of(*finals).model_copy(update={"closure_weight": 0.25})) == told
    assert weighing(of(*finals).model_copy(update={"closure_weight": 1.0})) == ""
    assert weighing(of(finals[0], UNTIMED).model_copy(update={"closure_weight": 0.25})) == ""


def test_no_candidate_is_out_without_a_reason():
    """A finalist, too, says by how much it lost; of the winner the reason is told as it was
    stored.
    """
    equal = timed(1.1, 2.1, equal_to=1)
    found = of(
        timed(1.0, 2.0),
        timed(1.1, 2.1),
        timed(1.001, 2.001),
        UNTIMED,
        equal,
        reason="tied within noise",
    )
    assert [why_not(each, found) for each in found.candidates] == [
        "winner: tied within noise",
        "not chosen: kernel 1.1x slower, step +0.1000 ms",
        "not chosen: kernel 0.1 % slower, step +0.0010 ms",
        "not measured on all ranks",
        "the same kernel as candidate 1",
    ]


def test_the_slowest_rank_is_compared_with_the_fastest():
    """Of several sites by the sum of their winners; nothing with one rank, or where all are alike
    within 1 %.
    """
    one, other = (
        of(timed(1.0, 2.0, rank_latencies_ms={0: 1.0, 7: ms, 2: 1.1})) for ms in (1.25, 1.05)
    )
    assert facts(one)["slowest rank"] == "7 (+25 %)"
    assert outcome("f", [one, other], 1.0).endswith("; slowest rank 7 (+15 %)")
    assert [slowest_rank(each) for each in ({0: 1.0}, {0: 1.0, 1: 1.009})] == ["", ""]


def test_a_config_is_short():
    """The config without its hook; a number that tells equal ones apart stays."""
    hooked = candidate(
        0,
        config="B=1 num_warps=4 pre_hook=m.f (#2)",
        fields={"B": 1, "num_warps": 4, "pre_hook": "m.f"},
    )
    assert short_config(hooked) == "B=1 num_warps=4 (#2)"
    assert short_config(candidate(0, config="B=1 pre_hook=m.<locals>.f", fields={})) == "B=1"


def test_records_are_made_on_machines():
    """Each of them once, with its ranks; versions of the last, of another GPU with the runtime's
    name.
    """
    cpu = environment(device="x86_64", device_count=0, ranks_per_host=2, cuda=None)
    amd = environment(device="AMD MI300X", cuda="hip 6.4.2")
    records = [record(), record(), record(environment=cpu), record(environment=amd)]
    on = ["4 ranks on 4 x NVIDIA H200", "4 ranks, 2 per host, on x86_64 without a GPU"]
    assert origin(records) == {
        "tuned": "2026-03-01 12:00:00 UTC",
        "on": ", ".join([*on, "4 ranks on 4 x AMD MI300X"]),
        "versions": "Python 3.11, torch 2.13.0, triton 3.6.0, hip 6.4.2",
    }
    assert origin(records[:3])["versions"].endswith(", CUDA none")


# -- the end of a tuning ---------------------------------------------------------------------------

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
    assert page([TunedSite(1, ag_gemm(), "085d29")], has_log=True) == [
        (
            "  ag_gemm [4096, 11008, 4096]  0.209 -> 0.146 ms (1.43x faster)  BLOCK_N=65  fastest"
            " step, next kernel 2.1 % slower"
        ),
        "  why: dist-tune show 085d29   report: dist-tune report",
    ]


GAINS = {
    23.94: "23.9x faster",
    1.1: "1.1x faster",
    1.08: "8.0 % faster",
    1.0004: "as fast",
    0.97: "3.1 % slower",
    0.5: "2x slower",
}


@pytest.mark.parametrize(("ratio", "told"), GAINS.items())
def test_a_gain_is_told_as_it_is_meant(ratio: float, told: str):
    """A number of times from 1.1 on, and percent below: "0.97x" would read like a gain."""
    assert faster(ratio) == told


def test_of_many_sites_the_slowest_five_are_told():
    """And how many there are besides; the id of the slowest that is kept.

    A site that was not timed comes last.
    """
    sites = [
        TunedSite(
            i, ag_gemm(key=f"[{i}]", candidates=[row(0, 1.0 + i), row(1, 0.5 + i)]), f"{i:06}"
        )
        for i in range(51)
    ]
    sites.insert(0, TunedSite(51, ag_gemm(key="[51]", candidates=[row(0, None), row(1, None)])))
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
    """Below the facts of the site, fastest first, then what cannot run; each that did not win has
    its reason, a finalist, too.
    """
    site = TunedSite(1, ag_gemm())
    told = [f"  {heading}: {text}" for heading, text in facts(site.record).items()]
    title, *rows = table_rows(site)
    assert title == "site 1 = kernels.ag_gemm.ag_gemm[4096,11008,4096]"
    assert rows[: len(told)] == told
    fates = "216 tried: 4 in the finals, 144 raced out, 68 cannot run here (shared memory)"
    assert f"  candidates: {fates}" in told
    assert told[-1] == "  all with: BLOCK_M=128 num_warps=8"
    head, *rows = rows[len(told) :]
    assert len(rows) == 216
    at = head.index("BLOCK_N") + len("BLOCK_N")
    assert all(re.fullmatch(r".*\d", each[:at]) for each in rows)
    assert [int(each.split()[0]) for each in rows[:5]] == [1, 2, 3, 4, 0]
    assert rows[0].endswith("winner: fastest step")
    assert re.search(r"not chosen: kernel 2.1 % slower, step \+0.0031 ms$", rows[1])
    assert rows[4].endswith("left the race after round 1")
    assert rows[-1].endswith(f"dropped: {SMEM}")
    assert not any("pre_hook" in each for each in rows)


DTYPES = ",triton.language.bfloat16,torch.bfloat16,torch.int64,torch.int32"


def test_a_site_is_named_by_the_values_of_its_key():
    """With dtypes only where sites differ in these alone; in the log, and where kernel and key are
    the same, with the number by which the lines before name it.
    """
    (first,) = site_lines([TunedSite(7, ag_gemm(key=f"[4096,True{DTYPES}]"))], has_numbers=True)
    times = "0.209 -> 0.146 ms (1.43x faster)"
    assert first.startswith(f"  site 7  ag_gemm [4096, True, bf16]  {times}  BLOCK_N=65  ")
    keys = ["[64,torch.bfloat16,torch.float32]", "[64,torch.bfloat16,torch.bfloat16]", "[8]", "[8]"]
    heads = [
        line.strip().partition("  ")[0]
        for line in site_lines([TunedSite(i, ag_gemm(key=key)) for i, key in enumerate(keys)])
    ]
    alike = ["[64, bf16, fp32]", "[64, bf16, bf16]", "[8] (site 2)", "[8] (site 3)"]
    assert heads == [f"kernels.ag_gemm.ag_gemm {each}" for each in alike]


def left_race(ms: float, step_ms: float) -> CandidateRecord:
    return row(0, ms, closure_ms=step_ms, left="left the race after round 1")


LAUNCHES: list[Any] = [
    ([row(0, 0.2169), row(1, 0.2293)], 1, "0.217 -> 0.229 ms (5.7 % slower)"),
    ([row(0, None), row(1, 0.5)], 1, "0.500 ms (the first config was not timed)"),
    ([row(0, None, failure=SMEM), row(1, 0.5)], 1, "0.500 ms (the first config cannot run here)"),
    ([row(0, 0.1), row(1, 0.2)], 0, "0.100 ms (the first config)"),
    ([row(0, 0.1), row(1, None)], 1, "not timed"),
]


@pytest.mark.parametrize(("rows", "winner", "told"), LAUNCHES)
def test_a_launch_is_told_beside_the_first_config(
    rows: list[CandidateRecord], winner: int, told: str
):
    """Or why that has no time."""
    assert launch_times(ag_gemm(candidates=rows, winner=winner)) == told


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
    assert step_times(online) == (9.0, None)
    assert step_times([ag_gemm(candidates=rows, winner=winner) for rows in sites]) == pytest.approx(
        expected
    )
