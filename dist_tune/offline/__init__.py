"""Tuning scripts: the best config of a kernel at given sizes, found ahead of time and shipped as JSON.

Each problem is one tuning, with the decorators' search and journal; problems are shared out over ranks.
All names that scripts use are exported here.
"""

from dist_tune.measure import Latency, benchmark_config, measure
from dist_tune.offline.api import Mode, tune_and_save_configs, tune_files, tune_kernel, tune_problems
from dist_tune.offline.engines import Engine, EngineConfig, UnfitError, config_of_record, configs_in_file, engine_files, facts_given
from dist_tune.offline.files import ConfigFile, Settled, load_config, m_leq, save_configs_to_json, small_medium_large
from dist_tune.offline.problem import Ended, Failed, Outcome, Problem, SearchStrategy, get_search_space, launchable

__all__ = [
    "ConfigFile", "Ended", "Engine", "EngineConfig", "Failed", "Latency", "Mode", "Outcome", "Problem", "SearchStrategy", "Settled",
    "UnfitError", "benchmark_config", "config_of_record", "configs_in_file", "engine_files", "facts_given", "get_search_space",
    "launchable", "load_config", "m_leq", "measure", "save_configs_to_json", "small_medium_large", "tune_and_save_configs", "tune_files",
    "tune_kernel", "tune_problems",
]  # fmt: skip
