"""All faults in all phases: what the ranks are told and when, what is kept, what is left behind. Prints the table of docs/reliability.md.

python -m tests.faults.matrix            # all of it: minutes
python -m tests.faults.matrix --quick    # what CI runs
python -m tests.faults.matrix --write docs/reliability.md
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dist_tune.testing import Outcome, on_ranks
from tests.faults.jobs import PHASES, VICTIM, Phase, run

DEADLINE_S = 4.0
MAX_PLAYS = 5
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
TOLD_WITHIN_S = 2 * DEADLINE_S + 3.0
"""Until the last rank knows: twice the deadline, and what a loaded machine needs."""


@dataclass(frozen=True, slots=True)
class Case:
    """One fault in one phase."""

    fault: str
    phase: Phase
    n_ranks: int = 2
    on_all: bool = False

    def __str__(self) -> str:
        """Its name in the table and as a test."""
        return f"{self.fault}{' on all ranks' if self.on_all else ''}, {self.phase}, {self.n_ranks} ranks"


@dataclass(frozen=True, slots=True)
class Result:
    """What came of it."""

    case: Case
    outcomes: Sequence[Outcome]
    n_again: int | None
    """Runs of the step in the next tuning with the same cache, its first and last run with them; None if it did not end."""
    n_clean: int
    """The same of a tuning without faults."""
    left: Sequence[str]
    """Processes and temporary files that are still there."""

    @property
    def survivors(self) -> dict[int, Outcome]:
        """Ranks that live to tell."""
        return {rank: each for rank, each in enumerate(self.outcomes) if each.error not in ("Died", "Hung")}

    @property
    def told_s(self) -> float:
        """Seconds until the last survivor knew."""
        return max((each.seconds for each in self.survivors.values()), default=0.0)

    @property
    def row(self) -> str:
        """Its row in the table."""
        case = self.case
        told = sorted({each.error or "right result" for each in self.survivors.values()}) or ["all processes ended"]
        gone = [f"rank {rank} {each.error.lower()}" for rank, each in enumerate(self.outcomes) if each.error in ("Died", "Hung")]
        where = f"{case.fault.replace('_', ' ')}{' (all ranks)' if case.on_all else ''}"
        again = "-" if self.n_again is None else f"{self.n_again} of {self.n_clean}"
        left = ", ".join(self.left) or "nothing"
        told_s = f"{self.told_s:.1f}" if self.survivors else "-"
        return f"| {where} | {case.phase} | {case.n_ranks} | {', '.join([*told, *gone])} | {told_s} | {again} | {left} |"


def clean_run(n_ranks: int = 2) -> int:
    """The same of a tuning without faults."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = on_ranks(n_ranks, run, "race", "nothing", env=environment(Path(folder)))[0]
    assert outcome.value is not None, outcome
    return int(outcome.value["n_runs"])


def environment(folder: Path) -> dict[str, str]:
    """A cache that lives on from one run to the next, and a temporary folder that can be looked into."""
    (folder / "tmp").mkdir(exist_ok=True)
    return {"DIST_TUNE_DEADLINE_S": f"{DEADLINE_S:g}", "DIST_TUNE_CACHE_DIR": f"{folder}/cache", "TMPDIR": f"{folder}/tmp"}


def play(case: Case, n_clean: int, *, goes_on: bool = True) -> Result:
    """Tune with the fault, look around, and tune once more without it. A tuning that came by chance without the phase is made again."""
    for _ in range(MAX_PLAYS):
        result = _play(case, n_clean, goes_on=goes_on)
        told = result.outcomes[VICTIM].value
        if told is None or told["has_met"]:
            break
    return result


def _play(case: Case, n_clean: int, *, goes_on: bool) -> Result:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = environment(folder)
        outcomes = on_ranks(case.n_ranks, run, case.phase, case.fault, case.on_all, env=env, timeout_s=4 * DEADLINE_S + 10)
        left = [*left_processes(folder), *(each.name for each in (folder / "tmp").iterdir())]
        again = on_ranks(case.n_ranks, run, case.phase, "nothing", env=env)[0].value if goes_on else None
    return Result(case, outcomes, None if again is None else int(again["n_runs"]), n_clean, left)


def left_processes(folder: Path, within_s: float = 3.0) -> list[str]:
    """Processes that still have this folder in their environment, after a while."""
    end = time.monotonic() + within_s
    while (found := [pid for pid in _pids() if f"{folder}/cache".encode() in _environment_of(pid)]) and time.monotonic() < end:
        time.sleep(0.1)
    return [f"process {pid}" for pid in found]


def _pids() -> list[str]:
    return [each for each in os.listdir("/proc") if each.isdigit() and int(each) != os.getpid()]


def _environment_of(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # ended, or another user's
        return b""


def cases(*, quick: bool) -> list[Case]:
    """The rows; ``quick``: each fault in the race, and one in each other phase."""
    faults = ("raise_error", "kill", "leave", "interrupt", "no_memory", "sleep_3_s", "stop_3_s", "never_return", "hold_the_lock")
    found = [Case(fault, phase) for fault in (*faults, "skip_collective") for phase in PHASES if can_meet(fault, phase)]
    found += [Case("never_return", "race", on_all=True), Case("raise_error", "race", on_all=True)]
    found += [Case(fault, "race", n_ranks=4) for fault in ("raise_error", "kill", "stop_3_s", "never_return")]
    if quick:
        races = {"interrupt", "stop_3_s", "never_return", "hold_the_lock", "skip_collective"}
        others = {
            ("raise_error", "discover"),
            ("no_memory", "discover"),
            ("sleep_3_s", "discover"),
            ("kill", "apply"),
            ("raise_error", "apply"),
        }
        return [
            each
            for each in found
            if each.n_ranks == 2 and ((each.fault in races and each.phase == "race") or (each.fault, each.phase) in others)
        ]
    return found


def can_meet(fault: str, phase: Phase) -> bool:
    """False for what cannot be in a phase: no collective is skipped while all compile, and no config is under way."""
    return phase != "compile" or fault not in ("skip_collective", "never_return", "no_memory")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", type=Path, help="a page with the two marks of a table, which is replaced")
    options = parser.parse_args()
    n_clean = {n: max(clean_run(n) for _ in range(3)) for n in (2, 4)}  # a race may leave one candidate, and no finals
    lines = ["| fault | phase | ranks | told | seconds until the last rank knew | runs in the next tuning | left behind |"]
    lines.append("|---|---|---|---|---|---|---|")
    print(*lines, sep="\n")
    for case in cases(quick=options.quick):
        lines.append(play(case, n_clean[case.n_ranks]).row)
        print(lines[-1], flush=True)
    if options.write:
        options.write.write_text(with_table(options.write.read_text(), lines))


def with_table(page: str, lines: Sequence[str]) -> str:
    """The page with another table between its marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + "\n".join([BEGIN, "", *lines, "", END]) + after


if __name__ == "__main__":
    main()
