"""Tuning scripts: the best config of a kernel at given sizes, found ahead of time and shipped as
JSON.

Each problem is one tuning, with the decorators' search and journal; problems are shared out over
ranks. All names that scripts use are exported here.
"""

from dist_tune.measure import Latency, benchmark_config, measure
from dist_tune.offline.api import (
    Mode,
    tune_and_save_configs,
    tune_files,
    tune_kernel,
    tune_problems,
)
from dist_tune.offline.config_files import (
    ConfigFile,
    Settled,
    load_config,
    m_leq,
    save_configs_to_json,
    small_medium_large,
)
from dist_tune.offline.problem import (
    Ended,
    Failed,
    Outcome,
    Problem,
    SearchStrategy,
    get_search_space,
    launchable,
)

__all__ = [
    "ConfigFile",
    "Ended",
    "Failed",
    "Latency",
    "Mode",
    "Outcome",
    "Problem",
    "SearchStrategy",
    "Settled",
    "benchmark_config",
    "get_search_space",
    "launchable",
    "load_config",
    "m_leq",
    "measure",
    "save_configs_to_json",
    "small_medium_large",
    "tune_and_save_configs",
    "tune_files",
    "tune_kernel",
    "tune_problems",
]
