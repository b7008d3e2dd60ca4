# ruff: noqa: E501  # a guard is one row, which holds a line of the code as it stands there
"""Breaks one guard of dist_tune after the other, and says which of them the tests notice.

    python -m tests.mutations                       # all guards: half an hour on two cores
    python -m tests.mutations --jobs 2 "MAX over ranks" "vote"

Each guard is a line that could be wrong without an error: a vote that is not taken, a deadline that never ends, a lock that is left open. The
guard is broken in a copy of the files that git knows, and the tests named beside it run there until the first fails. A guard whose tests stay
green is written as ``survived``, and the exit status is their number. ``old`` must stand exactly once in its file: a guard that has moved is
an error, so that this table follows the code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIMIT_S = 600.0
"""Of the tests of one guard; longer counts as noticed, because a suite that hangs is red."""


class Guard(NamedTuple):
    """A guard, and how it is broken."""

    claim: str
    file: str
    """Under dist_tune/."""
    old: str
    new: str
    tests: str
    """Arguments of pytest."""


# fmt: off
GUARDS = (
    # Ranks
    Guard("a verdict is written once", "distributed/meetings.py", 'bool(self._store.compare_set(f"{key}/verdict", "", text) == text.encode())', 'self._store.set(f"{key}/verdict", text) is None', "tests/distributed"),
    Guard("the last to come reads all parts", "distributed/meetings.py", "if self._store.add(f\"{key}/count\", 1) == len(self.members):", "if self._store.add(f\"{key}/count\", 1) >= len(self.members) - 1:", "tests/distributed"),
    Guard("ranks at other steps are told so", "distributed/meetings.py", "if len({header[:2] for header in headers.values()}) > 1 or headers", "if headers", "tests/distributed"),
    Guard("the missing time out", "distributed/calls.py", "        if waited_s >= patience_s:\n", "        if waited_s >= 1e9:\n", "tests/distributed tests/ranks/test_late_ranks.py"),
    Guard("a dead rank is seen at once", "distributed/calls.py", "if card.state == \"gone\" and not card.is_over}", "if False}", "tests/distributed tests/faults"),
    Guard("a rank that has passed is not awaited", "distributed/calls.py", "if self.is_gathering and passed:", "if self.is_gathering and not passed:", "tests/distributed tests/ranks/test_differing_calls.py"),
    Guard("a stopped rank costs waiting alone", "distributed/calls.py", "        if is_here and will_come and not self.is_broken:\n            return False\n", "", "tests/distributed tests/ranks/test_late_ranks.py"),
    Guard("waits for each other are a mismatch", "distributed/calls.py", "if self.is_first and card.is_fresh and is_elsewhere:", "if False and is_elsewhere:", "tests/distributed tests/ranks/test_differing_calls.py"),
    Guard("an abort ends the call on all ranks", "distributed/meetings.py", "while (found := store.compare_set(f\"{key}/{k}/verdict\", \"\", mine)) != mine.encode():", "while (found := mine.encode()) != mine.encode():", "tests/distributed tests/faults"),
    Guard("what has ended takes no next call for another", "distributed/meetings.py", "if self._decide(key, verdict):", "if self._decide(key, verdict) or True:", "tests/distributed"),
    Guard("a beat learns of the end", "distributed/meetings.py", "                if self._has_verdict():  # none is agreed without this rank", "                if False:", "tests/distributed tests/ranks/test_failed_calls.py"),
    Guard("a consequence is no cause", "distributed/messages.py", "    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(_SECONDARY.search(str(error))))", "    return False", "tests/distributed tests/faults"),
    Guard("an operator that torch.compile would remove is refused", "operators.py", " and not mutates_args:", " and False:", "tests/ranks/test_operators.py"),
    Guard("one operator of a name", "operators.py", " or hasattr(getattr(torch.ops, namespace), short):", ":", "tests/ranks/test_operators.py"),
    Guard("a call made again frees its peers", "distributed/meetings.py", "if self._has_gone_on(verdict) and limits.is_gathering:", "if False:", "tests/distributed tests/ranks/test_failed_calls.py"),
    Guard("two tasks are never one", "distributed/store.py", 'while (task := self._store.add("next", 1) - 1) < self._n_tasks:', 'while (task := self._store.add("next", 0)) < self._n_tasks and not self._store.add("next", 1) < 0:', "tests/distributed tests/offline"),
    Guard("a capture on one rank is none on any", "tuning/racing.py", 'if why_not := context.reduce("graph", step(closure, batch), _first_reason):', "if why_not := step(closure, batch):", "tests/ranks/test_graphs.py"),
    Guard("collectives of captures do not count", "replays/replays.py", "self._ranks.n_captured += self._ranks.n_issued - n_issued", "pass", "tests/ranks/test_graphs.py"),
    Guard("a launched kernel stays loaded", "compiler/candidate.py", "if isinstance(launched, type(compiled)):", "if False:", "tests/ranks/test_loaded_kernels.py"),
    Guard("farewell of the store's host", "distributed/presence.py", "        while others and time.monotonic() < ends_at:\n", "        while others:\n", "tests/distributed"),
    Guard("a connection has a deadline", "distributed/store.py", "    return future.result(seconds)\n", "    return future.result()\n", "tests/distributed tests/ranks/test_silent_store.py"),
    # Reduction and choice
    Guard("MAX over ranks", "search/times.py", "slowest, fastest = max(ms, key=ms.__getitem__), min(ms, key=ms.__getitem__)", "fastest, slowest = max(ms, key=ms.__getitem__), min(ms, key=ms.__getitem__)", "tests/search"),
    Guard("the slowest closure", "search/times.py", "last = max(by_rank.values(), key=lambda each: each.closure_ms)", "last = min(by_rank.values(), key=lambda each: each.closure_ms)", "tests/search"),
    Guard("measured by all owners or not at all", "search/times.py", "sorted(set.intersection(*map(set, ranks.values())))", "sorted(set.union(*map(set, ranks.values())))", "tests/search tests/ranks/test_racing.py"),
    Guard("a clock's nonsense is a failure", "search/times.py", "if replays and absurd:", "if False:", "tests/search tests/ranks/test_racing.py"),
    Guard("a failure on any rank counts on all", "search/times.py", "    for rank, report in reports.items():\n        for site, candidates in report.failures.items():", "    for rank, report in list(reports.items())[:1]:\n        for site, candidates in report.failures.items():", "tests/search tests/ranks/test_faults.py"),
    Guard("disturbed on one rank, struck on all", "search/times.py", "disturbed=sorted({replay for each in everyone for replay in each.disturbed})", "disturbed=list[int]()", "tests/search tests/ranks/test_racing.py"),
    Guard("lost replays run again", "search/times.py", "lost=sorted({replay for each in everyone for replay in each.lost})", "lost=list[int]()", "tests/search tests/ranks/test_variants.py"),
    Guard("outliers leave", "measure/clocks.py", "    return staying if len(samples) - len(staying) <= max_share * len(samples) else samples", "    return samples", "tests/search tests/measure"),
    Guard("a tie goes to the faster kernel", "search/selection.py", "winner = leader if error_ms > tie_ms else min(i for i in tied if times[i].launches_ms <= least_ms + tie_ms)", "winner = leader", "tests/search"),
    Guard("the hopeless run no more", "search/selection.py", "    return slow - {i for i, each in warm_ups.items() if is_first and each.launches_ms <= HOPELESS * best_ms}\n", "    return set()\n", "tests/search"),
    Guard("the closure decides with a difference", "search/selection.py", "weight = bias / (bias + rest_error_ms**2) if bias > 0 else 0.0", "weight = 0.0", "tests/search"),
    Guard("finalists are the best few", "search/selection.py", "[i for n, i in enumerate(in_turn) if i in hopeful or n < n_least][:quota]", "[i for n, i in enumerate(in_turn) if i in hopeful or n < n_least][-quota:]", "tests/search"),
    Guard("equals of a failure fail", "search/site_race.py", "            if first in self.failures:\n", "            if False:\n", "tests/search tests/ranks/test_equal_kernels.py"),
    Guard("times without a late owner do not count", "search/site_race.py", "self.times = {i: each for i, each in self.times.items() if i in self._attempt or each.n_owners == n_owners}", "pass", "tests/search tests/ranks/test_racing.py"),
    Guard("suspects run last", "search/site_race.py", "return sorted((i for i in self._runnable() if i not in self.left), key=self.suspects.__contains__)", "return [i for i in self._runnable() if i not in self.left]", "tests/search tests/ranks/test_journals.py"),
    Guard("the budget ends the search", "search/race.py", "        return self._plan.budget_s is not None and self._elapsed_s >= self._plan.budget_s\n", "        return False\n", "tests/search"),
    Guard("a suspect has a meeting before it", "search/race.py", "replays[: max(1, next(doubtful, len(replays)))]", "replays", "tests/search"),
    Guard("equals wait for the first of them", "compiler/worker.py", "            except BlockingIOError:\n                on_wait()\n                fcntl.flock(file, fcntl.LOCK_EX)\n", "            except BlockingIOError:\n                pass\n", "tests/ranks/test_equal_kernels.py tests/compiler"),
    Guard("an idle process's end costs no config", "compiler/processes.py", "os.EX_TEMPFAIL: IdleError", "os.EX_TEMPFAIL: MemoryError", "tests/compiler/test_processes.py"),
    # Sites and records
    Guard("other candidates are noticed", "sites/manifest.py", "            if texts != first:\n", "            if False:\n", "tests/sites tests/ranks/test_differing_calls.py"),
    Guard("a hit on all ranks or on none", "sites/manifest.py", "if all(each.is_open and (each.winner == first.winner or each.key == first.key) for each in found.values()):", "if True:", "tests/sites tests/ranks/test_cache_votes.py"),
    Guard("one rank's no to replays is a no of all", "sites/manifest.py", "against = [(rank, mine.why_not) for rank, mine in manifests.items() if mine.why_not and is_asking]", "against = [(rank, mine.why_not) for rank, mine in list(manifests.items())[:1] if mine.why_not and is_asking]", "tests/sites tests/ranks/test_not_replayed.py"),
    Guard("a config known to one rank only is disputed", "sites/manifest.py", "return {label for label, configs in hits.items() if label in missed or len(configs) > 1}", "return set()", "tests/sites tests/ranks/test_contextual.py tests/ranks/test_launched_configs.py"),
    Guard("other kernels of one name are not mixed", "sites/manifest.py", "if pair[0] != pair[1] and pair not in own}", "if False}", "tests/sites tests/ranks/test_identity.py"),
    Guard("two deaths are quarantine", "sites/journal.py", "MAX_DEATHS = 2\n", "MAX_DEATHS = 10**6\n", "tests/sites tests/ranks/test_journals.py"),
    Guard("of several suspects one counts", "sites/journal.py", "if len(under_way) == 1 or len(again) == 1 or (key, i) not in again:", "if True:", "tests/sites tests/ranks/test_journals.py"),
    Guard("SIGTERM makes no suspects", "cache/journal.py", "self.events += [events.UnderWay(at=0.0, rank=0, candidates=[])] * line.startswith(_STACKS)", "pass", "tests/cache/test_journal.py tests/ranks/test_journals.py"),
    Guard("a journal is of one process", "cache/journal.py", "fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass", "tests/cache/test_journal.py tests/ranks/test_journals.py"),
    Guard("a record of another key is refused", "cache/store.py", "if place != _place_of(record.cache_key):", "if False:", "tests/cache"),
    Guard("the better record stays", "cli/records.py", "if (before.n_samples, before.tuned_at) >= (record.n_samples, record.tuned_at):", "if False:", "tests/cli"),
    Guard("a file is whole or absent", "files.py", "        os.replace(temporary, path)\n", "        path.write_bytes(content)\n", "tests/cache tests/test_files.py"),
    Guard("an unmeasured choice is not kept", "cache/lookup.py", "is_kept = self._is_used and record.source and (record.best.latency_ms is not None or not had_choice)", "is_kept = self._is_used and record.source", "tests/cache tests/tuning/test_notices.py tests/ranks/test_machine_failures.py"),
    Guard("a step that may not be tuned returns its value", "tuning/tuning.py", "if manifest.to_tune and not manifest.why_not and not manifest.mode:", "if manifest.to_tune and not manifest.why_not:", "tests/ranks/test_modes.py"),
    Guard("one rank's mode keeps all from tuning", "sites/manifest.py", "modes = [mine.settings.get(\"DIST_TUNE_MODE\") for mine in everyone]", "modes = [mine.settings.get(\"DIST_TUNE_MODE\") for mine in everyone][:1]", "tests/ranks/test_modes.py"),
    Guard("calls that tune nothing have configs of their own", "function.py", "                launch.slot = Slot(self.nearest, (group, key), self.tunable.fits)\n", "                pass\n", "tests/ranks/test_functions.py"),
    Guard("a job waits for the one that tunes the same", "sites/manifest.py", "is_elsewhere=any(mine.is_elsewhere for mine in everyone),", "is_elsewhere=False,", "tests/ranks/test_two_jobs.py"),
    Guard("a store that has failed is left alone", "cache/remote.py", "        if self._is_over[what]:\n", "        if False:\n", "tests/cache/test_remote.py"),
    Guard("a store that hangs is left behind", "cache/remote.py", "return within(max(0.0, self._left_s), answer)", "return answer()", "tests/cache/test_remote.py"),
    Guard("one tuning at a time", "sites/exclusive.py", "    if not _acquired(_lock, wait_s):\n", "    if _acquired(_lock, 0.0) and False:\n", "tests/ranks/test_threads.py"),
    # Replays
    Guard("an undo between replays", "replays/replays.py", "            undo.put_back()\n", "            undo.forget()\n", "tests/tuning"),
    Guard("reset before each replay", "replays/replays.py", "            self._reset()\n            self.watchdog", "            self.watchdog", "tests/tuning tests/ranks/test_contextual.py"),
    Guard("generators are restored for the last run", "replays/replays.py", "        self._before.restore()\n        value = self.run(closure, {})", "        value = self.run(closure, {})", "tests/tuning tests/ranks/test_contextual.py"),
    Guard("a step that leaves something else is not replayed", "replays/first_run.py", "self.why_not = self.why_not or state.why_not(stepped) or self._another(value, first, sums) or state.compare()", "self.why_not = self.why_not or state.why_not(stepped) or self._another(value, first, sums)", "tests/tuning tests/ranks/test_not_replayed.py"),
    Guard("a step that gives something else is not replayed", "replays/first_run.py", "state.why_not(stepped) or self._another(value, first, sums) or state.compare()", "state.why_not(stepped) or state.compare()", "tests/tuning tests/ranks/test_not_replayed.py"),
    Guard("a failed launch is a vote", "replays/trials.py", "        self._sites.fail(site, index, CandidateFailure(kind_of(error, FailureKind.LAUNCH), reason_of(error)))\n", "        raise error\n", "tests/ranks/test_faults.py tests/ranks/test_functions.py"),
    Guard("another config stands in", "replays/trials.py", "        for index in site.order(trial.candidate):\n", "        for index in [*site.order(trial.candidate)][:1]:\n", "tests/ranks/test_faults.py tests/ranks/test_functions.py"),
    Guard("a stand-in disturbs the replay", "replays/trials.py", "            if index != trial.candidate and self._schedule and is_kept:\n                self.samples.disturb(self._replay)\n", "", "tests/tuning tests/ranks/test_faults.py tests/ranks/test_functions.py tests/ranks/test_racing.py"),
    Guard("a wrong result is out", "replays/trials.py", '            self._sites.fail(site, index, CandidateFailure(FailureKind.WRONG_RESULT, f"the result is wrong: {wrong}"))', "            pass", "tests/measure/test_wrong_configs.py tests/ranks/test_function_checks.py"),
    Guard("the winner is judged once more", "tuning/racing.py", "            if _is_right_again(context, closure):\n", "            if True:\n", "tests/ranks/test_function_checks.py tests/offline tests/measure tests/tuning"),
    Guard("a stuck device is an error", "replays/replays.py", "            if time.monotonic() - since > self._stuck_after_s:\n", "            if False:\n", "tests/ranks/test_watchdog.py tests/tuning"),
    Guard("unwritten elements show", "measure/poison.py", "            _fill(memory)\n", "            pass\n", "tests/measure"),
    Guard("free memory is poisoned", "measure/poison.py", "            blocks = [(torch.empty(each.n_bytes, dtype=torch.uint8, device=each.device), each.dtype) for each in regions * n_sets]", "            blocks = list[tuple[torch.Tensor, torch.dtype]]()", "tests/measure"),
    Guard("poison that was read is put back", "measure/poison.py", "        self._poisoned.put_back()\n        self._poisoned.forget()\n", "        self._poisoned.forget()\n", "tests/measure"),
    Guard("arguments of a checked function are put back", "measure/inputs.py", "        self.put_back(self._known)\n", "        pass\n", "tests/measure tests/tuning/test_function_inputs.py"),
    # Calls of the user's
    Guard("a batch is all ranks' or none's", "replays/online.py", "    return all(parts.values())\n", "    return any(parts.values())\n", "tests/ranks/test_online.py"),
    Guard("a call waits for word of its batch", "replays/online.py", "                self._changed.wait_for(lambda: batch.is_in_force is not None or self._is_over, _PATIENCE * self._deadline_s)\n", "", "tests/ranks/test_online.py"),
    Guard("slots are filled after a trial", "replays/online.py", "            for slot, config in places:\n                slot.put(config)\n", "", "tests/ranks/test_online.py"),
    Guard("a call of the user's zeroes nothing", "replays/trials.py", "self._zeroes = self.in_use is None and (", "self._zeroes = True and (", "tests/ranks/test_online.py"),
    Guard("nothing is at work over the budget", "search/pace.py", " and spent_s <= self.max_slowdown * self._job_s", "", "tests/search/test_pace.py"),
    Guard("plain calls are plain", "search/pace.py", "        return (place - begin) % self.n_cycle < self.n_cycle // 4\n", "        return False\n", "tests/search/test_pace.py"),
    Guard("a time with a gap of the host is none", "replays/turns.py", "                    site.has_gaps, span = True, None\n", "                    site.has_gaps = True\n", "tests/ranks/test_online_clock.py"),
    Guard("a launch of another thread is no trial", "replays/turns.py", "interception.listener_here() is not trials or ", "", "tests/ranks/test_online_clock.py"),
    Guard("times of an attempt before count", "search/site_race.py", "        self.times.update(self._attempt)\n", "", "tests/search/test_race.py"),
    Guard("the second call compiles nothing", "tuning/entering.py", "needed += [(site, variant) for variant in site.variants]", "needed += [(site, variant) for variant in site.variants[:1]]", "tests/ranks/test_online_clock.py"),
    Guard("a trial waits for the budget", "search/pace.py", "        return ceil(lacking_ms / earned_ms) if lacking_ms > 0 and earned_ms else 0\n", "        return 0\n", "tests/search/test_pace.py"),
    Guard("what trials took is charged", "search/pace.py", "            self._open[is_trial] = n + 1, sum_s + seconds\n", "", "tests/search/test_pace.py"),
    Guard("a lost count of the parser is no failure", "compiler/compilation.py", '        stack.enter_context(replaced(JITFunction, "parse", lambda own: lambda kernel: parsed(lambda: own(kernel))))\n', "", "tests/compiler/test_processes.py"),
    Guard("each kind of configs is compiled ahead", "tuning/entering.py", "if any(len(found) > 1 for found in kinds.values()) and n_early < len(replays):", "if False:", "tests/runtime/test_recording.py tests/offline"),
    Guard("a block of unknown source is not predicted", "runtime/recording.py", "if any(not is_same(first, other) for other in others):", "if False:", "tests/runtime/test_recording.py"),
    Guard("a config with a 1 launches otherwise", "configs.py", "(?!1(?![\\w.]))", "", "tests/runtime/test_recording.py"),
    Guard("a predicted launch is counted by its kernel", "tuning/compilation.py", "#{n_of[name]}", "#{n_of.total()}", "tests/runtime/test_recording.py"),
    # Other devices
    Guard("no launcher of NVIDIA's for other GPUs", "compiler/compilation.py", '        if target.backend == "cuda":', "        if True:", "tests/ranks/test_other_devices.py"),
    Guard("a record is of one runtime", "accelerator.py", 'return torch.version.cuda if kind() == "cuda" else f"{kind()} {getattr(torch.version, kind())}"', "return torch.version.cuda", "tests/test_accelerator.py"),
    Guard("a part of a GPU is told from the whole", "accelerator.py", '{properties.multi_processor_count} compute units"', 'many compute units"', "tests/test_accelerator.py"),
    # Around the step
    Guard("Triton is restored", "runtime/interception.py", "        if not listeners:\n            self.function.__code__ = self.own_code\n", "        if False:\n            self.function.__code__ = self.own_code\n", "tests/ranks/test_failed_calls.py tests/runtime tests/ranks/test_contextual.py"),
    Guard("a config that the rules drop at a size is not used there", "runtime/tunable.py", "        if texts and texts[0] in kept:\n", "        if texts:\n", "tests/ranks/test_buckets.py"),
    Guard("a trial runs only where the rules keep its config", "replays/trials.py", "            if not launch.keeps(site.configs[index]):\n                continue\n", "", "tests/ranks/test_buckets.py"),
    Guard("ranks tune what all have", "sites/sites.py", "            kept, site.record = site.keep(texts[label]), None\n", "            kept = [*range(n_before)]\n", "tests/ranks/test_differing_calls.py"),
    Guard("a bucket comes before an exact size", "runtime/interception.py", "            if config is None:  # Triton would look for the exact size\n                raise _Miss\n", "", "tests/ranks/test_buckets.py"),
    Guard("a bucket's known config is no miss", "runtime/interception.py", "if (config := launch.slot.config) is not None:  # of a bucket", "if (config := None) is not None:  # of a bucket", "tests/ranks/test_buckets.py"),
    Guard("nothing is tuned under capture", "contextual.py", "if is_new and (not self.is_waived or self.online is not None) and not is_capturing():", "if is_new and (not self.is_waived or self.online is not None):", "tests/ranks/test_calls.py tests/ranks/test_contextual.py tests/tuning"),
    Guard("a hang ends the process", "watch.py", "            elif late_s >= limit_s + self._deadline_s", "            elif late_s >= 1e9 + self._deadline_s", "tests/test_watch.py tests/ranks/test_watchdog.py"),
    Guard("a released config is out", "watch.py", "                self._sites.fail(site, i, CandidateFailure(FailureKind.STUCK, reason))\n", "                pass\n", "tests/test_watch.py tests/ranks/test_watchdog.py"),
    Guard("a held interpreter ends the process", "watch.py", "faulthandler.dump_traceback_later(_HELD * self._deadline_s, exit=True, file=self.log.log_file)", "pass", "tests/faults"),
    Guard("a closure inside one of fewer ranks is an error", "contextual.py", "        if missing := member_ranks(group) - (outer.members if outer is not None else frozenset()):", "        if missing := set[int]():", "tests/ranks/test_calls.py"),
    Guard("a class is not wrapped", "install.py", "if not isroutine(function):", "if False:", "tests/test_install.py"),
    Guard("the program stays __main__ to its end", "install.py", " = sys.modules[\"__main__\"] = ", " = ", "tests/test_install.py"),
    Guard("the end of a child says nothing", "install.py", ' and current_process().name == "MainProcess"', "", "tests/test_install.py"),
    # Files of engines
    Guard("of two configs for one size none is taken", "cli/convert.py", "if found.setdefault(key, each).config != each.config:", "if found.setdefault(key, each) is None:", "tests/cli/test_engines.py"),
    Guard("a field that a kernel does not take is told", "cli/convert.py", "        if unknown := each.config.keys() - _TAKES.get(engine, each.config.keys() - {\"pre_hook\"}):", "        if unknown := set[str]():", "tests/cli/test_engines.py"),
    Guard("a bucket that no launch would find again is an error", "runtime/buckets.py", "if type(found) not in (int, str) and (", "if False and (", "tests/runtime/test_buckets.py"),
    Guard("a file has no name that its engine does not look for", "cli/convert.py", "if name in facts and not re.fullmatch(_FACTS[name][1], facts[name]):", "if False:", "tests/cli/test_engines.py"),
    Guard("a file that is there stays", "cli/convert.py", "and not replaces:", "and False:", "tests/cli/test_convert.py"),
)
# fmt: on


def is_noticed(guard: Guard, folder: Path) -> bool:
    """True if the tests fail with the guard broken, in ``folder``, which holds a copy of the project."""
    path = folder / "dist_tune" / guard.file
    text = path.read_text()
    if text.count(guard.old) != 1:
        raise LookupError(f'"{guard.claim}": its line stands {text.count(guard.old)} times in dist_tune/{guard.file}, and must stand once')
    path.write_text(text.replace(guard.old, guard.new))
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *guard.tests.split()]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        if (code := process.wait(LIMIT_S)) in (4, 5):
            raise LookupError(f'"{guard.claim}": pytest finds no tests at {guard.tests}')
        return code != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        os.killpg(process.pid, 9) if process.poll() is None else None
        path.write_text(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Break guards, and print a line for each; the number of those that no test has noticed."""
    parser = argparse.ArgumentParser(description="break guards one after the other")
    parser.add_argument("claims", nargs="*", help="beginnings of the claims of some guards; none: all")
    parser.add_argument("--jobs", type=int, default=1, help="guards at once")
    options = parser.parse_args(arguments)
    guards = [each for each in GUARDS if not options.claims or each.claim.startswith(tuple(options.claims))]
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
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
            print(f"{'noticed' if noticed else 'SURVIVED':9}{seconds:6.0f} s  {guard.claim}", flush=True)
    print(f"{len(guards) - survived} of {len(guards)} broken guards are noticed")
    return survived


if __name__ == "__main__":
    sys.exit(main())
