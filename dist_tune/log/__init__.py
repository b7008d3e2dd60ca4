"""Account of a tuning: the log and the events of a rank, the terminal of the first one, and names
for people.

Knows texts, numbers and files; nothing of kernels or ranks.
"""

from dist_tune.log import events
from dist_tune.log.events import EVENT, EVENTS_VERSION, PHASES, AnyEvent, RunBegun
from dist_tune.log.story import LineFile, Story
from dist_tune.log.words import (
    amount,
    closure_name,
    first_mistake,
    kernels_told,
    milliseconds,
    phase_told,
    plain,
    printable,
    shortened,
    site_name,
    site_names,
    table,
)

__all__ = [
    "EVENT",
    "EVENTS_VERSION",
    "PHASES",
    "AnyEvent",
    "LineFile",
    "RunBegun",
    "Story",
    "amount",
    "closure_name",
    "events",
    "first_mistake",
    "kernels_told",
    "milliseconds",
    "phase_told",
    "plain",
    "printable",
    "shortened",
    "site_name",
    "site_names",
    "table",
]
