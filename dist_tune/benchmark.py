"""The names of ``dist_tune.measure`` for timing one run, under the path that earlier programs import them from."""

from dist_tune.measure import Latency, benchmark_config, measure

__all__ = ["Latency", "benchmark_config", "measure"]
