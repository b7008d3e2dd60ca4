"""Breaks one guard of dist_tune after the other, and says which of them the tests notice.

    python -m tests.mutations                       # all guards
    python -m tests.mutations --jobs 2 "MAX over ranks" "vote"

A guard is what could be wrong without an error: a vote that is not taken, a deadline that never
ends, a lock that is left open. It is broken through its seam, a function of the package by its
qualified name, wherever that stands, and by what is done there to a name: moved or reformatted code
changes no row of the table. It is broken in a copy of the files that git knows, where the tests
named beside the guard run until the first fails. A guard whose tests stay green is written as
``SURVIVED``, and the exit status is their number.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).parents[1]
LIMIT_S = 600.0
"""Of the tests of one guard; longer counts as noticed, because a suite that hangs is red."""


class Way(NamedTuple):
    """What is done in the function of a seam: to each place that has all of the names, or to the
    one of the number ``at``.
    """

    how: Literal["never", "always", "without", "instead", "does"]
    names: str = ""
    code: str = ""
    at: int | None = None


def never(names: str, at: int | None = None) -> Way:
    """A condition with these names is asked, and counts as false."""
    return Way("never", names, at=at)


def always(names: str, at: int | None = None) -> Way:
    """A condition with these names is asked, and counts as true."""
    return Way("always", names, at=at)


def without(name: str) -> Way:
    """Calls of this name and assignments to it are left out."""
    return Way("without", name)


def instead(name: str, code: str) -> Way:
    """Where the name is read stands this expression; of an attribute, called with its owner.

    ".name" is of attributes alone.
    """
    return Way("instead", name, code)


def does(code: str) -> Way:
    """The function's whole body, or the value of a constant."""
    return Way("does", code=code)


class Guard(NamedTuple):
    """A guard, and how it is broken."""

    claim: str
    seam: str
    """A function or constant by its qualified name, after that of its module where two modules have
    one.
    """
    way: Way
    tests: str
    """Arguments of pytest."""


