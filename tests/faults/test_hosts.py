"""Four ranks on two hosts: right results over a slow link and with other clocks; an error in time
where the link or a host is lost.
"""

from __future__ import annotations

import pytest

from tests.faults.hosts import BLOCKS, CASES, FAULTS, TOLD_WITHIN_S, play
from tests.faults.link import lacks

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def _needs_namespaces():
    if why := lacks():
        pytest.skip(why)


@pytest.mark.parametrize("case", [each for each in CASES if each not in FAULTS])
def test_a_tuning_over_two_hosts_chooses_right(case: str):
    """One winner, and each host compiles the four kernels itself, with one compilation more at
    most.
    """
    result = play(case)
    assert [each.get("winner") for each in result.ranks.values()] == [[64]] * 4, result.ranks
    assert all(len(BLOCKS) <= n <= len(BLOCKS) + 1 for n in result.n_compiled.values()), result.row


@pytest.mark.parametrize("case", FAULTS)
def test_ranks_that_are_left_name_the_hosts_that_are_not(case: str):
    """Those beside the store raise an error that names ranks of the other host; those that are cut
    off raise one, or leave.
    """
    result = play(case)
    assert {result.ranks[rank]["error"] for rank in (0, 1)} == {"AbsentRanksError"}, result.ranks
    assert all("ranks [2, 3] did not come" in result.ranks[rank]["message"] for rank in (0, 1)), (
        result.ranks
    )
    assert all("error" in each for each in result.ranks.values())
    assert result.seconds < TOLD_WITHIN_S, result.row
