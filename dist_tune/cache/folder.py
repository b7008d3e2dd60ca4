"""Records of finished tunings in a directory, one file per key: find, store, merge, list.

The only user of that directory, which other processes, jobs and versions of dist_tune use at the same time. Knows keys and files;
nothing of ranks, and nothing of the bytes of a file. A failure of the disk costs a warning, and the tuning is repeated.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import socket
import uuid
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dist_tune.cache.files import LOCK_NAME, locked, sweep, write_whole
from dist_tune.cache.record_file import BrokenRecordError, UnreadableRecordError, read_record, seal
from dist_tune.cache.records import HARDWARE, SCHEMA_VERSION, SOFTWARE, CacheKey, TuningRecord
from dist_tune.safe_files import PRIVATE, SHARED, make_folder, warn_of_folder
from dist_tune.warn_once import callers_level

BROKEN_SUFFIX = ".broken"
LOCKS = "locks"
"""Subfolder for the locks of files outside the cache."""
MAX_NAME = 100
_FILE = re.compile(r"[0-9a-f]{12}-[0-9a-f]{12}-[0-9a-f]{12}\.json")
_PLAIN_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}")


@dataclass(frozen=True, slots=True)
class Entry:
    """A record and its file."""

    path: Path
    record: TuningRecord


class Cache:
    """Records of finished tunings in a directory, one JSON file per key. Making one touches nothing.

    Only ``remove`` raises for the state of the disk; the other methods warn, and answer that there is nothing.
    """

    def __init__(self, folder: Path, *, is_shared: bool = False) -> None:
        """``is_shared``: its files are the group's as well (DIST_TUNE_CACHE_SHARED=1); otherwise its owner's alone."""
        # Without a home the ~ stays, and _make refuses it. Absolute, because the program may change its working directory.
        with suppress(RuntimeError, OSError):
            folder = folder.expanduser().absolute()
        self.folder = folder
        self.rights = SHARED if is_shared else PRIVATE
        """Permissions of its files and folders."""
        self._is_shared = is_shared
        self._is_looked_at = False
        self.unused: dict[Path, str] = {}
        """Files that were to be records, and folders that cannot be read, with the reason; each has been warned of."""

    @property
    def identity(self) -> str:
        """This machine and the folder on it: processes with equal answers share files. Makes the folder if it can."""
        with suppress(OSError):
            self._make(self.folder)
        with suppress(OSError):
            status = self.folder.stat()
            return f"{socket.gethostname()} {status.st_dev}:{status.st_ino}"
        return f"{socket.gethostname()} process {os.getpid()}"

    def path_of(self, key: CacheKey) -> Path:
        """Path of the record of this key: "<name>/<code, key and hardware>-<software>-<candidates>.json" in the folder."""
        return self.folder.joinpath(*_place_of(key, SCHEMA_VERSION))

    def names_beside(self, path: Path) -> set[str]:
        """Names of the records of a record's kernel, without their ending; none where they cannot be listed."""
        with suppress(OSError):
            return {name.removesuffix(".json") for name in os.listdir(path.parent) if _FILE.fullmatch(name)}
        return set()

    def find(self, key: CacheKey, *, any_software: bool = False) -> TuningRecord | None:
        """The record of this key, or None.

        With ``any_software``, failing that, the newest one that differs in versions of Python, torch, triton or CUDA alone.
        """
        path = self.path_of(key)
        record = self._read(path)
        if record is not None and record.cache_key == key:
            return record
        if not any_software:
            return None
        what, _, candidates = path.stem.split("-")
        records = self._read_all(path.parent, re.compile(f"{what}-.*-{candidates}.json"))
        return next((each for each in records if _less_software(each.cache_key) == _less_software(key)), None)

    def siblings(self, key: CacheKey) -> list[TuningRecord]:
        """Records of keys that differ from this one in the candidates alone, newest first."""
        path = self.path_of(key)
        what, software, _ = path.stem.split("-")
        records = [(each, each.cache_key) for each in self._read_all(path.parent, re.compile(f"{what}-{software}-.*"))]
        return [each for each, other in records if other != key and other.model_copy(update={"candidates": key.candidates}) == key]

    def of_name(self, name: str) -> list[TuningRecord]:
        """All records of this kernel or function, newest first. Leaves broken files where they are."""
        records = [entry.record for entry in self._listed(self.folder / _folder_name(name))]
        return _newest_first(each for each in records if each.kernel == name)

    def entries(self) -> list[Entry]:
        """All records, sorted by name and key. Leaves broken files where they are."""
        found = [entry for name in self._names(self.folder) for entry in self._listed(self.folder / name)]
        return sorted(found, key=lambda entry: (entry.record.kernel, entry.record.key, entry.path))

    def store(self, record: TuningRecord, *, is_import: bool = False) -> Path | None:
        """Keep the better one of this record and the one on disk; the path of its file, None if it could not be written.

        A record that was written while this one was being tuned stays if it has more timed replays; an older one is replaced,
        and so is one dated in the future.
        With ``is_import`` the one with more timed replays stays, whenever it was written.
        """
        path = self.path_of(record.cache_key)
        try:
            content = seal(record)
            self._make(path.parent)
            with self._locked(path.parent):
                present = self._read(path, is_locked=True)
                if present is None or _replaces(record, present, is_import):
                    write_whole(path, content, self.rights)
                    with suppress(OSError):  # removed already
                        # Dated by the file server as all of them are, so clocks need not agree.
                        sweep(path.parent, path.stat().st_mtime)
        except (OSError, BrokenRecordError) as error:
            warnings.warn(
                f"the tuning of {record.kernel[:100]} for {record.key[:100]} is not kept and will be repeated: "
                f"{path} cannot be written: {error}. DIST_TUNE_CACHE_DIR names another folder.",
                stacklevel=callers_level(),
            )
            return None
        return path

    @contextmanager
    def locked(self, target: Path) -> Iterator[None]:
        """Hold the lock of a file outside the cache. It lies in the cache folder, because the folder of ``target`` may be shipped.

        If that cannot be written, go on without, as ``dist_tune.cache.files.locked`` does.
        """
        with ExitStack() as stack:
            with suppress(OSError):
                self._make(self.folder / LOCKS)
                stack.enter_context(locked(self.folder / LOCKS, f"{_digest(str(target))}{LOCK_NAME}", self.rights))
            yield

    def remove(self, path: Path) -> None:
        """Delete a file of the cache, if it is there.

        Raises:
            ValueError: it does not lie in the cache folder.
            OSError: it is a folder, or the system refuses.
        """
        if Path(os.path.realpath(self.folder)) not in (Path(os.path.realpath(path.parent)) / path.name).parents:
            raise ValueError(f"{path} is not in the cache folder {self.folder}")
        path.unlink(missing_ok=True)

    def _make(self, folder: Path) -> None:
        if str(self.folder).startswith("~"):
            raise FileNotFoundError(errno.ENOENT, "there is no home directory", str(self.folder))
        make_folder(folder, self.rights)
        self._look_at()

    def _locked(self, folder: Path) -> AbstractContextManager[None]:
        return locked(folder, rights=SHARED) if self._is_shared else locked(folder)

    def _look_at(self) -> None:
        """Tell, once, that others can write the folder."""
        if not self._is_looked_at:
            self._is_looked_at = True
            warn_of_folder(self.folder, "DIST_TUNE_CACHE_DIR", is_shared=self._is_shared)

    def _read(self, path: Path, *, is_locked: bool = False) -> TuningRecord | None:
        """The record at this path, or None. A broken file is set aside, under the lock of its folder."""
        try:
            return self._checked(path)
        except FileNotFoundError:
            return None
        except BrokenRecordError as error:
            if not is_locked:
                # Again, because another process may be putting a good one in its place.
                with self._locked(path.parent):
                    return self._read(path, is_locked=True)
            self._set_aside(path, error)
            return None

    def _read_all(self, folder: Path, names: re.Pattern[str]) -> list[TuningRecord]:
        found = [self._read(folder / name) for name in self._names(folder) if _FILE.fullmatch(name) and names.fullmatch(name)]
        return _newest_first(record for record in found if record is not None)

    def _checked(self, path: Path) -> TuningRecord:
        if os.path.islink(path) and Path(os.path.realpath(self.folder)) not in Path(os.path.realpath(path)).parents:
            raise BrokenRecordError("it is a link that leads out of the cache folder")
        record = read_record(path)
        self._look_at()
        if self.path_of(record.cache_key) != path:
            raise BrokenRecordError(f"it is the record of another key, {record.kernel[:80]!r} for {record.key[:80]!r}")
        return record

    def _set_aside(self, path: Path, error: BrokenRecordError) -> None:
        if isinstance(error, UnreadableRecordError):
            self._warn(path, f"{error}. What it may hold is tuned again")
            return
        aside = path.with_name(path.name + BROKEN_SUFFIX)
        try:
            if aside.is_dir() or path.is_dir():  # a folder is not overwritten, and overwrites nothing
                aside = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}{BROKEN_SUFFIX}")
            os.replace(path, aside)
        except OSError as refusal:
            self._warn(path, f"{error}. It cannot be set aside ({refusal.strerror}); what it was for is tuned again")
            return
        told = f"cache file {path} is not used: {error}. It is now {aside.name}, and what it was for is tuned again"
        warnings.warn(told, stacklevel=callers_level())

    def _warn(self, path: Path, reason: str) -> None:
        if path not in self.unused:
            self.unused[path] = reason
            warnings.warn(f"cache file {path} is not used: {reason}", stacklevel=callers_level())

    def _listed(self, folder: Path) -> Iterator[Entry]:
        for path in [folder / name for name in self._names(folder) if _FILE.fullmatch(name)]:
            try:
                yield Entry(path, self._checked(path))
            except FileNotFoundError:  # removed meanwhile
                continue
            except BrokenRecordError as error:
                self._warn(path, str(error))

    def _names(self, folder: Path) -> list[str]:
        try:
            return sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self._warn(folder, str(error.strerror))
            return []


