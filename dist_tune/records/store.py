"""Records of finished tunings on disk, one JSON file per key: find, store, list.

The only user of the cache directory, which other processes, jobs and versions of dist_tune use at
the same time. Knows keys and files; nothing of ranks. What cannot be read is a miss, what cannot be
written is tuned again, and each costs one warning.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from dist_tune.files import PRIVATE, SHARED, make_folder, read_regular, warn_once, write_whole
from dist_tune.records.journal import JOURNALS, LINES_SUFFIX, QUARANTINE, warn_not_kept
from dist_tune.records.record import (
    HARDWARE,
    SOFTWARE,
    BrokenRecordError,
    CacheKey,
    TuningRecord,
    digest,
    record_bytes,
    record_in,
)
from dist_tune.records.remote import LIMIT_S, RemoteFolder, remote_folder
from dist_tune.settings import Settings

MAX_BYTES = 16 * 2**20
"""Of a record's file; a larger one is not read. 216 candidates with all fields set take 0.2 MB."""
_PACKAGE = "package://"
_FILE = re.compile(r"[0-9a-f]{12}-[0-9a-f]{12}\.json")
_OWN_FILE = re.compile(
    rf"({JOURNALS}|{QUARANTINE})/.*{LINES_SUFFIX}|[^/]+/([0-9a-f]{{12}}(-[0-9a-f]{{12}}){{1,2}}\.json(\..*\.bak)?|.*\.tmp)"
)


class Entry(NamedTuple):
    """A record and its file."""

    path: Path
    record: TuningRecord


class Won(NamedTuple):
    """What a record says to a program that has another key."""

    cache_key: CacheKey
    config: str
    """The winner, described."""
    tuned_at: datetime


_won: dict[Path, tuple[tuple[int, int], Won | None]] = {}
"""File -> its age and size when it was read, and what it says: 60 records of 200 candidates take
0.3 s to read.
"""


