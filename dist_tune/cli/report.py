"""Records that the words of ``dist-tune report`` and ``diff`` stand for."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from dist_tune.cli.records import choose, opened, records_in
from dist_tune.cli.render import RefusedError
from dist_tune.records import BrokenRecordError, TuningRecord
from dist_tune.report import latest


def records_of(*sources: str) -> list[TuningRecord]:
    """The records of files, exports, folders, ids and kernels; of no words those of the last
    tuning in the cache.

    At least one of each word, else RefusedError.
    """
    if sources:
        return [record for source in sources for record in _records_of(source)]
    cache = opened()
    found = latest(entry.record for entry in cache.entries())
    if not found:
        raise RefusedError(f"there are no records in {cache.folder}: nothing was tuned yet")
    return found


def _records_of(source: str) -> Sequence[TuningRecord]:
    path = Path(source)
    if not path.exists():
        if "/" in source or path.suffix == ".json":
            raise RefusedError(f"{source}: no such file or folder")
        return [each.record for each in choose(opened(), source).values()]
    if path.is_dir():
        os.listdir(path)  # or one that may not be read would count as empty
    read = list(records_in(path))
    broken = [
        f"{where} cannot be read: {each}"
        for where, each in read
        if isinstance(each, BrokenRecordError)
    ]
    found = [each for _, each in read if isinstance(each, TuningRecord)]
    if not found or (broken and not path.is_dir()):
        raise RefusedError((broken or [f"there are no records in {source}"])[0])
    for each in broken:  # another file of a folder is nothing to fail of
        warnings.warn(each, stacklevel=2)
    return found