GUARDS = (
    # Ranks
    Guard(
        "a verdict is written once",
        "Meetings._decide",
        instead(
            "compare_set",
            "lambda store: lambda key, old, new: (store.set(key, new), new.encode())[1]",
        ),
        "tests/protocol",
    ),
    Guard(
        "the last to come reads all parts",
        "Meetings._bring",
        instead("len", "lambda members: len(members) - 1"),
        "tests/protocol",
    ),
    Guard("ranks at other steps are told so", "Meetings._agree", never("len"), "tests/protocol"),
    Guard(
        "the missing time out",
        "Limits.outcome",
        never("patience_s"),
        "tests/protocol tests/ranks/test_late.py",
    ),
    Guard(
        "a dead rank is seen at once",
        "Limits.outcome",
        never("state"),
        "tests/protocol tests/faults",
    ),
    Guard(
        "a rank that has passed is not awaited",
        "Limits.outcome",
        never("passed"),
        "tests/protocol tests/ranks/test_differing.py",
    ),
    Guard(
        "a stopped rank costs waiting alone",
        "Limits._is_stuck",
        never("will_come"),
        "tests/protocol tests/ranks/test_late.py",
    ),
    Guard(
        "waits for each other are a mismatch",
        "Limits.outcome",
        never("is_elsewhere"),
        "tests/protocol tests/ranks/test_differing.py",
    ),
    Guard(
        "an abort ends the call on all ranks",
        "Meetings._end",
        instead("compare_set", "lambda store: lambda key, old, new: new.encode()"),
        "tests/protocol tests/faults",
    ),
    Guard(
        "what has ended takes no next call for another",
        "Meetings._wait",
        always("_decide"),
        "tests/protocol",
    ),
    Guard(
        "a beat learns of the end",
        "Meetings.beat",
        never("_has_verdict"),
        "tests/protocol tests/ranks/test_failed.py",
    ),
    Guard(
        "a consequence is no cause",
        "is_secondary",
        does("return False"),
        "tests/protocol tests/faults",
    ),
    Guard(
        "an operator that torch.compile would remove is refused",
        "as_operator",
        never("mutates_args"),
        "tests/ranks/test_operators.py",
    ),
    Guard(
        "one operator of a name", "as_operator", never("hasattr"), "tests/ranks/test_operators.py"
    ),
    Guard(
        "a call made again frees its peers",
        "Meetings._met",
        never("is_gathering"),
        "tests/protocol tests/ranks/test_failed.py",
    ),
    Guard(
        "two tasks are never one",
        "WorkQueue.__iter__",
        instead(
            "add", "lambda store: lambda key, n: (store.add(key, 0), store.add(key, n))[0] + n"
        ),
        "tests/protocol tests/offline",
    ),
    Guard(
        "a capture on one rank is none on any",
        "_capture",
        instead("reduce", "lambda context: lambda topic, part, fn: part"),
        "tests/ranks/test_replays.py",
    ),
    Guard(
        "collectives of captures do not count",
        "Ranks.capturing",
        without("_n_captured"),
        "tests/ranks/test_replays.py",
    ),
    Guard(
        "a launched kernel stays loaded",
        "Candidate._load",
        never("launched"),
        "tests/ranks/test_compiled.py",
    ),
    Guard(
        "farewell of the store's host",
        "Presence._say_farewell",
        always("ends_at"),
        "tests/protocol",
    ),
    Guard(
        "a connection has a deadline",
        "clients.within",
        instead("result", "lambda future: lambda seconds: future.result()"),
        "tests/protocol tests/ranks/test_late.py",
    ),
    # Reduction and choice
    Guard(
        "MAX over ranks",
        "times._reduce",
        instead(
            "max",
            "lambda found, key=None: max(found, key=key) if found is not ms else min(found,"
            " key=key)",
        ),
        "tests/search",
    ),
    Guard(
        "the slowest closure",
        "times._reduce",
        instead(
            "max",
            "lambda found, key=None: max(found, key=key) if found is ms else min(found, key=key)",
        ),
        "tests/search",
    ),
    Guard(
        "measured by all owners or not at all",
        "reduce_reports",
        instead("intersection", "lambda owner: owner.union"),
        "tests/search tests/ranks/test_agree.py",
    ),
    Guard(
        "a clock's nonsense is a failure",
        "Samples.report",
        never("absurd"),
        "tests/search tests/ranks/test_agree.py",
    ),
    Guard(
        "a failure on any rank counts on all",
        "reduce_reports",
        instead(".failures", "lambda report: report.failures if report is everyone[0] else {}"),
        "tests/search tests/ranks/test_failed.py",
    ),
    Guard(
        "disturbed on one rank, struck on all",
        "reduce_reports",
        instead("disturbed", "lambda each: []"),
        "tests/search tests/ranks/test_agree.py",
    ),
    Guard(
        "lost replays run again",
        "reduce_reports",
        instead("lost", "lambda each: []"),
        "tests/search tests/ranks/test_variants.py",
    ),
    Guard(
        "outliers leave", "without_outliers", does("return samples"), "tests/search tests/measure"
    ),
    Guard(
        "a tie goes to the faster kernel", "select", always("error_ms tie_ms", at=1), "tests/search"
    ),
    Guard("the hopeless run no more", "hopeless", does("return set()"), "tests/search"),
    Guard("the closure decides with a difference", "select", never("bias"), "tests/search"),
    Guard(
        "finalists are the best few",
        "selection.kept",
        instead("in_turn", "in_turn[::-1]"),
        "tests/search",
    ),
    Guard(
        "equals of a failure fail",
        "SiteRace.drop",
        never("first"),
        "tests/search tests/ranks/test_compiled.py",
    ),
    Guard(
        "times without a late owner do not count",
        "SiteRace.tell",
        always("n_owners"),
        "tests/search tests/ranks/test_agree.py",
    ),
    Guard(
        "suspects run last",
        "SiteRace.alive",
        instead("sorted", "lambda found, key: list(found)"),
        "tests/search tests/ranks/test_journals.py",
    ),
    Guard("the budget ends the search", "Race.is_spent", does("return False"), "tests/search"),
    Guard(
        "a suspect has a meeting before it",
        "Race.n_next",
        instead("suspects", "lambda site: ()"),
        "tests/search",
    ),
    Guard(
        "equals wait for the first of them",
        "worker._held",
        without("flock"),
        "tests/ranks/test_compiled.py tests/compiler",
    ),
    Guard(
        "an idle process's end costs no config",
        "Worker.ask",
        instead("IdleError", "MemoryError"),
        "tests/compiler",
    ),
    # Sites and records
    Guard(
        "other candidates are noticed",
        "_shared_candidates",
        never("first"),
        "tests/sites tests/ranks/test_differing.py",
    ),
    Guard(
        "a hit on all ranks or on none",
        "_share_records",
        always("is_open"),
        "tests/sites tests/ranks/test_cache.py",
    ),
    Guard(
        "one rank's no to replays is a no of all",
        "reduce_manifests",
        instead("why_not", "lambda mine: mine.why_not if mine is everyone[0] else ''"),
        "tests/sites tests/ranks/test_replays.py",
    ),
    Guard(
        "a config known to one rank only is disputed",
        "_disputed",
        does("return set()"),
        "tests/sites tests/ranks/test_agree.py tests/ranks/test_hooks.py",
    ),
    Guard(
        "other kernels of one name are not mixed",
        "_mixed",
        never("pair"),
        "tests/sites tests/ranks/test_agree.py",
    ),
    Guard(
        "two deaths are quarantine",
        "MAX_DEATHS",
        does("10**6"),
        "tests/sites tests/ranks/test_journals.py",
    ),
    Guard(
        "of several suspects one counts",
        "_count_deaths",
        always("again"),
        "tests/sites tests/ranks/test_journals.py",
    ),
    Guard(
        "SIGTERM makes no suspects",
        "Journal._read",
        never("_STACKS"),
        "tests/records tests/ranks/test_journals.py",
    ),
    Guard(
        "a journal is of one process",
        "Journal._opened",
        without("lockf"),
        "tests/records tests/ranks/test_journals.py",
    ),
    Guard(
        "a record of another key is refused", "store._checked", never("_place_of"), "tests/records"
    ),
    Guard("the better record stays", "_take_in", never("tuned_at"), "tests/cli"),
    Guard(
        "a topic is told once", "Told.is_new", without("add"), "tests/test_files.py tests/tuning"
    ),
    Guard(
        "a file is whole or absent",
        "write_whole",
        instead("replace", "lambda os: lambda temporary, path: path.write_bytes(content)"),
        "tests/records tests/test_files.py",
    ),
    Guard(
        "an unmeasured choice is not kept",
        "CacheLookup.record_id",
        always("latency_ms"),
        "tests/records tests/tuning tests/ranks/test_failed.py",
    ),
    Guard(
        "a step that may not be tuned returns its value",
        "Tuning._discovered",
        always("mode"),
        "tests/ranks/test_modes.py",
    ),
    Guard(
        "one rank's mode keeps all from tuning",
        "reduce_manifests",
        instead("settings", "lambda mine: everyone[0].settings"),
        "tests/ranks/test_modes.py",
    ),
    Guard(
        "calls that tune nothing have configs of their own",
        "_FunctionTuner.call_untuned",
        without("slot"),
        "tests/ranks/test_modes.py",
    ),
    Guard(
        "a job waits for the one that tunes the same",
        "reduce_manifests",
        instead("is_elsewhere", "lambda mine: False"),
        "tests/ranks/test_cache.py",
    ),
    Guard(
        "a store that has failed is left alone",
        "RemoteFolder._ask",
        never("_is_over"),
        "tests/records tests/ranks/test_cache.py",
    ),
    Guard(
        "a store that hangs is left behind",
        "RemoteFolder._ask",
        instead("within", "lambda seconds, answer: answer()"),
        "tests/records tests/ranks/test_cache.py",
    ),
    Guard(
        "one tuning at a time",
        "one_at_a_time",
        instead("_acquired", "lambda lock, wait_s: _acquired(lock, 0.0) or True"),
        "tests/ranks/test_nested.py",
    ),
    # Replays
    Guard(
        "an undo between replays",
        "Replayer.undo",
        instead("put_back", "lambda undo: undo.forget"),
        "tests/tuning tests/ranks/test_replays.py",
    ),
    Guard(
        "reset before each replay",
        "Replayer.restart",
        without("_reset"),
        "tests/tuning tests/ranks/test_replays.py tests/ranks/test_agree.py"
        " tests/ranks/test_nested.py",
    ),
    Guard(
        "generators are restored for the last run",
        "Replayer.last_run",
        without("restore"),
        "tests/tuning tests/ranks/test_replays.py",
    ),
    Guard(
        "a step that leaves something else is not replayed",
        "FirstRun.probe",
        instead("compare", "lambda state: lambda: ''"),
        "tests/tuning tests/ranks/test_replays.py",
    ),
    Guard(
        "a step that gives something else is not replayed",
        "FirstRun.probe",
        instead("_another", "lambda run: lambda *_: ''"),
        "tests/tuning tests/ranks/test_replays.py",
    ),
    Guard(
        "a failed launch is a vote",
        "Trials._fail",
        does("raise error"),
        "tests/ranks/test_failed.py tests/ranks/test_functions.py",
    ),
    Guard(
        "another config stands in",
        "Trials._launch_first",
        instead("order", "lambda site: lambda i: [*site.order(i)][:1]"),
        "tests/ranks/test_failed.py tests/ranks/test_functions.py",
    ),
    Guard(
        "a stand-in disturbs the replay",
        "Trials._launch_first",
        without("disturb"),
        "tests/tuning tests/ranks/test_failed.py tests/ranks/test_functions.py"
        " tests/ranks/test_agree.py",
    ),
    Guard(
        "a wrong result is out",
        "Trials._is_right",
        without("fail"),
        "tests/measure tests/ranks/test_functions.py",
    ),
    Guard(
        "the winner is judged once more",
        "run_race",
        always("_is_right_again"),
        "tests/ranks/test_functions.py tests/offline tests/measure tests/tuning",
    ),
    Guard(
        "a stuck device is an error",
        "Replayer._await_device",
        never("_stuck_after_s"),
        "tests/ranks/test_late.py tests/tuning",
    ),
    Guard("unwritten elements show", "ResultMemory.poison_held", without("_fill"), "tests/measure"),
    Guard("free memory is poisoned", "ResultMemory.poison_free", without("_fill"), "tests/measure"),
    Guard(
        "poison that was read is put back",
        "ResultMemory.restore",
        without("put_back"),
        "tests/measure",
    ),
    Guard(
        "arguments of a checked function are put back",
        "Inputs.restart",
        without("put_back"),
        "tests/measure tests/tuning tests/ranks/test_replays.py",
    ),
    # Calls of the user's
    Guard(
        "a batch is all ranks' or none's",
        "online._all",
        does("return any(parts.values())"),
        "tests/ranks/test_online.py",
    ),
    Guard(
        "a call waits for word of its batch",
        "OnlineRuns.goes_on",
        without("wait_for"),
        "tests/ranks/test_online.py",
    ),
    Guard(
        "slots are filled after a trial",
        "OnlineRuns._trial",
        without("put"),
        "tests/ranks/test_online.py",
    ),
    Guard(
        "a call of the user's zeroes nothing",
        "Trials.missed",
        always("in_use", at=2),
        "tests/ranks/test_online.py",
    ),
    Guard(
        "nothing is at work over the budget",
        "Pace.may_work",
        always("max_slowdown"),
        "tests/search",
    ),
    Guard("plain calls are plain", "Pace.is_quiet", does("return False"), "tests/search"),
    Guard(
        "a time with a gap of the host is none",
        "Turn.__call__",
        never("has_gap"),
        "tests/ranks/test_online.py",
    ),
    Guard(
        "a launch of another thread is no trial",
        "Turn.__call__",
        never("listener_here"),
        "tests/ranks/test_online.py",
    ),
    Guard(
        "times of an attempt before count", "SiteRace.__init__", without("update"), "tests/search"
    ),
    Guard(
        "the second call compiles nothing",
        "leave_untuned",
        instead("variants", "lambda site: site.variants[:1]"),
        "tests/ranks/test_online.py",
    ),
    Guard("a trial waits for the budget", "Pace.n_wait", does("return 0"), "tests/search"),
    Guard("what trials took is charged", "Pace.add", without("_open"), "tests/search"),
    Guard(
        "a lost count of the parser is no failure",
        "compilation.patched",
        instead("parsed", "lambda run: run()"),
        "tests/compiler",
    ),
    Guard(
        "each kind of configs is compiled ahead",
        "warm_up",
        never("kinds"),
        "tests/launches tests/offline",
    ),
    Guard(
        "a block of unknown source is not predicted",
        "_exchanged",
        never("others"),
        "tests/launches",
    ),
    Guard(
        "a config with a 1 launches otherwise",
        "configs._ALIKE",
        does(
            r're.compile(r"num_(?:warps|stages)=\d+|(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)")'
        ),
        "tests/launches",
    ),
    Guard(
        "a predicted launch is counted by its kernel",
        "compiling.precompile",
        instead("n_of", "Counter({name: n_of.total()})"),
        "tests/launches",
    ),
    # Other devices
    Guard(
        "a record is of one runtime",
        "accelerator.runtime",
        does("return torch.version.cuda"),
        "tests/test_accelerator.py",
    ),
    Guard(
        "a part of a GPU is told from the whole",
        "accelerator.name",
        instead("multi_processor_count", "lambda properties: 'many'"),
        "tests/test_accelerator.py",
    ),
    # Around the step
    Guard(
        "Triton is restored",
        "_Patch.leave",
        without("__code__"),
        "tests/ranks/test_failed.py tests/launches tests/ranks/test_agree.py",
    ),
    Guard(
        "a config that the rules drop at a size is not used there",
        "Fits._order",
        always("kept texts", at=0),
        "tests/ranks/test_variants.py",
    ),
    Guard(
        "a trial runs only where the rules keep its config",
        "Trials._launch_first",
        never("keeps index"),
        "tests/ranks/test_variants.py",
    ),
    Guard(
        "ranks tune what all have",
        "Sites.restrict",
        instead("keep", "lambda owner: lambda *texts: [*range(n_before)]"),
        "tests/ranks/test_differing.py",
    ),
    Guard(
        "a bucket comes before an exact size",
        "_Patch.known_config",
        never("config", at=0),
        "tests/ranks/test_variants.py",
    ),
    Guard(
        "a bucket's known config is no miss",
        "_Patch.deliver",
        never("config slot"),
        "tests/ranks/test_variants.py",
    ),
    Guard(
        "nothing is tuned under capture",
        "_ClosureTuner.tuned.call",
        always("is_capturing"),
        "tests/ranks/test_hooks.py tests/ranks/test_nested.py tests/ranks/test_agree.py"
        " tests/tuning",
    ),
    Guard(
        "a hang ends the process",
        "Watchdog._run",
        never("limit_s"),
        "tests/test_watch.py tests/ranks/test_late.py",
    ),
    Guard(
        "a released config is out",
        "Watchdog._take_released",
        without("fail"),
        "tests/test_watch.py tests/ranks/test_late.py",
    ),
    Guard(
        "a held interpreter ends the process",
        "Watchdog._arm",
        without("dump_traceback_later"),
        "tests/faults",
    ),
    Guard(
        "a closure inside one of fewer ranks is an error",
        "Tuner.check_nested",
        never("missing"),
        "tests/ranks/test_nested.py",
    ),
    Guard("a class is not wrapped", "_Target.wrap", never("isroutine"), "tests/test_install.py"),
    Guard(
        "the program stays __main__ to its end",
        "install.main",
        without("modules"),
        "tests/test_install.py",
    ),
    Guard(
        "the end of a child says nothing",
        "_Target.tell",
        always("current_process"),
        "tests/test_install.py",
    ),
    # Files of engines
    Guard(
        "of two configs for one size none is taken",
        "convert._content",
        never("setdefault config"),
        "tests/cli",
    ),
    Guard(
        "a field that a kernel does not take is told", "engine_files", never("unknown"), "tests/cli"
    ),
    Guard(
        "a bucket that no launch would find again is an error",
        "_bucket.of",
        never("found"),
        "tests/launches",
    ),
    Guard(
        "a file has no name that its engine does not look for",
        "_path_for",
        never("fullmatch"),
        "tests/cli",
    ),
    Guard("a file that is there stays", "convert.convert", never("replaces"), "tests/cli"),
)


