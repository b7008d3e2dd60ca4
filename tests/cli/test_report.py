"""The commands report and diff: files in, files out, what cannot be."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from dist_tune.cli.records import packed
from dist_tune.records import Cache
from tests.cached_records import NOON, candidate, record
from tests.cli_answers import refusal, run
from tests.report import stories

# -- report ----------------------------------------------------------------------------------------


def test_a_page_is_written_where_it_is_told(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without -o it is report.html of the working directory, unless --text is asked for; --json
    tells which page was written.
    """
    monkeypatch.chdir(tmp_path)
    assert run("report", export, "--text").stdout.startswith("Tuning of step\n")
    assert not list(tmp_path.glob("*.html"))
    assert "page.html: 2 sites, " in run("report", export, "-o", tmp_path / "page.html").stdout
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    told = json.loads(run("report", export, "--json").stdout)
    assert (told["page"], [site["facts"]["slowest rank"][0] for site in told["sites"]]) == (
        "report.html",
        ["3", "3"],
    )


def test_without_a_word_it_is_the_last_tuning(cache: Cache):
    """Of the cache; the sites that were tuned together."""
    for number, hour in ((0, 0), (1, 0), (2, -1)):
        tuned_at = NOON + timedelta(hours=hour)
        cache.store(stories.record(number, 6, n_replays=420 + hour, tuned_at=tuned_at))
    told = json.loads(run("report", "--json", "--text").stdout)
    assert sorted(each["label"] for each in told["sites"]) == [
        "gemm_0 [512, 2752]",
        "gemm_1 [1024, 2752]",
    ]


def test_records_are_reported_from_files_exports_folders_and_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One page for all of them."""
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    cache = Cache(tmp_path / "cache")
    path = cache.store(record())
    assert path is not None
    (tmp_path / "export.json").write_bytes(packed([record(), record(kernel="model.other")]))
    for source, n_sites in (
        (path, 1),
        (tmp_path / "export.json", 2),
        (cache.folder, 1),
        (path.stem[:12], 1),
        ("gemm", 1),
    ):
        assert len(json.loads(run("report", source, "--json", "--text").stdout)["sites"]) == n_sites
    assert "2 sites" in run("report", path, "gemm", "-o", tmp_path / "page.html").stdout


# -- diff ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "code", "verdict"), [(1.01, 0, "as fast"), (1.5, 1, "slower")])
def test_diff_fails_where_a_winner_got_slower(
    tmp_path: Path, factor: float, code: int, verdict: str
):
    """By more than its noise, which is 0.02 of 1.1 ms."""
    for name, times in (("a", 1.0), ("b", factor)):
        (tmp_path / f"{name}.json").write_bytes(
            packed(
                [record(candidates=[candidate(i, latency_ms=(0.1 + i) * times) for i in range(3)])]
            )
        )
    assert verdict in run("diff", tmp_path / "a.json", tmp_path / "b.json", code=code).stdout
    told = json.loads(
        run("diff", tmp_path / "a.json", tmp_path / "b.json", "--json", code=code).stdout
    )
    assert (told["n_slower"], told["pairs"][0]["verdict"]) == (code, verdict)


def test_diff_compares_folders(tmp_path: Path):
    """Two cache folders, and a folder of exports; another file in it costs a line on stderr."""
    for name in ("a", "b"):
        Cache(tmp_path / name).store(record())
    assert (
        run("diff", tmp_path / "a", tmp_path / "b").stdout.splitlines()[-1]
        == "1 compared: 1 as fast"
    )
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "export.json").write_bytes(packed([record()]))
    (mixed / "other.json").write_text("{}")
    done = run("diff", mixed, mixed)
    assert done.stdout.splitlines()[-1] == "1 compared: 1 as fast"
    assert all("other.json, record 1 cannot be read" in line for line in done.stderr.splitlines())


def test_diff_with_nothing_in_common_fails(tmp_path: Path):
    """With a code that is neither "slower" nor "as fast", and one line that names both sides;
    stdout lists what each has.
    """
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_bytes(
            packed([record(kernel=f"model.{name}", key=f"[{i}]") for i in range(2)])
        )
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    done = run("diff", a, b, code=2)
    assert (
        done.stderr
        == f"dist-tune: nothing to compare: {a} has 2 records, {b} has 2 records, with no kernel"
        " and key in common\n"
    )
    assert [done.stdout.splitlines()[i] for i in (0, -1)] == [
        "only in the first: model.a [0]",
        "only in the second: model.b [1]",
    ]
    told = json.loads(run("diff", a, b, "--json", code=2).stdout)
    assert (told["pairs"], len(told["only_before"]), len(told["only_after"])) == ([], 2, 2)
    assert told["error"] in done.stderr


# -- what stands for nothing -----------------------------------------------------------------------


def test_what_stands_for_nothing_is_one_line(cache: Cache, tmp_path: Path):
    """A cache where nothing was tuned, a folder that is not there or without records, an id that no
    record has, a file that is not there.
    """
    told = f"there are no records in {cache.folder}: nothing was tuned yet"
    assert refusal("report") == f"dist-tune: {told}"
    for folder in (tmp_path, tmp_path / "nothing"):
        assert str(folder) in refusal("report", folder)
    assert "nothing is called" in refusal("report", "abcdef12")
    assert "no such file or folder" in refusal("report", tmp_path / "record.json")


def test_a_record_of_another_schema_is_one_line(tmp_path: Path):
    """And a file that holds none."""
    path = Cache(tmp_path).store(record())
    assert path is not None
    (tmp_path / "old.json").write_bytes(
        path.read_bytes().replace(b'"schema_version":4', b'"schema_version":2')
    )
    (tmp_path / "no.json").write_text("{}")
    old = "schema_version: Input should be 4"
    for command in (("report",), ("diff", path)):
        assert f"old.json, record 1 cannot be read: {old}" in refusal(
            *command, tmp_path / "old.json"
        )
        assert "no.json, record 1 cannot be read: closure: Field required" in refusal(
            *command, tmp_path / "no.json"
        )
