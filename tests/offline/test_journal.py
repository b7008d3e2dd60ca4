"""The journal of a tuning in progress: what the next process knows of it, wherever this one ended."""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.offline.journal import Journal, Progress

pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("ignore:journal .*damaged lines", "ignore:tuning goes on without")]

INDICES = st.integers(0, 5)
CANDIDATES = st.lists(INDICES, min_size=1, max_size=4, unique=True)
ENDS = st.tuples(st.just("end"), st.dictionaries(INDICES, st.floats(0.01, 10)), st.dictionaries(INDICES, st.text()), INDICES)
STEPS = st.lists(st.one_of(st.tuples(st.just("begin"), CANDIDATES), ENDS, st.tuples(st.just("stop"))), max_size=8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "problem.jsonl"


def killed(path: Path, *steps: tuple[Any, ...]) -> None:
    """A process that did these, and ended in the middle of what it began last."""
    journal = Journal(path, "id")
    assert journal.is_kept
    for name, *arguments in steps:
        getattr(journal, name)(*arguments)
    journal.close()


def told(path: Path, identity: str = "id") -> Progress:
    """What the next process is told."""
    journal = Journal(path, identity)
    journal.close()
    return journal.progress


def test_the_next_process_knows_what_this_one_measured(path: Path):
    """Times, failures and champion of all rounds, a later time in place of an earlier one; of a journal that was deleted, nothing."""
    killed(path, ("begin", [3, 1]), ("end", {3: 0.5}, {1: "out of shared memory"}, 3))
    killed(path, ("begin", [3, 2]), ("end", {3: 0.25, 2: 1.0}, {}, 3))
    assert told(path) == Progress({3: 0.25, 2: 1.0}, {1: "out of shared memory"}, incumbent=3)
    killed(path, ("finish", 2, None))
    assert told(path).is_done
    assert told(path).incumbent == 2
    Journal(path, "id").close(delete=True)
    assert list(path.parent.iterdir()) == []


def test_those_under_way_at_the_end_of_a_process_are_suspects(path: Path):
    """Each gets one strike, which the next process keeps, and those that had ended get none."""
    killed(path, ("begin", [1]), ("end", {1: 1.0}, {}, 1), ("begin", [2, 3]))
    assert told(path).strikes == {2: 1, 3: 1}
    killed(path, ("begin", [4]), ("end", {4: 1.0}, {}, 4))
    assert told(path).strikes == {2: 1, 3: 1}
    assert told(path).quarantined == {}


def test_who_was_alone_twice_is_quarantined(path: Path):
    """Alone after having been in company, or alone twice."""
    killed(path, ("begin", [1, 2]))
    killed(path, ("begin", [2]))
    assert list(told(path).quarantined) == [2]
    for _ in range(2):
        killed(path, ("begin", [5]))
    assert told(path).quarantined == dict.fromkeys([2, 5], "the process ended 2 times while this config ran")


def test_nobody_is_quarantined_for_company(path: Path):
    """However often: one of them is the cause, and the others are not."""
    for _ in range(4):
        killed(path, ("begin", [1, 2]))
    assert told(path).strikes == {1: 1, 2: 1}


def test_who_was_interrupted_is_no_suspect(path: Path):
    """Ctrl-C is not the doing of those under way; what a process before it suspected stays."""
    killed(path, ("begin", [7]))
    killed(path, ("begin", [1, 2]), ("stop",))
    assert told(path).strikes == {7: 1}


def test_an_interruption_before_anything_runs_clears_nobody(path: Path):
    """Killed by candidate 7, then interrupted before the next process began any: 7 is still a suspect."""
    killed(path, ("begin", [7]))
    killed(path, ("stop",))
    assert told(path).strikes == {7: 1}


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line[: len(line) // 2] + b"\n",
        lambda line: line.replace(b'"2":1.0', b'"2":9.0'),
        lambda line: b"\xff\x00 garbage\n\n",
        lambda line: b"zz" + line,
        lambda line: line.partition(b" ")[2],
        lambda line: b"",
    ],
    ids=["torn", "another number", "garbage", "no checksum", "without checksum", "gone"],
)
def test_a_damaged_line_is_left_out(path: Path, damage: Callable[[bytes], bytes]):
    """And the lines around it are read."""
    rounds: list[tuple[Any, ...]] = []
    for i in (1, 2, 3):
        rounds += [("begin", [i]), ("end", {i: 1.0}, {}, i)]
    killed(path, *rounds)
    lines = path.read_bytes().splitlines(keepends=True)
    assert b'"2":1.0' in lines[4]
    lines[4] = damage(lines[4])
    path.write_bytes(b"".join(lines))
    assert told(path).latencies_ms == {1: 1.0, 3: 1.0}