def broken(guard: Guard, folder: Path = ROOT) -> tuple[Path, str]:
    """The file that has the seam, below ``folder``, and its text with the guard broken.

    Raises:
        LookupError: no function or several have this name, or nothing in it is to be changed.
    """
    names = _names(folder)
    if len(places := names.get(guard.seam, [])) != 1:
        raise LookupError(
            f'"{guard.claim}": {len(places)} places are named {guard.seam}, and one must be'
        )
    tree = ast.parse(places[0].read_text())
    seam = next(
        each for own, each in _seams(tree) if guard.seam in (own, f"{places[0].stem}.{own}")
    )
    before = ast.unparse(tree)
    if guard.way.how == "does" and not isinstance(seam, ast.FunctionDef):
        seam.value = ast.parse(guard.way.code, mode="eval").body  # type: ignore[attr-defined]
    elif isinstance(seam, ast.FunctionDef):
        way = _Break(guard.way)
        seam.body = (
            ast.parse(guard.way.code).body
            if guard.way.how == "does"
            else [*filter(None, map(way.visit, seam.body))] or [ast.Pass()]
        )
    if (text := ast.unparse(ast.fix_missing_locations(tree))) == before:
        raise LookupError(f'"{guard.claim}": {guard.seam} has no {guard.way.names}')
    return places[0], text


