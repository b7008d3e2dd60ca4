"""Imports of the commands that read records and events: none takes the seconds of torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dist_tune.cache.store import Cache
from tests.cached_records import record
from tests.cli_answers import keep
from tests.report.stories import write_story

pytestmark = [pytest.mark.once, pytest.mark.processes]

PROGRAM = """
import json, sys
from contextlib import redirect_stdout
from io import StringIO
from dist_tune.cli import main
found = []
for words in json.loads(sys.argv[1]):
    with redirect_stdout(StringIO()) as out:
        code = main(words)
    assert code == 0 and out.getvalue(), (words, code)
    found.append([words[:2], sorted({"torch", "triton", "numpy"} & set(sys.modules))])
print(json.dumps(found))
"""


def test_reading_records_and_events_imports_no_torch(cache: Cache, tmp_path: Path):
    """One process for all commands, lightest first: an import would stay for the rest."""
    (stem,) = keep(cache, record())
    write_story(tmp_path / "logs", 1, 8)
    logs, export = str(tmp_path / "logs"), str(tmp_path / "export.json")
    commands = [
        ["cache", "path"], ["cache", "ls"], ["cache", "ls", "--json"], ["cache", "ls", "--quarantine"], ["cache", "show", stem],
        ["show", stem], ["cache", "export", export], ["cache", "merge", export], ["diff", export, stem], ["report", stem, "--text"],
        ["report", logs, "--json", "-o", str(tmp_path / "report.html")], ["report", export, "-o", str(tmp_path / "report.html")],
        ["watch", logs, "--once"], ["trace", logs, "-o", str(tmp_path / "trace.json")], ["cache", "clear", "--yes"],
    ]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(commands)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [each for each in json.loads(done.stdout) if each[1]] == []
