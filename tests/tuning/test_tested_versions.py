"""Versions of torch and Triton above the tested ones: one line, once."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_tune import __version__, autotune
from dist_tune.tuning import notices
from dist_tune.tuning.notices import TESTED, newer_than_tested
from tests.function_options import BLOCKS

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("installed", "named"),
    [
        ({"torch": "2.13.0+cpu", "triton": "3.9.0"}, []),
        ({"torch": "2.11.0", "triton": "3.6.0"}, []),
        ({"torch": "2.13.9a0+git1", "triton": "3.9.1.post2"}, []),
        ({"torch": "2.14.0", "triton": "3.9.0"}, ["torch 2.14.0 (2.11 to 2.13)"]),
        ({"torch": "3.0.0a1", "triton": "3.10.0"}, ["torch 3.0.0a1 (2.11 to 2.13)", "triton 3.10.0 (3.6 to 3.9)"]),
        ({"torch": "unknown", "triton": ""}, []),
    ],
)
def test_newer_versions_are_named(installed: dict[str, str], named: list[str], monkeypatch: pytest.MonkeyPatch):
    """With what is tested; numbers behind the second do not count, and 3.10 is above 3.9."""
    monkeypatch.setattr(notices, "TESTED", {"torch": ("2.11", "2.13"), "triton": ("3.6", "3.9")})
    text = newer_than_tested(installed)
    assert [name in text for name in named] == [True] * len(named)
    assert bool(text) is bool(named)
    assert (f"dist_tune {__version__}" in text) is bool(named)


def test_what_the_tests_install_is_what_is_tested():
    """The pinned torch and triton, and the second triton of the Makefile, end the tested ranges."""
    root = Path(__file__).parents[2]
    pins = dict(line.split("==") for line in (root / "launch/constraints.txt").read_text().splitlines() if "==" in line)
    (second,) = re.findall(r"triton==(\S+)", (root / "Makefile").read_text())
    assert [pins["torch"].startswith(TESTED["torch"][1]), pins["triton"].startswith(TESTED["triton"][0])] == [True, True]
    assert second.startswith(TESTED["triton"][1])


def test_a_tuning_says_so_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """One line for all tunings of a process, on the terminal of the first rank and in the log."""
    monkeypatch.setenv("DIST_TUNE_LOG_DIR", str(tmp_path))
    monkeypatch.setattr(notices, "TESTED", {"torch": ("1.0", "1.1"), "triton": ("3.6", "99.0")})
    monkeypatch.setattr(notices, "_of_process", notices.Notices())
    for name in ("one", "other"):
        tuned: Any = autotune(BLOCKS, None, n_warmup=0, n_repeat=1)(lambda x, block=0, name=name: f"{name}{x}")
        assert tuned(3) == f"{name}3"
    told = capsys.readouterr().err
    assert told.count("newer than dist_tune") == 1
    assert f"torch {torch.__version__} (1.0 to 1.1). If a tuning fails, try a tested version" in " ".join(told.split())
    assert " ".join((tmp_path / "rank-0.log").read_text().split()).count("newer than dist_tune") == 1