@given(STEPS, st.data())
def test_cut_anywhere_it_says_what_its_complete_lines_said(steps: list[tuple[Any, ...]], data: st.DataObject):
    """As if the process had made no other steps; and the next process may go on after it."""
    with tempfile.TemporaryDirectory() as folder:
        path, shorter = Path(folder) / "cut", Path(folder) / "shorter"
        journal = Journal(path, "id")
        ends = [path.stat().st_size]
        for name, *arguments in steps:
            getattr(journal, name)(*arguments)
            ends.append(path.stat().st_size)
        journal.close()
        cut = data.draw(st.integers(ends[0], ends[-1]))
        path.write_bytes(path.read_bytes()[:cut])
        # A line of which only the end is missing says all it has to say.
        complete = steps[: sum(end - 1 <= cut for end in ends) - 1]
        killed(shorter, *complete)
        progress = told(path)
        assert progress == told(shorter)
        known: dict[int, float] = {}
        for step in complete:
            known |= step[1] if step[0] == "end" else {}
        assert progress.latencies_ms == known
        killed(path, ("end", {9: 9.0}, {}, 9))
        assert told(path).latencies_ms == known | {9: 9.0}


def test_a_journal_of_other_measurements_is_begun_anew(path: Path):
    """Of another identity, of one that was cut within its first line, and of a file that is no journal."""
    killed(path, ("begin", [1]), ("end", {1: 1.0}, {}, 1))
    assert told(path, "other") == Progress()
    assert told(path, "id") == Progress()
    for content in (b"00000000 {", b"no journal", path.read_bytes()[:-9]):
        path.write_bytes(content)
        killed(path, ("end", {4: 4.0}, {}, 4))
        assert told(path).latencies_ms == {4: 4.0}


@pytest.mark.processes
def test_one_process_has_a_journal_at_a_time(path: Path):
    """Another one keeps its own in memory, and writes nothing, until the first closes it or ends."""
    program = "import sys; from pathlib import Path; from dist_tune.offline.journal import Journal\n"
    program += "j = Journal(Path(sys.argv[1]), 'id'); j.begin([1]); print(j.is_kept, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        content = path.read_bytes()
        second = Journal(path, "other")
        second.end({5: 5.0}, {}, 5)
        second.close(delete=True)
        assert not second.is_kept
        assert path.read_bytes() == content
        holder.kill()
    assert told(path).strikes == {1: 1}


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path):
    """A folder that cannot be made, a path that is a folder, and no path at all."""
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    for path in (tmp_path / "file" / "journal", tmp_path / "folder", None):
        journal = Journal(path, "id")
        journal.begin([1])
        journal.end({1: 1.0}, {}, 1)
        assert not journal.is_kept
        assert journal.progress == Progress()
        journal.close(delete=True)


def test_progress_reaches_other_ranks_as_it_is():
    """Indices are numbers again, strikes are counted, and no text is no progress."""
    progress = Progress({3: 0.5, 10: float("inf")}, {1: "é\n"}, incumbent=3, is_done=True)
    progress.strikes.update([7, 7, 8])
    again = Progress.from_json(progress.to_json())
    assert again == progress
    assert list(again.quarantined) == [7]
    assert again.strikes[99] == 0
    assert Progress.from_json("") == Progress()
