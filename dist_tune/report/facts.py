"""A story in words: facts that the page, the text and the JSON document show alike, the text, and the state of what runs. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC
from pathlib import Path
from statistics import fmean
from typing import Any

from dist_tune.cache import TuningRecord, fates, gain, gain_told, lead, parts_of, short_config, slowest_rank
from dist_tune.output import amount, events, lead_words, printable, site_name
from dist_tune.report.story import RankStory, SiteStory, Story, TuningStory, numbers, shortened

LATE_S = 5.0
"""Without an event, after which a rank is named."""
_MAX_TUNINGS = 60
"""In the head."""
_MAX_SITES = 12
_MAX_RANKS = 8
"""Sites and ranks of a tuning under way that are named."""


def summary(story: Story) -> dict[str, Any]:
    """All of it for programs: a JSON document."""
    titles = list(dict.fromkeys(shortened(tuning.title, 80) for tuning in story.tunings.values()))
    title = ", ".join(titles[:3]) + f" and {len(titles) - 3} more" * (len(titles) > 3)
    tunings = [_tuning(story, each) for each in list(story.tunings.values())[:_MAX_TUNINGS]]
    words = {each["name"]: {what: each[what] for what in ("step", "took", "meetings") if each[what]} for each in tunings}
    heads = {name: "; ".join(f"{what} {text}" for what, text in of.items()) for name, of in words.items() if of}
    facts = machine(story) | (heads if len(tunings) > 1 else next(iter(words.values()), {}))
    return {"title": title, "facts": facts, "tunings": tunings, "notes": story.damage + story.notes, "sites": rows(story)}


def machine(story: Story) -> dict[str, str]:
    """Ranks, devices and versions, from headers of events or from records."""
    if story.runs:
        run = story.runs[min(story.runs)]
        hosts = len({each.host for each in story.runs.values()})
        devices = ", ".join(dict.fromkeys(each.device for each in story.runs.values()))
        return {
            "begun": run.date,
            "ranks": f"{amount(run.world_size, 'rank')} on {amount(hosts, 'host')}, {devices}",
            "versions": ", ".join(f"{name} {version}" for name, version in run.versions.items()),
            "command": " ".join([Path(run.command[0]).name, *run.command[1:]] if run.command else []),
        }
    records = [site.record for _, site in story.sites if site.record is not None]
    if not records:
        return {}
    where, n_others = records[0].environment, len({record.environment for record in records}) - 1
    return {
        "tuned": f"{max(record.tuned_at for record in records).astimezone(UTC):%Y-%m-%d %H:%M} UTC",
        "ranks": f"{amount(where.world_size, 'rank')}, {where.device}" + f", and {n_others} other machines" * bool(n_others),
        "versions": f"python {where.python}, torch {where.torch}, triton {where.triton}, cuda {where.cuda or 'none'}",
    }


def _tuning(story: Story, tuning: TuningStory) -> dict[str, Any]:
    """Steps and seconds of a tuning, in numbers and in words. Texts are empty where nothing is told."""
    end, step, took, meetings = tuning.end, "", "", ""
    if end.first_ms and end.best_ms:
        steps = f"{end.first_ms:.4g} ms with the first configs, {end.best_ms:.4g} ms with the winners"
        step = f"{steps}: {end.first_ms / end.best_ms:.2f}x"
    if parts := {name: seconds for name, seconds in parts_of(end.seconds).items() if name != "other" or seconds > 0.005}:
        told = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())
        took = f"{end.seconds.get('total') or sum(parts.values()):.1f} s ({told}), {amount(end.n_replays, 'replay')}"
    if end.seconds.get("meetings"):
        meetings = f"{end.seconds['meetings']:.2f} s, a part of the phases"
    return {
        "name": shortened(story.name_of(tuning), 80), "first_ms": end.first_ms, "best_ms": end.best_ms, "step": step, "took": took,
        "meetings": meetings, "came_last": stragglers(tuning),
    }  # fmt: skip


def stragglers(tuning: TuningStory) -> str:
    """Ranks that came last to meetings: "rank 3 (9 of 12 meetings, the others waited 1.2 s)"; empty for a single rank.

    By durations alone: who waits least at a meeting came last. Clocks of different hosts are never compared. The wait is the mean
    of the other ranks', added over the meetings to which the rank came last.
    """
    ranks = [(rank.rank, [each.seconds for each in met]) for rank in tuning.ranks.values() if (met := rank.of(events.Met))]
    n_meetings = min((len(seconds) for _, seconds in ranks), default=0)
    n_last, waited_s = Counter[int](), defaultdict[int, float](float)
    for k in range(n_meetings if len(ranks) > 1 else 0):
        (least_s, last), *others = sorted((seconds[k], rank) for rank, seconds in ranks)
        n_last[last] += 1
        waited_s[last] += fmean(seconds for seconds, _ in others) - least_s
    worst = sorted((each for each in waited_s.items() if each[1] >= 0.001), key=lambda each: -each[1])[:4]
    return ", ".join(f"rank {rank} ({n_last[rank]} of {n_meetings} meetings, the others waited {s:.3g} s)" for rank, s in worst)


def messages(told: Sequence[events.Told], story: Story, limit: int) -> list[str]:
    """Lines of the log, each once with the ranks that wrote it, and with names of sites in place of labels; at most ``limit``."""
    names = {f"site={t.sites[number].met.label}": name for t in story.tunings.values() for number, name in t.site_names.items()}
    ranks = defaultdict[tuple[str, str], set[int]](set)
    for each in told:
        text = each.text
        for label in sorted(names, key=len, reverse=True) if "site=" in text else ():  # one label may begin with another
            text = text.replace(label, names[label])
        ranks[each.level, text].add(each.rank)
    found = list(ranks.items())[:limit]
    return [f"rank{'s' * (len(writers) > 1)} {numbers(writers)}, {level}: {text}" for (level, text), writers in found]


def rows(story: Story) -> list[dict[str, Any]]:
    """A row for each site, in the order of ``story.sites``. Texts are empty, and numbers None, where the story does not tell them."""
    found: list[dict[str, Any]] = []
    for tuning in story.tunings.values():
        of = {"closure": tuning.closure, "tuning": story.name_of(tuning) if len(story.tunings) > 1 else ""}
        for number, name in tuning.site_names.items():
            found.append({"number": len(found) + 1, "label": name, **of, **_row(tuning.sites[number])})
    return found


def _row(site: SiteStory) -> dict[str, Any]:
    record, won, rung = site.record, site.won, site.rung
    row: dict[str, Any] = {"n_pruned": site.met.n_pruned, "record_id": won.record_id if won else ""}
    if record is None:
        best = f"; best so far: {site.config(rung.best)}" if rung else ""
        left = f", {rung.n_left} left in the race" if rung else ""
        return row | {
            **dict.fromkeys(("winner", "gain_words", "confidence", "slowest_rank"), ""), "gain": None, "first_ms": None,
            "ms": rung.best_ms if rung else None, "reason": f"not settled{best}",
            "outcomes": f"{len(site.met.configs)} candidates, {site.n_dropped} cannot run{left}",
        }  # fmt: skip
    return row | {
        "winner": short_config(record.best),
        "ms": record.best.latency_ms,
        "gain": gain(record),
        "gain_words": gain_told(record),
        "first_ms": record.candidates[0].latency_ms,
        "confidence": confidence(record),
        "reason": (won.reason if won else "") or record.reason,
        "outcomes": fates(record).text,
        "slowest_rank": slowest_rank(record),
    }


def confidence(record: TuningRecord) -> str:
    """The lead over the fastest other kernel, beside the noise: "2.1 % ahead of the next kernel, 3.0 x the noise"."""
    if (found := lead(record)) is None:
        return "nothing to compare with"
    ahead, noise = found
    words = f"{lead_words(ahead).removesuffix(' kernel')} kernel"
    if abs(ahead) <= noise:
        return f"{words}, within the noise ({100 * noise:.1f} %)"
    return f"{words}, {abs(ahead) / noise:.1f} x the noise" if noise else words


def text(story: Story) -> str:
    """The head, then a few lines for each site."""
    told = summary(story)
    lines = [f"Tuning of {told['title']}", *(f"  {name}: {value}" for name, value in told["facts"].items())]
    for each in told["tunings"]:
        of = f" of {each['name']}" * (len(told["tunings"]) > 1)
        lines += [f"  came last to meetings{of}: {each['came_last']}"] * bool(each["came_last"])
    lines += [f"  note: {note}" for note in told["notes"]]
    lines += [f"  {shortened(each)}" for each in messages(story.messages, story, 20)]
    name = ""
    for row in told["sites"]:
        lines += ["", f"{row['tuning']}:"] * (row["tuning"] != name)
        name = row["tuning"]
        lines += ["", *_of_site(row)]
    return "".join(f"{printable(line)}\n" for line in lines)


def _of_site(row: dict[str, Any]) -> list[str]:
    times = f"{row['ms']:.4g} ms" if row["ms"] is not None else ""
    reasons = "; ".join(dict.fromkeys(filter(None, (row["reason"], row["confidence"]))))
    lines = [
        f"{row['label']}  {', '.join(filter(None, [times, row['gain_words']]))}".rstrip(),
        row["winner"] and f"  {row['winner']}",
        f"  {row['outcomes']}" + f"; {row['n_pruned']} more pruned before" * bool(row["n_pruned"]),
        f"  {'chosen: ' * bool(row['winner'])}{reasons}",
        row["slowest_rank"] and f"  slowest rank: {row['slowest_rank']}",
        row["record_id"] and f"  all of it: dist-tune show {row['record_id']}",
    ]
    return [line for line in lines if line]


def progress_lines(story: Story, now: float, late_s: float = LATE_S) -> list[str]:
    """The tunings under way, or the last one that has ended. ``now``: seconds since 1970."""
    tunings = [each for each in story.tunings.values() if each.ranks]
    if not tunings:
        return ["no tuning has begun yet"]
    shown = [each for each in tunings if each.is_under_way][-4:] or tunings[-1:]
    lines = [line for tuning in shown for line in _of_tuning(tuning, now, late_s)]
    lines += [shortened(each) for each in messages(story.messages[-3:], story, 3)]
    return [printable(line) for line in lines]


def _of_tuning(tuning: TuningStory, now: float, late_s: float) -> list[str]:
    ranks, n_ranks = list(tuning.ranks.values()), tuning.world_size
    phases, n_replays = tuning.teller.of(events.PhaseBegun), len(tuning.teller.of(events.Replayed))
    n_done, phase = sum(rank.done is not None for rank in ranks), tuning.teller.phase
    told = [f"ended on {n_done} of {len(ranks)} ranks" if n_done and tuning.is_under_way else phase]
    if phase == "compile":
        told.append(f"{sum(len(rank.of(events.Compiled)) for rank in ranks)} compiled")
    elif not n_done:
        bound = phases[-1].bound if phases else None
        told.append(f"replay {n_replays}" + f" of at most {bound}" * bool(bound and n_replays <= bound))
    told.append(amount(len(ranks), "rank") if len(ranks) >= n_ranks else f"{len(ranks)} of {n_ranks} ranks")
    end = now if tuning.is_under_way else max(rank.last_at for rank in ranks)
    told.append(_lasting(end - min(rank.told[0].at for rank in ranks)))
    lines = [f"{tuning.title}: {', '.join(told)}"]
    for number, name in list(tuning.site_names.items())[:_MAX_SITES]:
        site = tuning.sites[number]
        if site.won is not None:
            state = f"winner {site.config(site.won.winner)}, {site.won.reason}"
        elif rung := site.rung:
            state = f"{rung.n_left} of {len(site.met.configs)} left, best so far {rung.best_ms:.4g} ms {site.config(rung.best)}"
        else:
            state = f"{len(site.met.configs)} candidates, {site.n_dropped} dropped"
        lines.append(f"  {name}: {state}")
    if len(tuning.sites) > _MAX_SITES:
        lines.append(f"  and {len(tuning.sites) - _MAX_SITES} more sites")
    quiet = [rank for rank in ranks if now - rank.last_at >= late_s and not rank.done] if tuning.is_under_way else []
    lines += [_silence(rank, now) for rank in sorted(quiet, key=lambda rank: rank.last_at)[:_MAX_RANKS]]
    return [*lines, *[f"  and {len(quiet) - _MAX_RANKS} more ranks"] * (len(quiet) > _MAX_RANKS)]


def _silence(rank: RankStory, now: float) -> str:
    """A rank that has told nothing for some time: for how long, where it is, and which launches have not come back, if any."""
    where = f"last event {_lasting(now - rank.last_at)} ago, in {rank.phase}, replay {len(rank.of(events.Replayed))}"
    sites = [(each.candidate, rank.sites[each.site]) for each in rank.started[:_MAX_SITES] if each.site in rank.sites]
    runs = ", ".join(f"candidate {i} ({site.config(i)}) of {site_name(site.met.kernel, site.met.key)}" for i, site in sites)
    return f"  rank {rank.rank} is late: {where}" + f", first run of {runs}" * bool(runs)


def _lasting(seconds: float) -> str:
    """A duration in the largest unit of which there are five: "43 s", "12 min", "266 d"."""
    unit, length_s = next((each for each in (("d", 86400), ("h", 3600), ("min", 60)) if seconds >= 5 * each[1]), ("s", 1))
    return f"{seconds / length_s:.0f} {unit}"
