"""Account of a tuning: the log of a rank, the terminal of the first one, and names for people.

Knows texts, numbers and files; nothing of kernels or ranks.
"""

from dist_tune.log.formatting import (
    amount,
    closure_name,
    first_mistake,
    kernel_and_key,
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
from dist_tune.log.story import PHASES, Phase, Story

__all__ = [
    "PHASES",
    "Phase",
    "Story",
    "amount",
    "closure_name",
    "first_mistake",
    "kernel_and_key",
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