class Cache:
    """Records of finished tunings in one or several folders, of which the first is written.

    Making one touches nothing.

    Only ``remove`` raises for the state of the disk; the other methods warn, and answer that there
    is nothing.
    """

    def __init__(self, folders: Path | Sequence[Path | str], *, is_shared: bool = False) -> None:
        """``is_shared``: its files are the group's as well (DIST_TUNE_CACHE_SHARED=1); otherwise
        its owner's alone.
        """
        self.remotes: list[RemoteFolder] = []
        """Behind URLs: asked where no folder has a record.

        What is found there is copied into the folder that is written.
        """
        self.is_remote = False
        """What is stored goes to the first of them as well."""
        self.folders = [
            path
            for each in ([folders] if isinstance(folders, Path) else folders)
            for path in _paths_of(str(each))
        ]
        self.folder = self.folders[0]
        """The one that is written; the others are only read."""
        self.rights = SHARED if is_shared else PRIVATE
        """Permissions of its files and folders."""
        self.unused: dict[Path, str] = {}
        """Files that were to be records, with the reason; each has been warned of."""

    @classmethod
    def of(cls, settings: Settings) -> Cache:
        """The cache that the variables name."""
        named = settings.cache_folders
        urls = [each for each in named if "://" in each and not each.startswith(_PACKAGE)]
        cache = cls([each for each in named if each not in urls], is_shared=settings.cache_shared)
        cache.remotes = [remote_folder(url, min(LIMIT_S, settings.deadline_s / 4)) for url in urls]
        cache.is_remote = settings.is_cache_remote
        return cache

    @property
    def identity(self) -> str:
        """This machine and the folder on it: processes with equal answers share files.

        Makes the folder if it can.
        """
        with suppress(OSError):
            self._make(self.folder)
            status = self.folder.stat()
            return f"{socket.gethostname()} {status.st_dev}:{status.st_ino}"
        return f"{socket.gethostname()} process {os.getpid()}"

    def path_of(self, key: CacheKey) -> Path:
        """Path at which a record of this key is stored: "<name>/<all of the key>-<code, tuning key
        and hardware>.json".
        """
        return self.folder / _place_of(key)

    def find(self, key: CacheKey, *, any_software: bool = False) -> TuningRecord | None:
        """The record of this key in the first folder that has one, those behind URLs last, or None.

        With ``any_software``, failing that, the newest one that differs in versions of torch,
        triton or CUDA alone.
        """
        found = (
            record
            for folder in self.folders
            if (record := self._read(folder / _place_of(key))) is not None
        )
        return (
            next(found, None)
            or self._fetched(key)
            or (next(iter(self._alike(key, SOFTWARE)), None) if any_software else None)
        )

    def siblings(self, key: CacheKey) -> list[TuningRecord]:
        """Records of keys that differ from this one in the candidates alone, newest first."""
        return self._alike(key, ("candidates",))

    def of_name(self, name: str) -> list[TuningRecord]:
        """All records of this kernel or function, newest first."""
        return _newest_first(
            entry.record
            for entry in self._entries(_folder_name(name))
            if entry.record.kernel == name
        )

    def winners(self, name: str) -> list[Won]:
        """What all records of this kernel or function say; each file is read once as long as it
        stays what it is.
        """
        for path in (paths := self._files(_folder_name(name))):
            with suppress(OSError):  # deleted since
                stamp = (status := path.stat()).st_mtime_ns, status.st_size
                if _won.get(path, ((), None))[0] != stamp:
                    record = self._read(path)
                    _won[path] = (
                        stamp,
                        (
                            None
                            if record is None
                            else Won(record.cache_key, record.best.config, record.tuned_at)
                        ),
                    )
        return [
            won
            for path in paths
            if path in _won and (won := _won[path][1]) is not None and won.cache_key.name == name
        ]

    def entries(self) -> list[Entry]:
        """All records, sorted by name and key."""
        return sorted(
            self._entries(), key=lambda entry: (entry.record.kernel, entry.record.key, entry.path)
        )

    def own_files(self) -> list[Path]:
        """Files that this package has put into the folder that is written; the user's files beside
        them are not among these.
        """
        found = [
            each
            for each in self.folder.glob("*/*")
            if _OWN_FILE.fullmatch("/".join(each.parts[-2:]))
        ]
        return sorted(
            each
            for each in found
            if not each.parent.is_symlink() and (each.is_symlink() or not each.is_dir())
        )

    def store(self, record: TuningRecord, *, is_copy: bool = False) -> Path | None:
        """Put a record in the place of the one on disk, and unless it ``is_copy`` behind the URL;
        the path of its file.

        None if that could not be written. Of two processes that store a record of one key, the
        later one's stays. A file that was found to hold no record of this version stays beside it,
        as a copy.
        """
        path = self.path_of(record.cache_key)
        try:
            content = record_bytes(record) + b"\n"
            if self.is_remote and not is_copy:
                self.remotes[0].write(_place_of(record.cache_key), content)
            self._make(path.parent)
            write_whole(path, content, self.rights, keeps_old=path in self.unused)
        except BrokenRecordError as error:
            told = (
                f"the tuning of {record.kernel[:100]} for {record.key[:100]} is not kept and will"
                f" be repeated: {error}"
            )
            warn_once(told, topic=f"not kept: {record.kernel}")
            return None
        except OSError as error:
            warn_not_kept(path, error)
            return None
        return path

    def remove(self, path: Path) -> None:
        """Delete a file of the folder that is written, if it is there.

        Raises:
            ValueError: it does not lie in that folder.
            OSError: it is a folder, or the system refuses.
        """
        if (
            Path(os.path.realpath(self.folder))
            not in (Path(os.path.realpath(path.parent)) / path.name).parents
        ):
            raise ValueError(f"{path} is not in the cache folder {self.folder}")
        path.unlink(missing_ok=True)

    def _make(self, folder: Path) -> None:
        if str(self.folder).startswith("~"):
            raise FileNotFoundError(errno.ENOENT, "there is no home directory", str(self.folder))
        make_folder(folder, self.rights)

    def _read(self, path: Path) -> TuningRecord | None:
        """The record at this path, or None; a file that holds no record of its name is warned of,
        and left where it is.
        """
        try:
            return _checked(read_regular(path, MAX_BYTES), "/".join(path.parts[-2:]))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, BrokenRecordError) as error:
            self.unused[path] = _tell_unused(str(path), error)
            return None

    def _fetched(self, key: CacheKey) -> TuningRecord | None:
        """The record of this key behind the first URL that has one, which is then here, too."""
        for remote in self.remotes:
            try:
                if (content := remote.read(_place_of(key), MAX_BYTES)) is not None:
                    record = _checked(content, _place_of(key))
                    self.store(record, is_copy=True)
                    return record
            except BrokenRecordError as error:
                _tell_unused(f"{remote.url}/{_place_of(key)}", error)
        return None

    def _alike(self, key: CacheKey, fields: Sequence[str]) -> list[TuningRecord]:
        """Records whose keys differ from this one, and in no other fields than these, of software
        and candidates; newest first.
        """
        folder, end = Path(_place_of(key)).parts[0], _place_of(key).rpartition("-")[2]
        others = dict.fromkeys(fields, "")
        alike = key.model_copy(update=others)
        records = [entry.record for entry in self._entries(folder, end)]
        return _newest_first(
            record
            for record in records
            if record.cache_key != key and record.cache_key.model_copy(update=others) == alike
        )

    def _files(self, name: str = "*", end: str = "") -> list[Path]:
        """Files of records in subfolders of this name that end so; of several with one name that of
        the first folder.
        """
        paths: dict[tuple[str, ...], Path] = {}
        for folder in self.folders:
            with suppress(OSError):  # no folder can have its name, or be where it is
                for path in sorted(folder.glob(f"{name}/*{end}")):
                    if _FILE.fullmatch(path.name):
                        paths.setdefault(path.parts[-2:], path)
        return [*paths.values()]

    def _entries(self, name: str = "*", end: str = "") -> list[Entry]:
        return [
            Entry(path, record)
            for path in self._files(name, end)
            if (record := self._read(path)) is not None
        ]


