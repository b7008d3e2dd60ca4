"""The lists of events in docs/reference.md, made of the docstrings of
``dist_tune/log/events.py``.

    python -m tests.event_lists

Writes them into the page.
"""

from __future__ import annotations

import argparse
import ast
import inspect
from itertools import pairwise
from pathlib import Path

from dist_tune.log import events
from tests.faults import write_table

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
NAME = "events"


def lines() -> list[str]:
    """Of each kind a heading, what it is, and its fields; those of all kinds first."""
    body = ast.parse(inspect.getsource(events)).body
    aliases = _described(body)
    return [
        line for each in body if isinstance(each, ast.ClassDef) for line in _event(each, aliases)
    ]


def _event(model: ast.ClassDef, aliases: dict[str, str]) -> list[str]:
    """One event's. A field without a docstring has that of its type."""
    said = _described(model.body)
    fields = {
        each.target.id: ast.unparse(each.annotation)  # type: ignore[union-attr]
        for each in model.body
        if isinstance(each, ast.AnnAssign)
    }
    kind = fields.pop("kind", "Fields of every event").removeprefix("Literal['").removesuffix("']")
    rows = [
        f"- `{name}`: {said.get(name) or aliases[annotation]}"
        for name, annotation in fields.items()
    ]
    return [f"### {kind}", "", _line(ast.get_docstring(model) or ""), "", *rows, ""]


def _described(body: list[ast.stmt]) -> dict[str, str]:
    """Name -> docstring, of what is assigned here and has one."""
    return {
        ast.unparse(one.target if isinstance(one, ast.AnnAssign) else one.targets[0]): _line(
            after.value.value
        )
        for one, after in pairwise(body)
        if isinstance(one, ast.AnnAssign | ast.Assign)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
        if isinstance(after.value.value, str)
    }


def _line(docstring: str) -> str:
    """As one line of Markdown."""
    return " ".join(docstring.replace("``", "`").split())


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    write_table(PAGE, NAME, lines())
