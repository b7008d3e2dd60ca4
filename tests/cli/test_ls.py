"""``dist-tune cache ls``: which records, in which order, and damaged files; cache folders that are none."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import typer

from dist_tune.cache.store import Cache
from dist_tune.cli.commands import since
from tests.cached_records import candidate, environment, record
from tests.cli_answers import Answers, keep

pytestmark = pytest.mark.once

NOW = datetime.now(UTC)


@pytest.fixture
def three(cache: Cache) -> None:
    """A gemm of an hour ago, a softmax of two days ago on another device, and the gemm of March."""
    fast, slow = ([candidate(0, latency_ms=ms, left=None)] for ms in (0.25, 4.0))
    keep(
        cache,
        record(key="[new]", tuned_at=NOW - timedelta(hours=1), candidates=slow, winner=0, seconds=7.0),
        record(
            kernel="layers.softmax", key="[a100]", tuned_at=NOW - timedelta(days=2), candidates=fast, winner=0, seconds=3.0,
            environment=environment(device="NVIDIA A100"),
        ),
        record(key="[old]", seconds=5.0),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ("", ["[a100]", "[new]", "[old]"]),
        ("--kernel GEMM", ["[new]", "[old]"]),
        ("--device a100", ["[a100]"]),
        ("--device a100 --kernel gemm", []),
        ("--since 2h", ["[new]"]),
        ("--since 3d", ["[a100]", "[new]"]),
        ("--since 2026-03-01T11:00+00:00", ["[a100]", "[new]", "[old]"]),
        ("--sort age", ["[old]", "[a100]", "[new]"]),
        ("--sort ms", ["[a100]", "[old]", "[new]"]),
        ("--sort seconds", ["[a100]", "[old]", "[new]"]),
        ("--sort age --kernel gemm", ["[old]", "[new]"]),
    ],
)
@pytest.mark.usefixtures("three")
def test_ls_chooses_and_sorts(ask: Answers, options: str, keys: list[str]):
    """In JSON and on the page alike; the last line counts what is shown, and what there is."""
    assert [each["key"] for each in ask.json("ls", *options.split())["records"]] == keys
    out = ask("ls", *options.split())
    assert [key in out for key in keys] == [True] * len(keys)
    total = out.splitlines()[-1]
    assert total.startswith({0: "no records", 1: "1 record"}.get(len(keys), f"{len(keys)} records"))
    assert (" of 3" in total) is (len(keys) < 3)


@pytest.mark.usefixtures("three")
def test_within_a_table_the_order_is_kept(ask: Answers):
    out = ask("ls", "--sort", "age")
    assert out.index("[old]") < out.index("[new]")
    out = ask("ls", "--sort", "kernel")
    assert out.index("[new]") < out.index("[old]")


@pytest.mark.parametrize("options", ["--since soon", "--since 3y", "--sort size", "--quarantine --kernel gemm"])
def test_a_wrong_option_is_named(ask: Answers, options: str):
    """Exit code 2, one document for programs, and what would be understood."""
    assert options.split()[0] in ask.json("ls", *options.split(), code=2)["error"]


def test_a_moment_has_many_spellings():
    """Seconds to weeks before now, a date of this machine's zone, a date with a zone."""
    for text, ago in {"90s": 90, "30min": 1800, "30m": 1800, "2h": 7200, "2 h": 7200, "3d": 259200, "1w": 604800}.items():
        assert abs((datetime.now(UTC) - since(text)).total_seconds() - ago) < 60
    assert since("2026-03-01") == datetime(2026, 3, 1).astimezone()
    assert since("2026-03-01T12:00+02:00") == datetime(2026, 3, 1, 10, tzinfo=UTC)
    for text in ("", "h", "-2h", "2y", "999999999w", "0001-01-01", "yesterday"):
        with pytest.raises(typer.BadParameter, match="neither a time like 30min"):
            since(text)


# -- damaged files, and folders that are none ------------------------------------------------------------------------


def test_damaged_files_are_shown_and_set_the_exit_code(cache: Cache, ask: Answers):
    """Beside the whole records, with the reason; the file stays where it is, and its id says what is wrong with it."""
    whole, broken = keep(cache, record(), record(key="[1]"))
    path = cache.path_of(record(key="[1]").cache_key)
    path.write_text("{")
    reason = "Invalid JSON: EOF while parsing an object at line 1 column 1"
    for command in ("ls", "explain"):
        out = ask(command, code=1)
        assert f"{path}  Invalid JSON" in out
        answer = ask.json(command, code=1)
        assert answer["damaged"] == [{"path": str(path), "reason": reason}]
        assert [each["stem"] for each in answer["records"]] == [whole]
    assert ask.json("show", broken, code=1)["error"] == f"{path} is damaged: {reason}"
    assert ask.json("show", whole)["records"]
    assert path.read_text() == "{"


@pytest.mark.parametrize("words", ["ls", "show gemm", "explain", "export e.json", "merge e.json", "clear --yes", "ls --quarantine"])
@pytest.mark.parametrize("below", ["", "records"])
def test_a_cache_folder_that_is_none_is_an_error(ask: Answers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str, below: str):
    """A file, or a path below one: one line that names it and the variable, exit code 1, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    folder = tmp_path / "file" / below
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(folder))
    ask(*words.split(), code=1)
    assert ask.err.split("dist-tune: ")[1:] == [f"{folder} is not a folder: set DIST_TUNE_CACHE_DIR to the folder of the records\n"]
    assert "is not a folder" in ask.json(*words.split(), code=1)["error"]
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_a_cache_folder_that_cannot_be_read_is_an_error(ask: Answers, monkeypatch: pytest.MonkeyPatch):
    def refused(_path: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refused)
    assert "cannot be read (Permission denied): set DIST_TUNE_CACHE_DIR" in ask.json("ls", code=1)["error"]


def test_ls_names_no_hook(ask: Answers, cache: Cache):
    """A hook's name says nothing of a config's speed, and is the longest word of the row; ``--json`` has it."""
    config, fields = "BLOCK=64 num_warps=4 pre_hook=m.set_shapes", {"BLOCK": 64, "num_warps": 4, "pre_hook": "m.set_shapes"}
    keep(cache, record(candidates=[candidate(0, config=config, fields=fields, left=None)], winner=0))
    out = ask("ls")
    assert "BLOCK=64 num_warps=4" in out
    assert "pre_hook" not in out