@cache
def _names(folder: Path) -> dict[str, list[Path]]:
    """The files of each name that a seam may have."""
    found: dict[str, list[Path]] = {}
    for path in sorted((folder / "dist_tune").rglob("*.py")):
        for own, _ in _seams(ast.parse(path.read_text())):
            for name in (own, f"{path.stem}.{own}"):
                found.setdefault(name, []).append(path)
    return found


def _seams(node: ast.AST, name: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Functions and constants with their qualified names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            own = f"{name}.{child.name}".removeprefix(".")
            yield own, child
            yield from _seams(child, own)
        elif isinstance(child, ast.Assign) and isinstance(node, ast.Module):
            yield ast.unparse(child.targets[0]), child
        else:
            yield from _seams(child, name)


class _Break(ast.NodeTransformer):
    def __init__(self, way: Way) -> None:
        self._way, self._n_met = way, 0

    def _is_met(self, node: ast.AST) -> bool:
        """True for a place that is to be changed; asked once for each."""
        named = {
            each.id if isinstance(each, ast.Name) else each.attr
            for each in ast.walk(node)
            if isinstance(each, ast.Name | ast.Attribute)
        }
        if not named.issuperset(self._way.names.split()):
            return False
        self._n_met += 1
        return self._way.at in (None, self._n_met - 1)

    def _condition(self, node: ast.expr) -> ast.expr:
        if (
            isinstance(node, ast.BoolOp)
            or self._way.how not in ("never", "always")
            or not self._is_met(node)
        ):
            return node  # the operands of an ``and`` or ``or`` are conditions of their own
        operator, value = (ast.Or(), True) if self._way.how == "always" else (ast.And(), False)
        return ast.BoolOp(operator, [node, ast.Constant(value)])

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            node.test = self._condition(node.test)
        elif isinstance(node, ast.comprehension):
            node.ifs = [self._condition(each) for each in node.ifs]
        elif isinstance(node, ast.BoolOp):
            node.values = [self._condition(each) for each in node.values]
        if getattr(node, "body", None) == []:
            node.body = [ast.Pass()]  # type: ignore[attr-defined]
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        call = node.value
        is_left_out = (
            self._way.how == "without"
            and isinstance(call, ast.Call)
            and _name(call.func) == self._way.names
        )
        return None if is_left_out else self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        if self._way.how == "without":
            node.targets = [each for each in node.targets if _name(each) != self._way.names]
        return self.generic_visit(node) if node.targets else None

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST | None:
        if self._way.how == "without" and _name(node.target) == self._way.names:
            return None
        node.value = self.visit(node.value)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._read(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        return self._read(node)

    def _read(self, node: ast.Name | ast.Attribute) -> ast.AST:
        wanted = (
            (f".{_name(node)}", _name(node)) if isinstance(node, ast.Attribute) else (_name(node),)
        )
        if (
            self._way.how != "instead"
            or self._way.names not in wanted
            or not isinstance(node.ctx, ast.Load)
        ):
            return node
        code = ast.parse(f"({self._way.code})", mode="eval").body
        return ast.Call(code, [node.value], []) if isinstance(node, ast.Attribute) else code


def _name(node: ast.AST) -> str:
    while isinstance(node, ast.Subscript):
        node = node.value
    return (
        node.id
        if isinstance(node, ast.Name)
        else node.attr
        if isinstance(node, ast.Attribute)
        else ""
    )


def is_noticed(guard: Guard, folder: Path) -> bool:
    """True if the tests fail with the guard broken, in ``folder``, which holds a copy of the
    project.
    """
    path, text = broken(guard, folder)
    path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        *guard.tests.split(),
    ]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        if (code := process.wait(LIMIT_S)) in (4, 5):
            raise LookupError(f'"{guard.claim}": pytest finds no tests at {guard.tests}')
        return code != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        os.killpg(process.pid, 9) if process.poll() is None else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Break guards, and print a line for each; the number of those that no test has noticed."""
    parser = argparse.ArgumentParser(description="break guards one after the other")
    parser.add_argument(
        "claims", nargs="*", help="beginnings of the claims of some guards; none: all"
    )
    parser.add_argument("--jobs", type=int, default=1, help="guards at once")
    options = parser.parse_args(arguments)
    guards = [
        each
        for each in GUARDS
        if not options.claims or each.claim.startswith(tuple(options.claims))
    ]
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\n")
    survived = 0

    def try_one(guard: Guard) -> tuple[Guard, bool, float]:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            for each in filter(None, files):
                if (ROOT / each).is_file():
                    target = Path(name, each)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / each, target)
            return guard, is_noticed(guard, Path(name)), time.monotonic() - began

    with ThreadPoolExecutor(options.jobs) as pool:
        for guard, noticed, seconds in pool.map(try_one, guards):
            survived += not noticed
            print(
                f"{'noticed' if noticed else 'SURVIVED':9}{seconds:6.0f} s  {guard.claim}",
                flush=True,
            )
    print(f"{len(guards) - survived} of {len(guards)} broken guards are noticed")
    return survived


if __name__ == "__main__":
    sys.exit(main())
