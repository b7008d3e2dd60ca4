"""The page of all options, variables and names has those of the code: docs/reference.md."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import dist_tune
from dist_tune.settings import Settings, variables_read
from tests.programs import ROOT

PAGE = (ROOT / "docs/reference.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \|(.*)\|$", re.MULTILINE)


def rows(section: str) -> dict[str, list[str]]:
    """Of a section's tables: name in backticks in the first column -> the other cells."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = [
        (name, [cell.strip() for cell in cells.split("|")]) for name, cells in ROW.findall(text)
    ]
    assert len(dict(found)) == len(found) > 0, "twice in the section, or not there"
    return dict(found)


def defaults(function: Callable[..., Any]) -> dict[str, str]:
    """Parameter -> default as the page spells it: a blank for one that has to be given."""
    spelled = {inspect.Parameter.empty: "", ...: ""}
    values = {name: each.default for name, each in inspect.signature(function).parameters.items()}
    return {
        name: spelled[value] if value in spelled else f"`{value!r}`".replace("'", '"')
        for name, value in values.items()
    }


@pytest.mark.parametrize(("column", "decorator"), [(0, "contextual_autotune"), (1, "autotune")])
def test_the_table_has_each_option_with_its_default(column: int, decorator: str):
    """And none that the decorator does not take; the keywords of a call have no such columns."""
    listed = {
        name: cells[column]
        for name, cells in rows("Options").items()
        if len(cells) == 3 and cells[column] != "-"
    }
    assert listed == defaults(getattr(dist_tune, decorator))


def test_the_table_has_each_keyword_of_a_call():
    """With its default; the function has none of its own."""
    tuned = dist_tune.autotune([{"n": 1}], key_fn=None)(lambda n: n)
    listed = {name: cells[0] for name, cells in rows("Options").items() if len(cells) == 2}
    assert listed == {name: default for name, default in defaults(tuned).items() if name != "n"}


def test_the_table_has_each_variable_with_its_default():
    """And all that the warning about a misspelt one names."""
    listed = {
        name: cells[0].strip("`")
        for name, cells in rows("Environment variables").items()
        if name.startswith("DIST_TUNE_")
    }
    assert sorted(listed) == variables_read()
    fields = {name: field.default for name, field in Settings.model_fields.items()}
    fields["mode"] = Settings.model_construct().effective_mode
    spelled = {
        name: int(value) if isinstance(value, bool | float) else "" if value is None else value
        for name, value in fields.items()
    }
    assert listed == {"DIST_TUNE_CONFIG_DIR": ""} | {
        f"DIST_TUNE_{name.upper()}": str(value) for name, value in spelled.items()
    }
