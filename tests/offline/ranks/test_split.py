"""Problems shared out over ranks, and tuned together: real processes, ranks that die or disagree,
runs that communicate, full disks.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import DistTuneError, NoValidConfigError, PeerFailedError, RankMismatchError
from dist_tune.offline import load_config, tune_and_save_configs, tune_kernel
from dist_tune.testing import values
from tests.worlds import DEADLINE_S, on_each_rank, on_ranks

SPACE = [{"i": i, "waves_per_eu": 2} for i in range(4)]


def tuned(folder: str, sizes: Sequence[int], killed: int = -1) -> dict[str, int]:
    """Size -> its best config, which is the size modulo 4; writes down who has run what.

    Rank ``killed`` is killed by its run of config 2.
    """

    def make_for_size(size: int) -> Any:
        def make(config: dict[str, Any]) -> Any:
            i = config["i"]

            def run() -> torch.Tensor:
                with open(f"{folder}/{size}.runs", "a") as file:
                    file.write(f"{os.environ['RANK']} {i}\n")
                is_victim = killed == int(os.environ["RANK"])
                if is_victim and i == 2 and not os.path.exists(f"{folder}/again"):
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.01 * (1 + abs(i - size % 4)))
                # Nothing is right for a negative size.
                return torch.ones(4) * (2 if size < 0 else 1)

            return run, torch.ones(4)

        return make

    found = tune_and_save_configs(
        sizes, make_for_size, SPACE, "k.json", folder, classes=str, num_iters=3
    )
    return {size: config["i"] for size, config in found.items()}


def shared_folder() -> str:
    """Of all ranks in this body."""
    folder = Path(os.environ["DIST_TUNE_CACHE_DIR"]).parent
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def ran(folder: Path, size: int) -> set[tuple[int, int]]:
    """(rank, i) of all runs of a size."""
    lines = (folder / f"{size}.runs").read_text().split("\n")[:-1]
    return {(int(rank), int(i)) for rank, i in (line.split() for line in lines)}


def _own_share(rank: int, folder: str, killed: int = -1) -> Any:
    torch.manual_seed(rank)
    return tuned(folder, range(6), killed)


BEST = {str(size): size % 4 for size in range(6)}


def test_each_size_is_tuned_by_one_rank(tmp_path: Path):
    """All ranks learn all results, and share the work."""
    got = values(on_ranks(3, _own_share, str(tmp_path)))
    assert got == [BEST] * 3
    owners = [{rank for rank, _ in ran(tmp_path, size)} for size in range(6)]
    assert all(len(ran(tmp_path, size)) == 4 for size in range(6))
    assert ([len(each) for each in owners], len(set.union(*owners))) == ([1] * 6, 3)


@pytest.mark.parametrize("killed", [0, 1])
def test_one_rank_is_killed_and_the_others_go_on_with_the_rest(tmp_path: Path, killed: int):
    """They end with an error that names it; started again, the job tunes what is missing, and
    nothing else but the winners' checks.
    """
    env = {"DIST_TUNE_CACHE_DIR": str(tmp_path / "cache")}
    outcomes = on_ranks(3, _own_share, str(tmp_path), killed, env=env)
    assert outcomes.pop(killed).error == "Died"
    for each in outcomes:
        assert (each.error, f"rank {killed}" in each.message) == ("AbsentRanksError", True), (
            each.message
        )
    (lost,) = [size for size in range(6) if {rank for rank, _ in ran(tmp_path, size)} == {killed}]
    for path in tmp_path.glob("*.runs"):
        path.unlink()
    (tmp_path / "again").touch()
    assert values(on_ranks(3, _own_share, str(tmp_path), killed, env=env)) == [BEST] * 3
    assert [len(ran(tmp_path, size)) for size in range(6)] == [
        4 if size == lost else 1 for size in range(6)
    ]


def _dies(rank: int, turn: str) -> Any:
    """Configs that were run, where the rank whose turn it is does not die."""
    ran = set[int]()

    def make(config: dict[str, Any]) -> Any:
        def run() -> int:
            ran.add(config["i"])
            if config["i"] == 2 and os.environ["DIES"] == "True":
                os._exit(7)
            return 1

        return run, 1

    # A captured value would make it another problem.
    os.environ["DIES"] = str(turn == str(rank))
    tune_kernel(SPACE, make, num_iters=1)
    return sorted(ran)


def test_deaths_of_any_rank_put_a_config_into_quarantine(tmp_path: Path):
    """Two are enough, of whichever ranks: those of the first rank alone were counted."""
    env = {"DIST_TUNE_CACHE_DIR": str(tmp_path)}
    for turn in (0, 1):
        assert on_ranks(2, _dies, str(turn), env=env)[turn].error == "Died"
    assert values(on_ranks(2, _dies, "", env=env)) == [[0, 1, 3]] * 2
    assert not list((tmp_path / "journals").iterdir())


# -- runs that communicate -------------------------------------------------------------------------


def _all_reduce(rank: int, folder: str, mode: Any, from_config: int) -> Any:
    def make(config: dict[str, Any]) -> Any:
        def run() -> torch.Tensor:
            total = torch.ones(4)
            time.sleep(config["ms"] * 5e-3 * (1 + 3 * (rank == config["slow"])))
            if config["ms"] >= from_config:
                dist.all_reduce(total)
            return total

        return run, torch.full((4,), 2.0)

    space = [{"ms": ms, "slow": slow} for ms, slow in ((3, 0), (4, -1), (3, 1))]
    found = tune_and_save_configs(
        [1, 2], lambda size: make, space, "k.json", folder, classes=str, mode=mode, num_iters=3
    )
    return [space.index(config) for config in found.values()]


@pytest.mark.parametrize(("kind", "from_config"), [("fake", 0), ("interpret", 0), ("interpret", 4)])
def test_sharing_out_what_communicates_is_refused(tmp_path: Path, kind: Any, from_config: int):
    """On all ranks, in time, before the collective is made, with the reason; also where one config
    alone does.
    """
    outcomes = on_ranks(
        2,
        _all_reduce,
        str(tmp_path),
        "split",
        from_config,
        mode=kind,
        env={"TRITON_INTERPRET": str(int(kind != "fake"))},
    )
    assert (
        {"CommunicatesError"}
        <= {each.error for each in outcomes}
        <= {"CommunicatesError", "PeerFailedError"}
    )
    for each in outcomes:
        assert (
            'mode="merge"' in each.message,
            "allreduce" in each.message,
            each.seconds < 3 * DEADLINE_S,
        ) == (True, True, True)


@on_each_rank()
def test_what_all_ranks_tune_together_is_decided_by_the_slowest_rank(rank: int):
    """Config 0 is fastest on rank 0 only; one rank's failures drop a config on both, and runs may
    communicate.
    """

    def make(config: dict[str, Any]) -> Any:
        if config["i"] == 3 and rank == 1:
            raise ValueError("not on this rank")
        ms = [[2, 3, 6, 1], [6, 3, 2, 1]][rank][config["i"]]
        return (lambda: time.sleep(ms * 5e-3)), None

    assert tune_kernel(SPACE, make, num_iters=3)["i"] == 1
    assert _all_reduce(rank, shared_folder(), "merge", 0) == [1, 1]


@on_each_rank()
def test_a_winner_that_turns_wrong_on_one_rank_is_out_on_both(rank: int):
    """The fastest is wrong on rank 1 from its ninth run on, in runs that communicate; the next best
    is taken, or there is none.
    """

    def make(config: dict[str, Any]) -> Any:
        runs = count(1)

        def run() -> torch.Tensor:
            total = torch.ones(4)
            time.sleep(5e-3 * (1 + config["i"]))
            dist.all_reduce(total)
            return total * (2 if rank == 1 and config["i"] == 0 and next(runs) > 8 else 1)

        return run, torch.full((4,), 2.0)

    assert tune_kernel(SPACE[:2], make, num_iters=10) == SPACE[1]
    with pytest.raises(NoValidConfigError, match="rank 1: the result is wrong: wrong by 2"):
        tune_kernel(SPACE[:1], make, num_iters=10)


# -- files, and what goes wrong --------------------------------------------------------------------


def _count(size: int, folder: str) -> Any:
    def make(config: dict[str, Any]) -> Any:
        (Path(folder) / f"made-{size}-{config['i']}").touch()
        return (lambda: None), None

    return make


def _files(rank: int, folder: str, mode: Any, is_full: bool) -> Any:
    def refused(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if is_full:
            patch.setattr("dist_tune.offline.config_files.write_whole", refused)
        found = tune_and_save_configs(
            (16, 4096, 17, 4097),
            lambda size: _count(size, folder),
            SPACE,
            lambda size: f"k{size % 2}.json",
            folder,
            mode=mode,
            num_iters=1,
        )
    assert load_config(f"{folder}/k1.json", 600)["i"] == found["k1.json"]["large"]["i"]
    return found


@pytest.mark.parametrize("mode", ["split", "merge"])
def test_what_was_not_saved_is_not_measured_again(tmp_path: Path, mode: str):
    """A full disk is told to all ranks.

    When there is room the next attempt writes the files, which all ranks read when they return.
    """
    env = {"DIST_TUNE_CACHE_DIR": str(tmp_path / "cache")}
    outcomes = on_ranks(2, _files, str(tmp_path), mode, True, env=env)
    assert [each.error for each in outcomes] == ["OSError", "PeerFailedError"]
    assert all("No space left on device" in each.message for each in outcomes)
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 4
    for each in tmp_path.glob("made-*"):
        each.unlink()
    got = values(on_ranks(2, _files, str(tmp_path), mode, False, env=env))
    assert got[0] == got[1]
    assert json.loads((tmp_path / "k0.json").read_text())["small"]["waves_per_eu"] == 2
    assert len(list(tmp_path.glob("made-*"))) == 4, (
        "the winners alone are made again, to be checked"
    )
    assert not list((tmp_path / "cache").rglob("*.json*"))


@on_each_rank()
def test_a_size_that_fails_leaves_the_others_alone(rank: int):
    """Nothing answers rightly in the first: the others are in the file, and all ranks are told."""
    folder = shared_folder()
    with pytest.raises(
        DistTuneError, match=r"(?s)size=-4: NoValidConfigError.*wrong by 1"
    ) as caught:
        tuned(folder, [-4, 1])
    assert json.loads(Path(folder, "k.json").read_text()) == {"1": SPACE[1]}
    return str(caught.value)


@on_each_rank()
def test_ranks_that_disagree_are_told(rank: int):
    """Each size gets its own winner."""
    with pytest.raises(
        RankMismatchError, match="ranks 0 and 1 have other problems, first at index 0"
    ):
        tuned(shared_folder(), [1, 3][:: 1 - 2 * rank])
    with pytest.raises(
        RankMismatchError, match=r"ranks 0 and 1 have other problems, first at index 0: .k "
    ):
        tune_kernel(SPACE[: 2 + rank], lambda config: (lambda: None, None), name="k", num_iters=1)


@on_each_rank()
def test_a_file_that_cannot_be_written_is_told_to_all(rank: int):
    """Its folder is a file."""
    folder = shared_folder()
    Path(folder, "file").touch()
    began = time.monotonic()
    with pytest.raises(FileExistsError if rank == 0 else PeerFailedError):
        tune_and_save_configs(
            [8],
            lambda size: _count(size, folder),
            SPACE[:1],
            "k.json",
            f"{folder}/file",
            mode="merge",
            num_iters=1,
        )
    assert time.monotonic() - began < 4 * DEADLINE_S
