"""Ranks as threads over one store in memory, each with a client of its own, at which a test may
hold it up.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist

from dist_tune.errors import DistTuneError, NoValidConfigError
from dist_tune.ranks.calls import Place
from dist_tune.ranks.meetings import Meetings
from dist_tune.ranks.messages import Reduction
from dist_tune.ranks.presence import process_name

LONG_S, LIMIT_S = 200.0, 60.0
"""A deadline that does not expire, and the time that a test gives a world, which is shorter."""
GLOO = RuntimeError(
    "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"
)
ERRORS = {"raise": ValueError("boom"), "shared": NoValidConfigError("no config"), "broken": GLOO}
DEAD = " ".join([*process_name().split(" ")[:-1], "0"])
"""A process that has ended."""
Script = list[tuple[str, str]]
"""Closure and action of each call of a rank."""
living: list[Rank] = []
"""Those of a test, which closes them."""


@Reduction
def joined(parts: Mapping[int, str]) -> list[str]:
    return [f"{rank}:{part}" for rank, part in parts.items()]


def until(found: Callable[[], object]) -> None:
    """Wait for something."""
    end = time.monotonic() + LIMIT_S
    while not found():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


class Client:
    """A client of a store: ``before`` is called with the name and the arguments of each of its
    requests.
    """

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.before: Callable[..., object] = lambda name, *args: None
        self.is_dead = False
        """From here on it has no more to say of itself."""

    def __getattr__(self, name: str) -> Any:
        if self.is_dead and name == "set":
            return self._set_of_dead
        call = getattr(self.store, name)
        return (
            call if not callable(call) else lambda *args: (self.before(name, *args), call(*args))[1]
        )

    def _set_of_dead(self, key: str, value: str) -> None:
        if not key.startswith("card/"):
            self.store.set(key, value)

    def clone(self) -> Client:
        return self


class Rank(Meetings):
    """One rank, whose collectives take all ranks that live."""

    def __init__(self, store: dist.Store, rank: int, n: int, deadline_s: float = LONG_S) -> None:
        self.client, self.count = Client(store), 0
        super().__init__(self.client, rank, tuple(range(n)), deadline_s)
        self.gather_s = LONG_S
        self.told: list[tuple[str, int, str]] = []
        """Closure, number of the call, and what came of it here."""
        self.errors: list[DistTuneError] = []
        self.calls("f")
        living.append(self)

    @property
    def n_issued(self) -> int:
        return self.count

    def run(self, script: Script) -> None:
        """Make these calls, and come to the end of the program."""
        for closure, action in script:
            if action == "die":  # answer no more, as a process of this host that was killed
                self.client.is_dead = True
                self.close()
                card = json.loads(self.client.get(f"card/{self.rank}"))
                dead = json.dumps({**card, "is_over": False, "process": DEAD})
                self.client.store.set(f"card/{self.rank}", dead)
                return
            if action in ("pass", "pass slowly"):
                if action == "pass slowly":
                    until(partial(self.client.check, ["f/n1/0/verdict"]))
                self.calls(closure).n_calls += 1
                continue
            with self.calling(closure) as place:
                self.told.append((closure, place.number, self.came(place, action)))
            self.deadline_s = LONG_S
        self.close()

    def came(self, place: Place, action: str) -> str:
        """What a call came to: the values of its meetings, or the class of its error."""
        # Others wait by then, or a test shows less.
        time.sleep(0.05 if action.startswith("late") else 0.0)
        action = action.removeprefix("late ")
        own = ERRORS.get(action)
        try:
            self.enter(place, has_raised=own is not None)
            if own is not None:
                self.abort(own)
                return type(own).__name__
            values = [
                self.reduce(
                    "other" if action == "stray" else "manifest", "x", joined, is_gathering=True
                )
            ]
            # After the first meeting, and it learns of the end between replays.
            if action == "stop":
                until(partial(self.client.check, ["f/n1/1/verdict"]))
                self.beat("replay 3")
            values.append(self.reduce("done", "y", joined))
        except DistTuneError as error:
            self.errors.append(error)
            return type(error).__name__
        except SystemExit:
            return "gone"
        return json.dumps(values)


class World:
    """The ranks of one run."""

    def __init__(self, n: int = 2, deadline_s: float = LONG_S) -> None:
        self.store = dist.HashStore()
        self.ranks = [Rank(self.store, rank, n, deadline_s) for rank in range(n)]

    def run(self, *scripts: Script) -> list[list[str]]:
        """All scripts at once; what came of the calls of each rank. Fails if one does not end."""
        threads = [
            threading.Thread(target=rank.run, args=(script,), daemon=True)
            for rank, script in zip(self.ranks, scripts, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not any(thread.is_alive() for thread in threads), scripts
        return [[told for _, _, told in rank.told] for rank in self.ranks]


def met(n: int = 2) -> str:
    """What the ranks of a call have that have met."""
    return json.dumps([[f"{rank}:{part}" for rank in range(n)] for part in "xy"])
