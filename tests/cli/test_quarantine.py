"""Configs that ended their process twice: listed, and let go."""

import time

import pytest

from dist_tune.cache import Cache, QuarantinedConfig, quarantine
from tests.cli_answers import Answers

pytestmark = pytest.mark.once


def bar(cache: Cache, key: str, kernel: str, config: str) -> None:
    one = QuarantinedConfig(kernel=kernel, key="[64]", config=config, rank=1, since=time.time() - 7200)
    quarantine(cache.folder / "quarantine" / f"{key}.jsonl", one)


def test_ls_lists_the_configs_in_quarantine(cache: Cache, ask: Answers):
    """With kernel, key, config, rank and time; each once."""
    for _ in range(2):
        bar(cache, "0123456789abcdef", "library.gemm", "BLOCK=32 num_warps=4")
    bar(cache, "fedcba9876543210", "library.softmax", "BLOCK=64\x1b[2J")
    page = ask("ls", "--quarantine")
    for word in ("library.gemm", "[64]", "BLOCK=32 num_warps=4", "2 h", "0123456789abcdef", "2 configs in quarantine"):
        assert word in page
    assert "\x1b" not in page
    assert [each["config"] for each in ask.json("ls", "--quarantine")["quarantine"]] == ["BLOCK=32 num_warps=4", "BLOCK=64\x1b[2J"]
    assert "no records" in ask("ls")


def test_clear_lets_them_run_again(cache: Cache, ask: Answers):
    """Those of one kernel, those of one id by any beginning that is its own, then all."""
    bar(cache, "0123456789abcdef", "library.gemm", "BLOCK=32")
    bar(cache, "0123f56789abcdef", "library.scan", "BLOCK=16")
    bar(cache, "fedcba9876543210", "library.softmax", "BLOCK=64")
    assert "no config of nothing" in (ask("clear", "--quarantine", "nothing", code=1), ask.err)[1]
    assert "no config of 0f" in (ask("clear", "--quarantine", "0f", code=1), ask.err)[1]
    assert "no config of 0123" in (ask("clear", "--quarantine", "0123", code=1), ask.err)[1]
    assert "1 config may run again" in ask("clear", "--quarantine", "0123f")
    assert "1 config may run again" in ask("clear", "--quarantine", "gemm")
    assert [each["kernel"] for each in ask.json("ls", "--quarantine")["quarantine"]] == ["library.softmax"]
    assert len(ask.json("clear", "--quarantine")["cleared"]) == 1
    assert "no config is in quarantine" in ask("ls", "--quarantine")


def test_clearing_all_records_leaves_an_empty_folder(cache: Cache, ask: Answers):
    """Journals and quarantine are the cache's own files."""
    bar(cache, "0123456789abcdef", "library.gemm", "BLOCK=32")
    (cache.folder / "journals").mkdir()
    (cache.folder / "journals" / "0123456789abcdef.jsonl").write_text("")
    ask("clear", "--yes")
    assert list(cache.folder.iterdir()) == []


def test_damaged_lines_are_passed_over(cache: Cache, ask: Answers):
    """And a folder or a fifo in place of the file is none."""
    bar(cache, "0123456789abcdef", "library.gemm", "BLOCK=32")
    path = cache.folder / "quarantine" / "0123456789abcdef.jsonl"
    path.write_bytes(b"\x00\xff noise\n" + path.read_bytes() + b"00000000 {}\n12")
    (cache.folder / "quarantine" / "fedcba9876543210.jsonl").mkdir()
    assert [each["config"] for each in ask.json("ls", "--quarantine")["quarantine"]] == ["BLOCK=32"]
