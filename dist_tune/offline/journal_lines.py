"""Lines of a journal as they come back from a disk, where they may be torn, damaged or of another program.

Knows the form of a line; nothing of what follows from several.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dist_tune.cache import text_of
from dist_tune.output import printable
from dist_tune.safe_files import RefusedFileError, read_regular
from dist_tune.warn_once import warn_once

_Index = Annotated[int, Field(ge=0)]
_Positive = Annotated[float, Field(ge=0)]


class JournalLine(BaseModel):
    """One line, as it comes back from the disk."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    t: Literal["open", "begin", "end", "stop", "done"]
    identity: str = ""
    values: dict[str, str] = {}
    """Of the first line: what the identity is of, by name."""
    candidates: list[_Index] = []
    ms: dict[_Index, _Positive] = {}
    failed: dict[_Index, str] = {}
    champion: _Index | None = None
    budget_s: _Positive | None = None

    @property
    def indices(self) -> set[int]:
        """All candidates that it names."""
        return {*self.candidates, *self.ms, *self.failed, *([] if self.champion is None else [self.champion])}


def sound_lines(path: Path, lines: Sequence[bytes], n_candidates: int | None) -> list[JournalLine]:
    """The lines that a journal of these candidates may hold. Torn and damaged ones are left out; wrong ones with a warning."""
    found, wrong = list[JournalLine](), list[str]()
    for number, line in enumerate(lines, 1):
        text = text_of(line)
        if text is None:
            continue
        try:
            each = JournalLine.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            wrong.append(f"line {number}: {'.'.join(map(str, first['loc']))}: {first['msg']}")
            continue
        unknown = [i for i in each.indices if n_candidates is not None and i >= n_candidates]
        if unknown:
            wrong.append(f"line {number}: candidate {min(unknown)} of {n_candidates}")
        else:
            found.append(each)
    if wrong:
        warn_once(f"journal {path}: {len(wrong)} lines are left out ({printable(wrong[0])[:200]}); what they tell of is measured again")
    return found


def other_values(path: Path, pattern: str) -> dict[str, str] | None:
    """The values of the newest journal in the folder of ``path`` that is of another identity; None if there is none."""
    with suppress(OSError):
        others = [each for each in path.parent.glob(pattern) if each != path]
        for other in sorted(others, key=lambda each: each.lstat().st_mtime, reverse=True):
            with suppress(OSError, ValidationError):
                first = next(iter(raw_lines(other)), b"")
                return JournalLine.model_validate_json(text_of(first) or b"").values
    return None


def raw_lines(path: Path) -> list[bytes]:
    """The lines of a journal; none if there is none, or one that is too large.

    Raises:
        OSError: it cannot be read, or is a link, a FIFO or a device.
    """
    try:
        return read_regular(path, follows_links=False).split(b"\n")
    except FileNotFoundError:
        return []
    except RefusedFileError as error:
        if error.errno != errno.EFBIG:
            raise
        warn_once(f"journal {path} is begun anew: it is {error.strerror}")
        return []
