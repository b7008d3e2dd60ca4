"""The end of a tuning in words: sites that share a name, winners that are slower by their kernel, the step before and after."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_tune.cache import step_times
from dist_tune.tuning.results import Settled, block, headline, names_of
from tests.cached_records import record
from tests.tuning.test_summary import ag_gemm, row, shown

pytestmark = pytest.mark.once

LOG = Path("rank-0.log")
DTYPES = ",triton.language.bfloat16,torch.bfloat16,torch.int64,torch.int32"


def test_a_block_names_the_values_of_the_key_alone():
    """The dtypes of all arguments are in the log."""
    (first, *_) = block(Settled(1, ag_gemm(key=f"[4096,True{DTYPES}]")), LOG)
    assert first.startswith("ag_gemm [4096, True, bf16]  0.146 ms, ")


@pytest.mark.parametrize("n_sites", [2, 7])
def test_sites_that_differ_in_dtypes_alone_show_them(n_sites: int):
    """In blocks and in a table; two of one kernel and key are told apart by the number that the log gives them."""
    keys = ["[64,torch.bfloat16,torch.float32]", "[64,torch.bfloat16,torch.bfloat16]", *["[8]"] * (n_sites - 2)]
    text = shown([Settled(i, ag_gemm(key=key)) for i, key in enumerate(keys)])
    assert "ag_gemm [64, bf16, fp32]  " in text
    assert "ag_gemm [64, bf16, bf16]  " in text
    assert text.count("ag_gemm [8] (site ") == n_sites - 2


def test_names_of_sites_differ():
    names = names_of([Settled(1, ag_gemm(key="[1]")), Settled(2, ag_gemm(key="[1]"))])
    assert names == ["ag_gemm [1] (site 1 of the log)", "ag_gemm [1] (site 2 of the log)"]


def test_a_winner_that_is_slower_by_its_kernel_says_so_in_words():
    """The step was faster with it: "0.95x the first config" would read like a gain."""
    rows = [row(0, 0.2169, closure_ms=0.3), row(1, 0.2293, closure_ms=0.25)]
    told = headline(record(candidates=rows, winner=1, closure_weight=1.0, reason="fastest step"))
    assert "6 % slower than the first config by its kernel (0.217 ms)" in told
    assert told.endswith("chosen because the step is faster")
    assert "0.95x" not in told


def test_a_lead_of_more_than_the_time_itself_is_a_factor():
    """A reader of "263.2 % ahead" has to compute."""
    told = headline(ag_gemm(candidates=[row(0, 0.5), row(1, 0.1)]))
    assert "5.0x the next" in told
    assert "ahead" not in told


def test_the_step_before_is_no_sum_of_what_other_sites_tried():
    """In the race other sites tried candidates beside the first config: 3.4 ms was told of a step that its kernels slow down by 0.2 ms."""
    rows = [row(0, 0.7, closure_ms=3.0, left="left the race after rung 0"), row(1, 0.5, closure_ms=1.0)]
    assert step_times([ag_gemm(candidates=rows)] * 2) == pytest.approx((1.4, 1.0))
    finalist = [row(0, 0.7, closure_ms=1.1, left="left the finals after round 0"), rows[1]]
    assert step_times([ag_gemm(candidates=finalist)]) == pytest.approx((1.1, 1.0))


def test_nothing_is_told_of_the_step_before_where_only_a_race_timed_it():
    """The winner's kernel is slower, and its step faster: by how much, the race does not tell."""
    rows = [row(0, 0.4, closure_ms=3.0, left="left the race after rung 0"), row(1, 0.5, closure_ms=1.0)]
    assert step_times([ag_gemm(candidates=rows)]) == (None, 1.0)


def test_the_first_config_loses_nothing_to_itself():
    assert step_times([ag_gemm(winner=0, candidates=[row(0, 0.4), row(1, 0.5)])]) == pytest.approx((0.5, 0.5))


def test_a_first_config_without_a_time_is_told_of():
    """No gain stands there, and the reader would look for it."""
    assert ", the first config was not timed, " in headline(ag_gemm(candidates=[row(0, None), row(1, 0.5), row(2, 0.6)]))