def _checked(content: bytes, place: str) -> TuningRecord:
    """The record in the content of the file at this place.

    BrokenRecordError if it has none, or that of another key.
    """
    record = record_in(content)
    if place != _place_of(record.cache_key):
        raise BrokenRecordError(
            f"it is the record of another key, {record.kernel[:80]!r} for {record.key[:80]!r}"
        )
    return record


def _tell_unused(file: str, error: Exception) -> str:
    """The reason why a file is no record, of which it warns."""
    reason = str(getattr(error, "strerror", None) or error)
    told = (
        f"cache file {file} is not used: {reason}. A new tuning takes its place and keeps it as"
        " *.bak, or delete it"
    )
    warn_once(told, topic=f"unused {file}")
    return reason


@lru_cache(maxsize=256)
def _place_of(key: CacheKey) -> str:
    """Subfolder and file of a key, which are asked for as often as a record is read."""
    what = [key.name, key.source, key.key, *(str(getattr(key, field)) for field in HARDWARE)]
    return (
        f"{_folder_name(key.name)}/{digest([key.model_dump_json()])[:12]}-{digest(what)[:12]}.json"
    )


def _folder_name(name: str) -> str:
    """A name with what may not stand in a folder's replaced; two names may share a folder."""
    return re.sub(r"[^A-Za-z0-9._-]|^[.-]", "_", name)[:100] or "_"


def _paths_of(name: str) -> list[Path]:
    """The folder wherever the program changes its own to; one of an unknown user's home stays, and
    cannot be made.

    Of ``package://name/folder`` those where the package has its files; it is not imported, because
    nothing that is read is executed.
    """
    if not name.startswith(_PACKAGE):
        folder = Path(os.path.expanduser(name))
        return [folder if str(folder).startswith("~") else folder.absolute()]
    package, _, folder_in_it = name.removeprefix(_PACKAGE).partition("/")
    spec = None
    with suppress(ValueError):  # a module that says nothing of its origin
        spec = find_spec(package) if package.isidentifier() else None
    places = (spec and spec.submodule_search_locations) or ()
    found = [path for place in places if (path := Path(place, folder_in_it).absolute()).is_dir()]
    if not found:
        lacking = (
            f"no package {package} is installed here. Install it"
            if package
            else "it names no package. Name one"
        )
        lacking = (
            f"package {package} has no folder {folder_in_it}. Name another" if places else lacking
        )
        warn_once(f"{name} in DIST_TUNE_CACHE_PATH is left out: {lacking}, or take it out")
    return found


def _newest_first(records: Iterable[TuningRecord]) -> list[TuningRecord]:
    return sorted(records, key=lambda record: record.tuned_at, reverse=True)
