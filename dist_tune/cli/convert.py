"""``dist-tune convert``: configs that words of the command line stand for, shown or written as an engine's files."""

from __future__ import annotations

import json
from pathlib import Path

from dist_tune.cache import TuningRecord
from dist_tune.cli.records import records_in
from dist_tune.cli.render import Answer, RefusedError, table, write_file
from dist_tune.cli.report import records_of
from dist_tune.offline import Engine, EngineConfig, UnfitError, config_of_record, configs_in_file, engine_files, facts_given
from dist_tune.output import amount, plain

_TOLD = {
    "vllm": "VLLM_TUNED_CONFIG_FOLDER={folder}",
    "sglang": "SGLANG_MOE_CONFIG_DIR={folder}",
    "fla": "FLA_CONFIG_DIR={folder} FLA_CACHE_MODE=strict",
    "aiter": "its own folder of configs, or dist_tune.offline.load_config",
}
"""How an engine is told of the folder."""


def convert(sources: list[str], engine: Engine | None, folder: Path | None, words: list[str], *, replaces: bool) -> Answer:
    """Show the configs of sources, or write them as files of ``engine`` below ``folder``: none that is there, unless ``replaces``."""
    try:
        given = facts_given(words)
        configs = [each for source in sources for each in _configs_of(Path(source))]
        files = engine_files(engine, configs, given) if engine else {}
    except UnfitError as error:
        raise RefusedError(str(error)) from None
    if not configs:
        raise RefusedError(f"there is no .json file in {', '.join(sources)}")
    if engine is None:
        rows = [{"facts": each.facts, "key": each.key, "config": each.config, "where": each.where} for each in configs]
        shown = [{"key": json.dumps(each.key), **each.config, **each.facts} for each in configs]
        names = dict.fromkeys(name for each in shown for name in each)
        return Answer({"configs": rows}, table([{name: plain(each[name]) if name in each else "" for name in names} for each in shown]))
    paths = {(folder or Path()) / name: values for name, values in files.items()}
    if folder and (there := [path for path in paths if path.exists()]) and not replaces:
        raise RefusedError(f"{there[0]} exists: --force replaces it; named as a SOURCE as well, its configs stay")
    lines = []
    for path, values in paths.items():
        keys = [key for key, each in values.items() if isinstance(each, dict) and key != "autotune_entries"]
        keys += [json.dumps(each["autotune_key"]) for each in values.get("autotune_entries", {}).values()]
        lines.append(f"{path}: {amount(len(keys), 'config')}, for {plain(', '.join(keys))}")
        if folder:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, f"{json.dumps(values, indent=4)}\n".encode())
    told = f"{engine} finds it by {_TOLD[engine].format(folder=folder)}" if folder else "nothing is written: -o FOLDER does it"
    return Answer({"written": bool(folder), "files": {str(path): values for path, values in paths.items()}}, [*lines, told])


def _configs_of(path: Path) -> list[EngineConfig]:
    if path.is_dir():
        return [each for file in sorted(path.rglob("*.json")) for each in _configs_of(file)]
    if path.exists() and not any(isinstance(each, TuningRecord) for _, each in records_in(path)):
        return configs_in_file(path)
    return [config_of_record(each) for each in records_of(str(path))[0]]
