"""Tuning scripts: the best config of a kernel at given sizes, found ahead of time and shipped as
JSON.

Each problem is one tuning, with the decorators' search and journal; problems are shared out over
ranks. All names that scripts use are exported here.
"""

from dist_tune.measure import Latency, benchmark_config, measure
from dist_tune.offline.api import tune_and_save_configs, tune_kernel
from dist_tune.offline.config_files import (
    load_config,
    m_leq,
    save_configs_to_json,
    small_medium_large,
)
from dist_tune.offline.problem import SearchStrategy, get_search_space

__all__ = [
    "Latency",
    "SearchStrategy",
    "benchmark_config",
    "get_search_space",
    "load_config",
    "m_leq",
    "measure",
    "save_configs_to_json",
    "small_medium_large",
    "tune_and_save_configs",
    "tune_kernel",
]
