"""The ``DIST_TUNE_*`` environment variables.

Those at the start of a tuning count and not those at import, so that a test or a launcher may set
them late. An empty variable is unset.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from dist_tune.files import warn_once
from dist_tune.validation import spelled

_PREFIX = "DIST_TUNE_"
_OTHER_NAMES = {
    "always_tune": "TRITON_DIST_AUTOTUNE_ALWAYS_TUNE",
    "version_check": "TRITON_DIST_AUTOTUNE_VERSION_CHECK",
}
"""Setting -> the variable that counts where ours is unset."""
_BOOL = "1, 0, true, false, yes, no, on or off"
_ALLOWED = {
    "deadline_s": "a number of seconds above 0, at most 86400",
    "log_level": "TRACE, DEBUG, INFO or WARNING",
    "log_dir": "a path",
    "cache_dir": "a path",
    "cache_path": f"paths with {os.pathsep} between them",
    "verbosity": "quiet, normal or verbose",
    "mode": "tune, cached, require or first",
}
"""Setting -> what it may hold; ``_BOOL`` for all others."""
_FOLDER = "~/.dist_tune/autotune"
_ENTRY = re.compile(
    rf"[A-Za-z][\w+.-]+(?:::[\w+.-]+)*://[^{os.pathsep}/]*(?::[0-9]+(?=/))?[^{os.pathsep}]*|[^{os.pathsep}]+"
)
"""Of ``cache_path``: a path, or a URL, whose own colon separates nothing."""
_MODES = ("tune", "cached", "require", "first")
NEAREST = "nearest"
"""A mode that no variable asks for, only ``nearest=True`` in a call with ``autotune=False``: as
cached, for one function.
"""


class SettingsError(ValueError):
    """Environment variables that cannot be read.

    The message is one line with the values and what is allowed.

    Attributes:
        names: the settings.
    """

    def __init__(self, told: str, names: tuple[str, ...] = ()) -> None:
        super().__init__(told)
        self.names = names


class Settings(BaseSettings):
    """Settings of one tuning. Raises ``SettingsError`` naming the variables that cannot be read."""

    model_config = SettingsConfigDict(frozen=True, env_ignore_empty=True, env_prefix=_PREFIX)

    def __init__(self, **given: Any) -> None:
        others = {
            name: os.environ[_variable(name)]
            for name in _OTHER_NAMES
            if os.environ.get(_variable(name))
        }
        given = others | given
        try:
            super().__init__(**given)
        except ValidationError as error:
            held = {str(each["loc"][0]): each["input"] for each in error.errors()}
            raise SettingsError(
                "; ".join(_unreadable(*each) for each in held.items()), tuple(held)
            ) from None

    deadline_s: float = Field(default=30.0, gt=0, le=86400, allow_inf_nan=False)
    """Seconds without any progress of a rank before its peers give up, and the timeout of process
    groups while tuning.
    """
    log_dir: Path = Path(".autotune_logs")
    """Folder of ``rank-<i>.log``; relative to the working directory."""
    log_level: str = Field(default="INFO", pattern="^(?i:TRACE|DEBUG|INFO|WARNING)$")
    """Least severe level written to the file; TRACE has a line for every launch that was timed."""
    verbosity: str = Field(default="normal", pattern="^(?i:quiet|normal|verbose)$")
    """Rank 0 on stderr: quiet writes nothing, normal what is being tuned and what won, verbose all
    lines of the log from INFO on.
    """
    cache_dir: str = _FOLDER
    """Folder of the records of finished tunings, where ``cache_path`` is unset or names no folder
    of this machine first.
    """
    cache_path: str = ""
    """Several such folders, separated as in PATH: the first is written, the others are only read.

    ``package://name`` is a package's.
    """
    cache_shared: bool = False
    """True: records are the group's as well, with mode 0660 in folders of mode 0770; otherwise
    their owner's alone, 0600 and 0700.
    """
    always_tune: bool = False
    """True: tune although there is a record, and replace it."""
    version_check: bool = True
    """True: a record counts only with the versions of torch, triton and CUDA that it was made with.
    """
    mode: str | None = Field(default=None, pattern=r"^\s*(?i:tune|cached|require|first)\s*$")
    """What may happen where a config is missing.

    None is tune. cached: the nearest record's config, else the first; nothing is tuned, and
    nothing fails. require: an error. first: the first config, also where there is a record, for
    debugging.
    """

    @field_validator("log_dir")
    @classmethod
    def _of_home(cls, folder: Path) -> Path:
        # As the cache does with its own: a file of a container's variables has no shell that would
        # do it.
        return Path(os.path.expanduser(folder))

    @property
    def _named(self) -> list[str]:
        return _ENTRY.findall(self.cache_path) or [self.cache_dir]

    @property
    def cache_folders(self) -> list[str]:
        """Folders of records, paths and URLs; the first is a path, and is written.

        So is a URL before which none was named.
        """
        return (
            self._named
            if "://" not in self._named[0]
            else [_FOLDER if "://" in self.cache_dir else self.cache_dir, *self._named]
        )

    @property
    def is_cache_remote(self) -> bool:
        """True if a URL stands first, to which records are written as well."""
        return "://" in self._named[0] and not self._named[0].startswith("package://")

    @property
    def effective_mode(self) -> str:
        """The mode: "tune", "cached", "require" or "first"."""
        return self.mode.strip().lower() if self.mode else "tune"

    @property
    def may_tune(self) -> bool:
        """False where a missing config is neither tuned nor an error: in the modes "cached" and
        "first".
        """
        return self.effective_mode in ("tune", "require")

    @property
    def shown(self) -> str:
        """The verbosity: "quiet", "normal" or "verbose"."""
        return self.verbosity.lower()


def read_settings() -> Settings:
    """Settings of a tuning that must not end a job: a variable that cannot be read costs a warning,
    once, and counts as unset.
    """
    settings, told, _ = _read(_variables())
    for each in told:
        warn_once(f"dist_tune: {each}")
    return settings


def check_mode() -> None:
    """Refuse to go on where it cannot be read whether anything may be tuned.

    Raises:
        SettingsError: DIST_TUNE_MODE is misspelt, its name or its value, and no other one says it.
    """
    if wrong := _read(_variables())[2]:
        raise SettingsError(
            f"{wrong}. Whether anything may be tuned is not known: correct it, or unset it to tune"
        )


def variables_read() -> list[str]:
    """All variables of ours that something reads."""
    # That one by a script of kernels/.
    return sorted(f"{_PREFIX}{name.upper()}" for name in (*Settings.model_fields, "config_dir"))


def unread_variables(names: Iterable[str]) -> list[str]:
    """Sentences about variables with our prefix that nothing reads: each is a mistake of spelling,
    as a rule.
    """
    known = variables_read()
    unread = sorted(
        name for name in names if name.startswith(_PREFIX) and name.upper() not in known
    )
    return [
        f"{each} is not read: "
        + (f"did you mean {near}?" if (near := _meant(each)) else f"known are {', '.join(known)}")
        for each in unread
    ]


def _meant(name: str) -> str:
    """The variable whose name is nearest; empty if none is near."""
    near = get_close_matches(
        name.removeprefix(_PREFIX).upper(),
        [each.removeprefix(_PREFIX) for each in variables_read()],
        n=1,
    )
    return f"{_PREFIX}{near[0]}" if near else ""


def _unreadable(name: str, value: Any) -> str:
    """What is wrong with the value of a setting."""
    near = (
        get_close_matches(str(value).strip(" \"'").lower(), _MODES, n=1) if name == "mode" else ()
    )
    meant = "".join(f" (did you mean {each}?)" for each in near)
    return (
        f"{_variable(name)}={spelled(value)} cannot be read: need"
        f" {_ALLOWED.get(name, _BOOL)}{meant}"
    )


def _forbids(name: str, text: str) -> bool:
    """True if a variable that nothing reads was to say what must not be tuned."""
    if not name.startswith(_PREFIX):
        return False
    meant, value = _meant(name), text.strip(" \"'").lower()
    return meant == f"{_PREFIX}MODE" and get_close_matches(value, _MODES, n=1) not in (
        [],
        ["tune"],
    )


def _variables() -> tuple[tuple[bytes, bytes], ...]:
    """The environment as far as settings may stand in it; their case does not matter.

    As bytes, because decoding all of it takes longer.
    """
    return tuple((name, os.environb[name]) for name in os.environb if b"DIST" in name.upper())


@lru_cache(maxsize=16)
def _read(variables: tuple[tuple[bytes, bytes], ...]) -> tuple[Settings, list[str], str]:
    """Settings of an environment with these variables, which is that of the process; read once, in
    0.7 ms.

    And what is wrong with it: what costs a warning, and what leaves it open whether anything may be
    tuned.
    """
    told = unread_variables(os.fsdecode(name) for name, _ in variables)
    wrong: list[str] = []
    forbids = any(_forbids(os.fsdecode(name), os.fsdecode(text)) for name, text in variables)
    try:
        settings = Settings()
    except SettingsError as error:
        defaults = {name: Settings.model_fields[name].default for name in error.names}
        settings, wrong, forbids = (
            Settings(**defaults),
            [str(error)],
            forbids or "mode" in error.names,
        )
    if forbids and settings.mode is None:
        return settings, [], "; ".join([*wrong, *told])
    told += [f"{each}. The default is used" for each in wrong]
    return settings, told, ""


def shared_settings(settings: Settings) -> dict[str, float | bool | str]:
    """Variable -> value, of the settings that all ranks should have in common.

    Folders and the terminal may differ.
    """
    names = ("deadline_s", "always_tune", "version_check")
    return {
        f"{_PREFIX}MODE": settings.effective_mode,
        **{f"{_PREFIX}{name.upper()}": getattr(settings, name) for name in names},
    }


def _variable(name: str) -> str:
    """The name under which a setting stands in the environment."""
    ours = f"{_PREFIX}{name.upper()}"
    return ours if os.environ.get(ours) else _OTHER_NAMES.get(name, ours)


# At import, where no call waits for it; a call in a changed environment reads them again.
_read(_variables())
