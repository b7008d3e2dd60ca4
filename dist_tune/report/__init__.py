"""What a tuning did, for people: event files and records become a page, a text or a comparison.

Reads the event files of a log folder and the records of the cache, and writes where it is told;
tunes nothing and changes no record.
"""

from dist_tune.report.compare import compare, comparison_lines
from dist_tune.report.facts import render, summary, text
from dist_tune.report.reader import UnreadableEventsError, story_of_folder
from dist_tune.report.tunings import Story, story_of_records

__all__ = [
    "Story",
    "UnreadableEventsError",
    "compare",
    "comparison_lines",
    "render",
    "story_of_folder",
    "story_of_records",
    "summary",
    "text",
]
