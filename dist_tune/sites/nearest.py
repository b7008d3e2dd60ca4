"""The config of the nearest shape, where nothing is to be tuned.

Knows the cache and how ranks agree on one answer; an explicit option, reported where it is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING

from dist_tune.cache import Cache, CacheKey, TuningRecord, digest, environment, nearest_shape
from dist_tune.configs import FunctionConfig
from dist_tune.distributed import Ranks, Reduction, ranks_of
from dist_tune.files import callers_level
from dist_tune.runtime import FunctionLaunch, interception
from dist_tune.settings import Settings, read_settings
from dist_tune.sites.exclusive import one_at_a_time

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class NearestConfigs:
    """Configs of other shapes, for keys of one function where nothing is to be tuned; each is looked up once."""

    def __init__(self) -> None:
        self._borrowed: dict[Hashable, FunctionConfig] = {}

    def config(self, launch: FunctionLaunch, slot_key: Hashable, group: ProcessGroup | None, otherwise: FunctionConfig) -> FunctionConfig:
        """The config for a launch without a known one. Collective as ``nearest_config``, in the first call of a key."""
        if slot_key not in self._borrowed:
            if interception.is_listening():  # inside a closure ranks do not talk
                return otherwise
            settings = read_settings()
            self._borrowed[slot_key] = nearest_config(launch, ranks_of(group, settings.deadline_s), settings, otherwise)
        return self._borrowed[slot_key]


def nearest_config(launch: FunctionLaunch, ranks: Ranks, settings: Settings, otherwise: FunctionConfig) -> FunctionConfig:
    """The config that the cache has for this very key, or for the nearest one; ``otherwise`` if there is none. Collective.

    The first rank that has a record decides for all whose candidates are the same.

    Raises:
        DistTuneError: other ranks did not come, or raised.
        Exception: what the user's prune_fn raises on this rank; the other ranks hear of it.
    """
    configs: list[FunctionConfig] = []
    texts: list[str] = []

    def mine() -> tuple[str, str, str]:
        configs[:] = launch.candidates()
        texts[:] = [launch.describe(config) for config in configs]
        record = _nearest_record(launch, texts, ranks, settings)
        return (digest(texts), record.key, record.best.config) if record is not None else (digest(texts), "", "")

    with one_at_a_time(launch.name, settings.deadline_s), ranks.short_timeouts():
        _, key, winner = ranks.agree(f"{launch.name} (nearest shape)", "nearest shape", mine, _first_found)
    if winner not in texts:
        return otherwise
    if key != launch.key_text and ranks.is_first:
        warnings.warn(
            f"{launch.name} has not been tuned for {launch.key_text}: it uses the config of {key}, {winner}, because autotune=False",
            stacklevel=callers_level(),
        )
    return configs[texts.index(winner)]


def _nearest_record(launch: FunctionLaunch, texts: list[str], ranks: Ranks, settings: Settings) -> TuningRecord | None:
    cache = Cache(settings.cache_folders, is_shared=settings.cache_shared)
    here = environment(len(ranks.members), ranks.neighbours[1])
    key = CacheKey(name=launch.name, source=launch.code().digest, key=launch.key_text, candidates=digest(texts), **here.keyed)
    return cache.find(key, any_software=not settings.version_check) or nearest_shape(key, cache.of_name(launch.name))


@Reduction
def _first_found(parts: Mapping[int, tuple[str, str, str]]) -> tuple[str, str, str]:
    """Digest of the candidates, key and config of the first rank that has one."""
    found = list(parts.values())
    # Where candidates differ a config of one rank may not be one of another.
    if len({candidates for candidates, _, _ in found}) > 1:
        return "", "", ""
    return next((each for each in found if each[2]), found[0])
