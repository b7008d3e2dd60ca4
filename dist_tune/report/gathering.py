"""Stories from event files or from records."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from dist_tune.cache import TuningRecord, step_times
from dist_tune.output import first_mistake
from dist_tune.report.reading import UnreadableEventsError, event_files
from dist_tune.report.story import MAX_SPANS, SiteStory, Story, TuningStory
from dist_tune.report.watching import Watcher


def story_of_folder(folder: Path) -> Story:
    """What the event files of a folder tell.

    Raises:
        UnreadableEventsError: there are none, or none of them can be used.
        OSError: the folder cannot be read.
    """
    if not event_files(folder):
        raise UnreadableEventsError(f"there is no rank-<i>.jsonl in {folder}: name the folder of DIST_TUNE_LOG_DIR, or records")
    watcher = Watcher(folder)
    watcher.poll()
    story = watcher.story
    story.notes, story.damage = watcher.notes, list(watcher.damage.values())
    if not story.tunings:
        raise UnreadableEventsError(": ".join([f"the files in {folder} tell of no tuning yet", *story.damage[:1]]))
    add_records(story)
    _note_gaps(story, set(watcher.damage))
    return story


def add_records(story: Story) -> None:
    """Read the records that came with winners, and the step before and after from those of all sites of a tuning."""
    for _, site in story.sites:
        if site.won is None or site.record is not None:
            continue
        try:
            site.record = TuningRecord.model_validate(site.won.record)
        except ValidationError as error:
            site.unreadable = first_mistake(error)
            note = f"site {site.number}: its record cannot be read ({site.unreadable})"
            if note not in story.notes:
                story.notes.append(note)
    for tuning in story.tunings.values():
        _take_steps(tuning)


def _take_steps(tuning: TuningStory) -> None:
    """As the tuning tells them, unless its records do: earlier versions took for the first configs' step what other sites had tried."""
    records = [site.record for site in tuning.sites.values() if site.record is not None]
    first_ms, best_ms = step_times(records) if len(records) == len(tuning.sites) else (None, None)
    if first_ms is not None:
        tuning.first_ms, tuning.best_ms = first_ms, best_ms


def _note_gaps(story: Story, damaged: set[int]) -> None:
    for tuning in story.tunings.values():
        n_ranks = tuning.world_size
        absent = sorted(set(range(n_ranks)) - set(tuning.ranks) - damaged) if n_ranks <= 100_000 else []
        if absent:
            told = ", ".join(map(str, absent[:8])) + ", ..." * (len(absent) > 8)
            story.notes.append(f"{tuning.title}: no events of {len(absent)} of {n_ranks} ranks ({told}), which may log to other folders")
        unfinished = [rank for rank, each in sorted(tuning.ranks.items()) if not each.is_done]
        if unfinished:
            story.notes.append(f"{tuning.title}: the tuning had not ended on {len(unfinished)} of {len(tuning.ranks)} ranks")
        for rank, each in sorted(tuning.ranks.items()):
            if each.error:
                story.notes.append(f"{tuning.title}: rank {rank} ended with {each.error[:300]}")
            if each.n_lost_spans:
                story.notes.append(f"rank {rank}: more than {MAX_SPANS} replays or compilations; the time line leaves out the last")


def story_of_records(records: Iterable[TuningRecord]) -> Story:
    """What records tell: sites that were tuned together are one tuning. There are no events, so no time line."""
    story = Story()
    for record in records:
        # Sites of one tuning have these in common.
        name = f"{record.closure} {record.seconds!r} {record.n_replays} {record.environment!r}"
        tuning = story.tunings.setdefault(name, TuningStory(name, record.closure))
        tuning.seconds = {phase: seconds for phase, seconds in record.spent.model_dump().items() if seconds}
        tuning.n_replays = record.n_replays
        n_before = len(story.sites)
        configs = [each.config for each in record.candidates]
        label = f"{record.kernel} {record.key} #{n_before}"  # two records of one key may differ in their candidates
        tuning.sites[label] = SiteStory(n_before, f"{record.kernel} {record.key}", record.kernel, record.key, configs, record=record)
    for tuning in story.tunings.values():
        _take_steps(tuning)
    return story
