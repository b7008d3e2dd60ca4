"""What a tuning did, for people: records become a page, a text or a comparison.

Reads no file and writes none; tunes nothing and changes no record.
"""

from dist_tune.report.compare import compare, comparison_lines
from dist_tune.report.page import latest, render, summary, text, tunings_of

__all__ = [
    "compare",
    "comparison_lines",
    "latest",
    "render",
    "summary",
    "text",
    "tunings_of",
]
