"""Options of the decorators about how a step is tuned, which are refused where they are written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dist_tune import autotune, contextual_autotune

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"max_slowdown": -0.1}, ValueError, "need max_slowdown >= 0, got -0.1"),
    (
        {"max_slowdown": 1.5},
        ValueError,
        "need max_slowdown <= 1, a share of the job's time, got 1.5",
    ),
    ({"max_slowdown": float("nan")}, ValueError, "max_slowdown"),
    *(({"max_slowdown": share}, TypeError, "max_slowdown") for share in ("5%", True, None)),
    ({"search": "online", "max_slowdown": 0}, ValueError, "max_slowdown=0"),
    ({"search": "online", "reset": print}, ValueError, "reset= is given"),
    ({"search": "online", "check": torch.equal}, ValueError, "check= is given"),
    ({"search": "on-line"}, ValueError, "online"),
    *(
        ({"search": each, "objective": "graph"}, ValueError, f"search='{each}' has none")
        for each in ("exhaustive", "online")
    ),
]


@pytest.mark.parametrize("face", ["contextual", "function"])
@pytest.mark.parametrize(("options", "kind", "words"), REFUSED)
def test_bad_options_are_refused(
    face: str, options: dict[str, Any], kind: type[Exception], words: str
):
    """When the decorator is made, in one line."""
    if {("function", "objective"), ("contextual", "check")} & {(face, name) for name in options}:
        kind, words = TypeError, "unexpected keyword"  # no option of this decorator
    with pytest.raises(kind, match=words) as caught:
        contextual_autotune(**options) if face == "contextual" else autotune(
            [{"a": 1}, {"a": 2}], key=["x"], **options
        )
    assert "\n" not in str(caught.value)
