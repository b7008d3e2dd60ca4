"""All faults in all phases: what the ranks are told and when, what is kept, what is left behind.

Prints the table of logs/faults-cpu.

python -m tests.faults.matrix --write logs/faults-cpu/README.md
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dist_tune.testing import Outcome
from tests.faults import write_table
from tests.faults.jobs import DEADLINE_S, FAULTS, PHASES, VICTIM, Face, Phase, run
from tests.worlds import on_ranks

MAX_PLAYS = 5
TOLD_WITHIN_S = 2 * DEADLINE_S + 3.0
"""Until the last rank knows: twice the deadline, and what a loaded machine needs."""
HEAD = [
    (
        "| fault | phase | ranks | told | seconds until the last rank knew | runs in the next"
        " tuning | left behind |"
    ),
    "|---|---|---|---|---|---|---|",
]


@dataclass(frozen=True, slots=True)
class Case:
    """One fault in one phase."""

    fault: str
    phase: Phase
    n_ranks: int = 2
    on_all: bool = False
    face: Face = "contextual"

    @property
    def where(self) -> str:
        """The fault, and what is not as usual."""
        return (
            f"{self.fault}{' (all ranks)' * self.on_all}{' (function)' * (self.face == 'function')}"
        )

    def __str__(self) -> str:
        """Its name as a test."""
        return f"{self.where}, {self.phase}, {self.n_ranks} ranks"


@dataclass(frozen=True, slots=True)
class Result:
    """What came of it."""

    case: Case
    outcomes: Sequence[Outcome]
    n_again: int | None
    """Runs of the step in the next tuning with the same cache, its first and last run with them;
    None if it did not end.
    """
    left: Sequence[str]
    """Processes and temporary files that are still there."""

    @property
    def told_s(self) -> float:
        """Seconds until the last rank that lives knew."""
        return max(
            (each.seconds for each in self.outcomes if each.error not in ("Died", "Hung")),
            default=0.0,
        )

    @property
    def row(self) -> str:
        """Its row in the table."""
        case, ends = self.case, ("Died", "Hung")
        told = sorted(
            {each.error or "right result" for each in self.outcomes if each.error not in ends}
        ) or ["all processes ended"]
        told += [
            f"rank {rank} {each.error.lower()}"
            for rank, each in enumerate(self.outcomes)
            if each.error in ends
        ]
        again = (
            "-" if self.n_again is None else f"{self.n_again} of {n_clean(case.n_ranks, case.face)}"
        )
        cells = [
            case.where,
            case.phase,
            f"{case.n_ranks}",
            ", ".join(told),
            f"{self.told_s:.1f}" if self.told_s else "-",
            again,
        ]
        return f"| {' | '.join([*cells, ', '.join(self.left) or 'nothing'])} |"


@functools.cache
def n_clean(n_ranks: int, face: Face = "contextual") -> int:
    """Runs of the step in a tuning without faults, of which a race may leave one candidate, and no
    finals.
    """
    return max(_clean(n_ranks, face) for _ in range(2))


def _clean(n_ranks: int, face: Face) -> int:
    with tempfile.TemporaryDirectory() as folder:
        outcome = on_ranks(
            n_ranks, run, "race", "nothing", False, face, env=_environment(Path(folder))
        )[0]
    assert outcome.value is not None, outcome
    return int(outcome.value["n_runs"])


def _environment(folder: Path) -> dict[str, str]:
    """A cache that lives on from one run to the next, and a temporary folder that can be looked
    into.
    """
    (folder / "tmp").mkdir(exist_ok=True)
    return {
        "DIST_TUNE_DEADLINE_S": f"{DEADLINE_S:g}",
        "DIST_TUNE_CACHE_DIR": f"{folder}/cache",
        "TMPDIR": f"{folder}/tmp",
    }


def play(case: Case) -> Result:
    """Tune with the fault, look around, and tune once more without it.

    A tuning that came by chance without the phase is made again.
    """
    for _ in range(MAX_PLAYS):
        result = _play(case)
        told = result.outcomes[VICTIM].value
        if told is None or told["has_met"]:
            break
    return result


def _play(case: Case) -> Result:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = _environment(folder)
        outcomes = on_ranks(
            case.n_ranks,
            run,
            case.phase,
            case.fault,
            case.on_all,
            case.face,
            env=env,
            timeout_s=4 * DEADLINE_S + 10,
        )
        left = [*_left_processes(folder), *(each.name for each in (folder / "tmp").iterdir())]
        again = on_ranks(case.n_ranks, run, case.phase, "nothing", False, case.face, env=env)[
            0
        ].value
    return Result(case, outcomes, None if again is None else int(again["n_runs"]), left)


def _left_processes(folder: Path, within_s: float = 3.0) -> list[str]:
    """Processes that still have this folder in their environment, after a while."""
    end = time.monotonic() + within_s
    while (
        found := [pid for pid in os.listdir("/proc") if pid.isdigit() and _is_of(pid, folder)]
    ) and time.monotonic() < end:
        time.sleep(0.1)
    return [f"process {pid}" for pid in found]


def _is_of(pid: str, folder: Path) -> bool:
    try:
        return (
            int(pid) != os.getpid()
            and f"{folder}/cache".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        )
    except OSError:  # ended, or another user's
        return False


def cases() -> list[Case]:
    """The rows. No collective is skipped while all compile, and no config is under way."""
    no_compile = ("skip collective", "never return", "no memory")
    few = ("nothing", "sleep 5 s", "stop 10 s")
    found = [
        Case(fault, phase)
        for fault in FAULTS
        if fault not in few
        for phase in PHASES
        if phase != "compile" or fault not in no_compile
    ]
    found += [
        Case("stop 10 s", "race"),
        Case("never return", "race", on_all=True),
        Case("raise error", "race", on_all=True),
    ]
    found += [
        Case(fault, "race", n_ranks=4)
        for fault in ("raise error", "kill", "stop 3 s", "never return")
    ]
    return [
        *found,
        *(
            Case(fault, "race", face="function")
            for fault in ("raise error", "skip collective", "sleep 5 s", "never return")
        ),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", type=Path, help="a page with the two marks of a table, which is replaced"
    )
    options = parser.parse_args()
    lines = [*HEAD]
    print(*lines, sep="\n")
    for case in cases():
        lines.append(play(case).row)
        print(lines[-1], flush=True)
    if options.write:
        write_table(options.write, "faults", lines)


if __name__ == "__main__":
    main()
