"""The examples of docs/, run as their reader would run them: those of a page are one program."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

import dist_tune
from tests.programs import ROOT, Done, of_checkout, run_python

pytestmark = pytest.mark.processes

PAGES = sorted((ROOT / "docs").glob("*.md"))
# That one: tests/test_readme.py.
PROGRAMS = [page for page in PAGES if "```python" in page.read_text() and page.stem != "index"]
NODES = {
    path: [*ast.walk(ast.parse(path.read_text()))] for path in (ROOT / "dist_tune").rglob("*.py")
}
PLACES = {"records", "errors.py", "measure", "offline", "testing"}
SHOWN = {
    "TuningRecord",
    "CandidateRecord",
    "Environment",
    "Seconds",
    "Latency",
}
SHOWN |= {"FailureKind", "CandidateFailure"}
FENCE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def program(page: str) -> str:
    """All python blocks of a page, each on the lines where the page has it: a traceback names the
    page's lines.
    """
    lines: list[str] = []
    for block in FENCE.finditer(page):
        n_before = page.count("\n", 0, block.start(1))
        lines += [""] * (n_before - len(lines)) + block[1].splitlines()
    return "\n".join(lines) + "\n" if lines else ""


def run(folder: Path, text: str) -> Done:
    (folder / "page.py").write_text(text)
    # A page about ranks is one program on two of them.
    return run_python(
        "page.py",
        cwd=folder,
        env=of_checkout(folder),
        n_ranks=2 if "init_process_group(" in text else 0,
    )


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run(tmp_path: Path, page: Path):
    """Saved in one file, in an empty folder, they end without an error."""
    text = program(page.read_text())
    assert text, f"{page.name} has a python block that is not read: is its fence indented?"
    done = run(tmp_path, text)
    assert done.returncode == 0, done.stderr


def test_each_field_of_the_api_page_says_what_it_is():
    """The page leaves out a field without a docstring, and its reader would not know that it
    exists.
    """
    nodes = [
        node
        for path, nodes in NODES.items()
        if path.relative_to(ROOT).parts[1] in PLACES
        for node in nodes
    ]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name in SHOWN]
    pairs = [pair for each in classes for pair in pairwise([*each.body, each])]
    assert {each.name for each in classes} == SHOWN
    fields = [
        (ast.unparse(field), after)
        for field, after in pairs
        if isinstance(field, ast.AnnAssign | ast.Assign)
    ]
    bare = [text for text, after in fields if not isinstance(after, ast.Expr)]
    assert [text for text in bare if not re.match("model_config|schema_version", text)] == []


def test_the_site_has_every_page():
    """Pages that mkdocs.yml does not list are found by no reader."""
    listed = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {page.name for page in PAGES}
    assert {"production", "distributed", "cache"} <= {page.stem for page in PROGRAMS}


def test_a_wrong_example_fails_with_the_line_of_the_page(tmp_path: Path):
    """Two blocks share their names; prose and other languages are left out."""
    text = program(
        "# Page\n```python\nx = 1\n```\n```bash\nexit 7\n```\ntext\n```python\nassert x == 2\n```\n"
    )
    done = run(tmp_path, text)
    assert done.returncode == 1
    assert 'page.py", line 10' in done.stderr
    assert program("# Page\n```bash\ntrue\n```\n") == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_points_to_exists(page: Path):
    """Files of the repository in backticks, and links to other pages."""
    text = page.read_text()
    named = [
        ROOT / name
        for name in re.findall(
            r"`((?:benchmarks|kernels|launch|tests|dist_tune|docs)/[\w/.-]+)`", text
        )
    ]
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    linked = [page.parent / target for target in re.findall(r"\]\(([^):#]+)\)", prose)]
    assert [str(path) for path in named + linked if not path.exists()] == []
    outside = [str(path) for path in linked if not path.resolve().is_relative_to(ROOT / "docs")]
    assert outside == [], "mkdocs refuses links out of docs/: name the file in backticks"


def test_each_message_of_troubleshooting_is_one_that_is_printed():
    """Its headings quote messages, with dots for what differs, and name errors."""
    said = "\n".join(
        str(each.value)
        for nodes in NODES.values()
        for each in nodes
        if isinstance(each, ast.Constant)
    )
    headings = re.findall(
        r"^## (.*)$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE
    )
    quoted = [
        part.strip()
        for heading in headings
        for text in re.findall(r'"([^"]+)"', heading)
        for part in text.split("...")
    ]
    named = [name for heading in headings for name in re.findall(r"`(\w+)`", heading)]
    assert (len(quoted) > 20, len(named) > 10) == (True, True)
    assert [text for text in quoted if text not in said] == []
    assert [name for name in named if name not in dist_tune.__all__] == []


def test_the_modules_that_a_tuning_passes_through_are_there():
    """The table of phases names each once."""
    table = (
        (ROOT / "docs/how-it-works.md")
        .read_text()
        .partition("### One tuning, module by module")[2]
        .partition("###")[0]
    )
    modules = re.findall(r"`([a-z_]+(?:/[a-z_]+)?[.]py)`", table.partition("|---|")[2])
    assert 20 < len({*modules}) == len(modules)
    assert [each for each in modules if not (ROOT / "dist_tune" / each).is_file()] == []