def _digest(*values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12]


@lru_cache(maxsize=256)
def _place_of(key: CacheKey, schema: int) -> tuple[str, str]:
    """Names of the subfolder and the file of a key, which are asked for as often as a record is read."""
    env = key.environment
    what = _digest(schema, key.name, key.source, key.key, *(getattr(env, field) for field in HARDWARE))
    software = _digest(*(getattr(env, field) for field in SOFTWARE))
    return _folder_name(key.name), f"{what}-{software}-{_digest(key.candidates)}.json"


def _folder_name(name: str) -> str:
    """The name itself if it can be a folder's; otherwise its allowed characters and a digest, so that two names stay apart."""
    if _PLAIN_NAME.fullmatch(name):
        return name
    digest = _digest(name)
    kept = re.sub(r"[^A-Za-z0-9._-]", "_", name[:MAX_NAME])
    return f"{re.sub('^[.-]', '_', kept)[: MAX_NAME - len(digest) - 1]}-{digest}".removeprefix("-")


def _less_software(key: CacheKey) -> CacheKey:
    return key.model_copy(update={"environment": key.environment.model_copy(update=dict.fromkeys(SOFTWARE, ""))})


def _newest_first(records: Iterable[TuningRecord]) -> list[TuningRecord]:
    return sorted(records, key=lambda record: record.recency, reverse=True)


def _replaces(record: TuningRecord, present: TuningRecord, is_import: bool) -> bool:
    # As numbers, because dates end with the year 9999, and ``seconds`` in a file may be anything.
    is_older = present.tuned_at.timestamp() <= record.tuned_at.timestamp() - record.seconds or present.recency[0] < record.recency[0]
    return (is_older and not is_import) or (record.n_samples, record.recency) > (present.n_samples, present.recency)
