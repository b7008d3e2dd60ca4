"""One fault in one phase of a tuning: ranks know in time, nothing is left behind, what was measured
is kept.
"""

from __future__ import annotations

import re
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tests.faults import write_table
from tests.faults.jobs import FAULTS, VICTIM
from tests.faults.matrix import TOLD_WITHIN_S, Case, cases, n_clean, play
from tests.programs import ROOT

pytestmark = pytest.mark.processes

QUICK = {
    ("raise error", "discover"),
    ("no memory", "discover"),
    ("sleep 3 s", "discover"),
    ("leave", "compile"),
    ("kill", "apply"),
    ("raise error", "apply"),
    ("raise error", "race"),
    ("interrupt", "race"),
    ("stop 3 s", "race"),
    ("stop 10 s", "race"),
    ("sleep 5 s", "race"),
    ("never return", "race"),
    ("hold the lock", "race"),
    ("skip collective", "race"),
}
"""Those that `make test` plays; `make test-faults` plays all."""


def marked(case: Case) -> Any:
    """A case, marked where ranks cannot yet tell that they are in one call."""
    marks = [] if case.n_ranks == 2 and (case.fault, case.phase) in QUICK else [pytest.mark.slow]
    if (case.fault, case.phase) == ("skip collective", "discover"):
        reason = (
            "peers wait for the timeout of their process group: docs/reliability.md, The first"
            " cause"
        )
        marks.append(pytest.mark.xfail(reason=reason, strict=True))
    return pytest.param(case, marks=marks, id=str(case))


@pytest.mark.parametrize("case", [marked(each) for each in cases()])
def test_a_fault_is_told_in_time_and_nothing_is_lost(case: Case):
    """What logs/faults-cpu shows of each: the error on all ranks, who is named in it, and what the
    next tuning begins with.
    """
    result, fault = play(case), FAULTS[case.fault]
    told, own = fault.told, {fault.own}
    if (case.fault, case.phase) == ("no memory", "apply"):  # a launch of the last run is made once
        told, own = "PeerFailedError", {"MemoryError"}
    # A config that fails between collectives.
    if (case.fault, case.face) == ("raise error", "function"):
        own = {"PeerFailedError"}
    if case.fault == "stop 10 s":  # its timer ends it, or it is told the same
        own.add("Died")
    words = fault.words
    # No config is told before replays.
    if (case.fault, case.phase) in (("hold the lock", "discover"), ("hold the lock", "compile")):
        words = "rank 1 last seen at: its first run of .*its process has ended"
    assert not result.left, result.row
    assert result.told_s < TOLD_WITHIN_S + 4 * (case.fault == "stop 10 s"), result.row
    assert result.n_again is not None, result.row
    for rank, each in enumerate(result.outcomes):
        is_own = case.on_all or rank == VICTIM
        assert each.error in (own if is_own else {told}), (
            f"{result.row}\n{each.message}\n{each.notes}"
        )
        if not is_own:
            assert re.search(words, each.message if told else each.log, re.DOTALL), each
        if not each.error:
            # Each kernel adds one, and each all-reduce sums over ranks.
            right = case.n_ranks * (case.n_ranks + 1.0)
            assert (each.value["value"], each.value["is_unpatched"]) == (right, True), result.row
    if not told:
        assert result.n_again == 1, result.row  # the record
    elif case.phase in ("finals", "apply"):  # the race is known by then
        assert result.n_again < n_clean(case.n_ranks), result.row


def test_the_log_has_a_place_for_both_tables(tmp_path: Path):
    """Each is written between its marks, with the date; what stands around them stays."""
    page = Path(shutil.copy(ROOT / "logs/faults-cpu/README.md", tmp_path))
    before = page.read_text()
    for name in ("faults", "hosts"):
        write_table(page, name, [f"| {name} |"])
    after = page.read_text()
    assert re.findall(r", ([-0-9]+)[.]\n\n[|] (faults|hosts) [|]\n\n<!-- \2: end", after) == [
        (f"{date.today()}", each) for each in ("faults", "hosts")
    ]
    assert re.sub(r"begin -->.*?<!--", "", after, flags=re.DOTALL) == re.sub(
        r"begin -->.*?<!--", "", before, flags=re.DOTALL
    )
