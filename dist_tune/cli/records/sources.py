"""Stories and records that words of the command line stand for: log folders, record files, exports, cache folders, ids."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from dist_tune.cache import BrokenRecordError, Cache, TuningRecord
from dist_tune.cli.records.cache import opened
from dist_tune.cli.records.selection import choose
from dist_tune.cli.records.transfer import unpack
from dist_tune.cli.tables import LeftOutWarning, RefusedError
from dist_tune.report import Story, story_of_folder, story_of_records
from dist_tune.safe_files import read_regular
from dist_tune.settings import Settings


def story_of(sources: list[str]) -> Story:
    """The story of a log folder (of DIST_TUNE_LOG_DIR without sources), or of the records that several words stand for.

    Raises:
        RefusedError: one of them stands for nothing.
        UnreadableEventsError, OSError: its files cannot be read.
    """
    paths = [Path(each) for each in sources] or [Settings().log_dir]
    if len(paths) == 1 and (not sources or _has_events(paths[0])):
        return story_of_logs(paths[0])
    return story_of_records(record for each in sources for record in records_of(each))


def story_of_logs(folder: Path) -> Story:
    """The story of a log folder, with a ``LeftOutWarning`` for each damaged file.

    Raises:
        RefusedError: there is no such folder.
        UnreadableEventsError, OSError: as ``story_of_folder``.
    """
    try:
        story = story_of_folder(folder)
    except FileNotFoundError:
        advice = "run this where the tuning ran, or name the folder of its logs (DIST_TUNE_LOG_DIR)"
        raise RefusedError(f"{folder}: no such file or folder: {advice}") from None
    for each in story.damage:
        warnings.warn(each, LeftOutWarning, stacklevel=2)
    return story


def _has_events(path: Path) -> bool:
    return path.is_dir() and any(name.startswith("rank-") and name.endswith(".jsonl") for name in os.listdir(path))


def records_of(source: str) -> list[TuningRecord]:
    """The records that a word of the command line stands for: a file, an export, a folder, an id, a kernel. At least one.

    Raises: as ``story_of``.
    """
    path = Path(source)
    if _has_events(path):
        found = _of_events(path)
    elif path.is_dir():
        found = _of_folder(path)
    elif path.suffix in (".jsonl", ".log") and path.is_file():
        raise RefusedError(f"{source} is the log of one rank: name its folder, {path.parent}")
    elif path.exists():
        found = _unpacked(path)
    elif "/" in source or path.suffix == ".json":
        raise RefusedError(f"{source}: no such file or folder")
    else:
        found = [each.record for each in choose(opened(), source)]
    if not found:
        raise RefusedError(f"there are no records and no events in {source}")
    return found


def _of_events(folder: Path) -> list[TuningRecord]:
    """The records of the winners so far. Notes about the files are warnings."""
    story = story_of_logs(folder)
    found = [site.record for _, site in story.sites if site.record is not None]
    if not found:
        reason = next((reason for _, site in story.sites if (reason := site.unreadable)), "no site has its winner yet")
        raise RefusedError(f"the tunings in {folder} have no record that can be read: {reason}")
    for note in story.notes:
        warnings.warn(note, stacklevel=2)
    return found


def _of_folder(folder: Path) -> list[TuningRecord]:
    """The records of a cache folder, and of record files and exports that lie in it. Other files cost a warning each."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = [entry.record for entry in Cache(folder).entries()]
    reasons = [str(each.message) for each in told]
    for file in sorted(folder.glob("*.json")):
        try:
            found += _unpacked(file)
        except RefusedError as error:
            reasons.append(str(error))
    if reasons and not found:
        raise RefusedError(reasons[0])
    for reason in reasons:
        warnings.warn(reason, stacklevel=2)
    return found


def _unpacked(path: Path) -> list[TuningRecord]:
    found = []
    try:
        for each in unpack(read_regular(path)):
            if isinstance(each, BrokenRecordError):
                raise each
            found.append(each)
    except BrokenRecordError as error:
        raise RefusedError(f"{path} holds no record that can be read: {error}") from error
    return found
