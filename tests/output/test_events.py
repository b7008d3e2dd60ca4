"""The schema of ``rank-<i>.jsonl``, and the page that describes it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from dist_tune.errors import FailureKind
from dist_tune.output.events import OF_JOURNALS_ALONE, AnyEvent, Event, Phase

pytestmark = pytest.mark.once

PAGE = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
KINDS = [each for each in get_args(get_args(AnyEvent)[0]) if each not in OF_JOURNALS_ALONE]


def described(kind: str) -> set[str]:
    """Names in the first column of the section of a kind."""
    section = PAGE.partition(f"\n## {kind}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*)\|", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize("event", KINDS, ids=lambda event: event.__name__)
def test_the_page_describes_each_field_of_each_event(event: type[Event]):
    """And no field that the event does not have."""
    own = event.model_fields.keys() - Event.model_fields.keys() - {"kind"}
    assert described(event.model_fields["kind"].default) == own


def test_the_page_describes_the_fields_of_every_event():
    assert described("Fields of every event") == {*Event.model_fields, "kind"}


def test_the_page_names_each_phase_and_each_kind_of_failure():
    assert [each for each in (*get_args(Phase), *FailureKind) if str(each) not in PAGE] == []
