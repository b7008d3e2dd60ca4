"""The time of a run, and the check of its result.

Clocks, statistics, generator state, comparison with a reference.
Knows devices and tensors; nothing of candidates, ranks or search.
"""

from dist_tune.measure.benchmark import Latency, benchmark_config, measure
from dist_tune.measure.checks import Checker, Matches, matches
from dist_tune.measure.clocks import (
    MAX_LEAD_MS,
    Clock,
    Lead,
    Span,
    device_clock,
    is_capturing,
    is_interpreted,
    is_traced,
    no_full_collections,
    wait_for_device,
)
from dist_tune.measure.differences import difference, flat
from dist_tune.measure.graphs import captured, graph_pool, obstacle_in
from dist_tune.measure.inputs import Inputs, RngState
from dist_tune.measure.memory import Snapshot, tensor_of, tensors_in
from dist_tune.measure.state import StepState, peak_bytes, sums_of, written

__all__ = [
    "MAX_LEAD_MS",
    "Checker",
    "Clock",
    "Inputs",
    "Latency",
    "Lead",
    "Matches",
    "RngState",
    "Snapshot",
    "Span",
    "StepState",
    "benchmark_config",
    "captured",
    "device_clock",
    "difference",
    "flat",
    "graph_pool",
    "is_capturing",
    "is_interpreted",
    "is_traced",
    "matches",
    "measure",
    "no_full_collections",
    "obstacle_in",
    "peak_bytes",
    "sums_of",
    "tensor_of",
    "tensors_in",
    "wait_for_device",
    "written",
]
