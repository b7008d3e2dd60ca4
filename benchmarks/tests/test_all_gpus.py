"""The script for all GPUs of a machine: what it refuses, and that what it starts is there.

Its parts run for minutes.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/all_gpus.sh"
TEXT = SCRIPT.read_text()


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ((), 2, "benchmarks/all_gpus.sh FOLDER"),
        (("--help",), 0, "PARTS"),
        (("--quick",), 2, "FOLDER"),
        (("{folder}", "all"), 2, "no part all"),
    ],
)
@pytest.mark.processes
def test_what_cannot_be_run_is_told(tmp_path: Path, words: tuple[str, ...], code: int, told: str):
    """Exit code 2 and the usage, or the parts that there are; help is no mistake."""
    command = [str(SCRIPT), *(each.format(folder=tmp_path / "out") for each in words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, told in done.stdout + done.stderr) == (code, True)


def test_each_part_is_told_of_in_the_head_and_run_by_default():
    head, parts = TEXT.partition("set -uo")[0], re.findall(r"^([\w-]+)\(\) \{$", TEXT, re.M)
    parts = [part for part in parts if part not in ("run", "launched")]
    assert re.findall(r"\|\| set -- (.*)", TEXT) == [" ".join(parts)]
    assert all(re.search(rf"\b{part}\b", head) for part in parts)


def test_what_it_starts_is_there():
    """Also the distributed steps, each run for both cases."""
    assert all(
        (ROOT / each).is_file()
        for each in re.findall(r"\b((?:benchmarks|examples|launch)/[\w/.]+\.(?:py|sh))", TEXT)
    )
    (steps,) = re.findall(r"^steps=\((.*)\)$", TEXT, re.M)
    assert all((ROOT / f"kernels/{step}.py").is_file() for step in steps.split())
