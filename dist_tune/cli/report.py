"""Files behind ``dist-tune report`` and ``diff``: stories and records that words stand for."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from dist_tune.cli.records import choose, opened, records_in
from dist_tune.cli.render import RefusedError
from dist_tune.records import BrokenRecordError, TuningRecord
from dist_tune.report import Story, story_of_folder, story_of_records
from dist_tune.settings import Settings

LEFT_OUT = 3
"""Exit code of a command that is done, without something of a rank whose event file is damaged."""


def story_of(sources: list[str]) -> Story:
    """The story of a log folder (of DIST_TUNE_LOG_DIR without sources), or of the records that
    several words stand for.

    Raises RefusedError, or an OSError as UnreadableEventsError, if one of them stands for nothing.
    """
    if not sources or (len(sources) == 1 and _has_events(sources[0])):
        return story_of_folder(Path(sources[0]) if sources else Settings().log_dir)
    return story_of_records(record for each in sources for record in records_of(each)[0])


def records_of(source: str) -> tuple[list[TuningRecord], list[str]]:
    """The records that a word of the command line stands for, and what is damaged: a file, an
    export, a folder, an id, a kernel.

    At least one record, else as ``story_of``; of a log folder those of the winners so far.
    """
    path = Path(source)
    if _has_events(source):
        story = story_of_folder(path)
        found = [site.record for _, _, site in story.sites if site.record is not None]
        if not found:
            raise RefusedError(
                "; ".join(
                    [f"the tunings in {source} have no record that can be read", *story.notes[-1:]]
                )
            )
        return found, list(story.damage.values())
    if not path.exists():
        if "/" in source or path.suffix == ".json":
            raise RefusedError(f"{source}: no such file or folder")
        return [each.record for each in choose(opened(), source).values()], []
    read = list(records_in(path))
    broken = [
        f"{where} cannot be read: {each}"
        for where, each in read
        if isinstance(each, BrokenRecordError)
    ]
    found = [each for _, each in read if isinstance(each, TuningRecord)]
    if not found or (broken and not path.is_dir()):
        raise RefusedError(
            (broken or [f"there are no events in {source}, and no records that can be read"])[0]
        )
    for each in broken:  # another file of a folder is nothing to fail of
        warnings.warn(each, stacklevel=2)
    return found, []


def _has_events(source: str) -> bool:
    return os.path.isdir(source) and any(
        name.startswith("rank-") and name.endswith(".jsonl") for name in os.listdir(source)
    )
