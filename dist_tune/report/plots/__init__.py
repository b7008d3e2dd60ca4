"""Plots of sites and of the ranks' time lines: their shapes as values, drawn as SVG for the page.

Knows stories and records as numbers and words; nothing of the page around a plot.
"""

from dist_tune.report.plots.site_charts import site_charts
from dist_tune.report.plots.svg import draw
from dist_tune.report.plots.timeline import straggler_words, tuning_charts

__all__ = ["draw", "site_charts", "straggler_words", "tuning_charts"]
