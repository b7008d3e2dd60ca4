"""Two jobs of two ranks that share a folder and miss the same record: one tunes, and the other waits for what it finds."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import autotune, contextual_autotune
from dist_tune.testing import Outcome, values
from dist_tune.tuning import discover
from tests.steps import autotuned, launch
from tests.worlds import on_ranks

pytestmark = pytest.mark.processes

LIMIT_S = 60.0
WAITS = "is tuning the same; this one waits for its records"


def awaited(is_so: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < ends_at
        time.sleep(0.01)


def job(rank: int, folder: Path, until: str, is_killed: bool, max_wait: float, form: str) -> dict[str, Any]:
    """Tune a step. The first rank stops in the midst of the race ``until`` the other job waits or has ended, and may be killed then."""
    kernel, runs, total, is_online = autotuned(), list[int](), torch.zeros(1), form == "online"
    plan = SimpleNamespace(until=until, is_killed=is_killed)  # an object's values are not in the key of a function
    discover._MAX_WAIT = max_wait  # type: ignore[assignment]
    stops: dict[str, Callable[[], bool]] = {
        "waits": lambda: WAITS in (folder / "second/rank-0.log").read_text(),
        "ends": (folder / "ended").exists,
    }

    def is_racing() -> bool:
        return len(runs) >= 4 and (not is_online or "searches in" in (folder / "first/rank-0.log").read_text())

    def step(x: torch.Tensor, total: torch.Tensor, BLOCK: int = 0) -> torch.Tensor:
        runs.append(1)
        time.sleep(0.05 * is_online)
        if rank == 0 and plan.until and not (folder / "racing").exists() and is_racing():
            (folder / "racing").touch()
            awaited((folder / "second/rank-0.log").exists)
            awaited(stops[plan.until])
            if plan.is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
        y = x + 1 if form == "function" else launch(kernel, x)
        total.add_(is_online)
        dist.all_reduce(y)
        return y

    options: Any = {"search": "exhaustive", "n_repeat": 2, "n_warmup": 0}
    if form == "function":
        tuned: Any = autotune([{"BLOCK": block} for block in (16, 32, 64)], lambda x, _: x.numel(), **options)(step)
    else:
        tuned = contextual_autotune(is_dist=True, **options)(step)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        value, *_ = [tuned(torch.zeros(64), total)[0].item() for _ in range(1 + 19 * is_online)]
    dist.barrier()
    (folder / "ended").touch()
    done = {"found": [each.is_recalled for each in tuned.records], "best": [each.best.config for each in tuned.records]}
    return {**done, "value": value, "runs": len(runs), "warned": [str(each.message) for each in warned]}


def both(
    folder: Path, until: str, *, is_killed: bool = False, max_wait: float = 10.0, form: str = "kernel", **second: str
) -> tuple[list[Outcome], list[Outcome]]:
    """The second job starts when the first one is in its race, with variables of its own. An online one has 20 calls."""
    env = {"DIST_TUNE_CACHE_DIR": str(folder / "cache"), "DIST_TUNE_DEADLINE_S": "20"}
    envs = [{**env, "DIST_TUNE_LOG_DIR": str(folder / name)} for name in ("first", "second")]
    with ThreadPoolExecutor(1) as pool:
        one = pool.submit(lambda: on_ranks(2, job, folder, until, is_killed, max_wait, form, env=envs[0]))
        awaited((folder / "racing").exists)
        two = on_ranks(2, job, folder, "", False, max_wait, form, env=envs[1] | second)
        return one.result(), two


@pytest.mark.parametrize("form", ["kernel", "function"])
def test_a_second_job_waits_and_hits(tmp_path: Path, form: str):
    """Its ranks run the step once, and take the record; none warns."""
    first, second = (values(each) for each in both(tmp_path, "waits", form=form))
    assert [each["found"] for each in first + second] == [[False]] * 2 + [[True]] * 2
    assert len({str(each["best"]) for each in first + second}) == 1
    assert [(each["runs"], each["value"], each["warned"]) for each in second] == [(1, 2.0, [])] * 2
    assert list((tmp_path / "cache/journals").iterdir()) == []


def test_a_second_job_tunes_if_the_first_one_is_killed(tmp_path: Path):
    """As soon as the process is gone, from the times in the journal that it leaves; what it had is the second job's then."""
    first, second = both(tmp_path, "waits", is_killed=True)
    assert first[0].error == "Died"
    assert [(each["found"], each["value"]) for each in values(second)] == [([False], 2.0)] * 2
    assert "is tuned: There is no record of" in second[0].log
    assert all(each.seconds < LIMIT_S / 2 for each in second)


@pytest.mark.parametrize("how", ["too long", "asked to tune"])
def test_a_second_job_does_not_wait_for_ever(tmp_path: Path, how: str):
    """After a time it tunes without a journal, of which it warns; with DIST_TUNE_ALWAYS_TUNE=1 at once."""
    settings: Any = {"DIST_TUNE_ALWAYS_TUNE": "1"} if how == "asked to tune" else {}
    first, second = both(tmp_path, "ends", max_wait=0.1, **settings)
    assert [each["found"] for each in values(first) + values(second)] == [[False]] * 4
    assert (WAITS in second[0].log) == (how == "too long")
    assert ["tuning goes on without its journal: another process is tuning the same" in each for each in second[0].value["warned"]] == [
        True
    ]


def test_a_step_that_may_not_be_replayed_does_not_wait(tmp_path: Path):
    """It is tuned in its calls, which may take hours in the first job."""
    first, second = both(tmp_path, "ends", form="online")
    assert [each["value"] for each in values(first) + values(second)] == [2.0] * 4
    assert WAITS not in second[0].log
    assert "tuned in the calls to come" in second[0].log
