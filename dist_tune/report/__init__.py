"""What a tuning did, for people: event files and records become a page, a text, a running view, a trace or a comparison.

Reads the event files of a log folder and the records of the cache, and writes where it is told; tunes nothing and changes no record.
Imports jinja2 for the page.
"""

from dist_tune.report.compare import compare
from dist_tune.report.gathering import story_of_folder, story_of_records
from dist_tune.report.page import render
from dist_tune.report.reading import UnreadableEventsError
from dist_tune.report.story import Story
from dist_tune.report.text import summary, text
from dist_tune.report.trace import trace_events
from dist_tune.report.watching import Watcher, progress_lines

__all__ = [
    "Story", "UnreadableEventsError", "Watcher", "compare", "progress_lines", "render", "story_of_folder", "story_of_records",
    "summary", "text", "trace_events",
]  # fmt: skip
