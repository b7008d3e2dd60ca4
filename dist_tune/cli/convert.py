"""``dist-tune convert``: config files of vLLM, SGLang, FLA and aiter, and records, shown or written
as one engine's files.

Sources, names and keys are told as they are in the engines' own readers:

    vLLM 0.33.0       vllm/model_executor/layers/fused_moe/fused_moe.py
    SGLang 0.5.23     sglang/srt/layers/moe/moe_runner/triton_utils/fused_moe_triton_config.py
    FLA bc3b101d      fla/ops/utils/cache.py, scripts/utils/autotune_export.py
    aiter e4048607    aiter/ops/triton/utils/moe_config_utils.py, gemm_config_utils.py
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from dist_tune.cli.records import records_in
from dist_tune.cli.render import Answer, RefusedError, table, write_file
from dist_tune.cli.report import records_of
from dist_tune.files import read_regular
from dist_tune.log import amount, plain
from dist_tune.records import TuningRecord

_SIZE = re.compile(r"[1-9]\d{0,17}")
_FACTS = {
    "E": ("8", r"[1-9]\d*"),
    "N": ("512", r"[1-9]\d*"),
    "device_name": ("NVIDIA_H200", r"[^,/]+?"),
    "dtype": ("fp8_w8a8", r"\w+?"),
    "block_shape": ("[128,128]", r"\[\d+, ?\d+\]"),
    "per_channel_quant": ("True", "True"),
    "down": ("True", "True"),
    "triton_version": ("3.6.0", "[^/]+"),
    "kernel": ("chunk_kernel", "[^/]+"),
    "name": ("gfx942-MOE-DEFAULT", "[^/]+"),
    "size": ("0", r"\d+"),
}
"""An example and the pattern of each.

``name`` is that of aiter's file without .json, ``size`` the place of the size in a whole key.
"""
_MOE_NAME = re.compile(
    r"{E},{N},{device_name}(,{dtype})?(,{block_shape})?(,{per_channel_quant})?(?P<down>_down)?\.json".format(
        **{name: f"{name}=(?P<{name}>{pattern})" for name, (_, pattern) in _FACTS.items()}
    )
)
_NO_DTYPES = ("bf16", "bfloat16", "fp16", "float16")
"""Weights of these are in files whose names have no dtype."""
# The last is FLA's default_config.
_CLASS = re.compile(r"M_[LG]EQ_[1-9]\d{0,17}|any|(small|medium|large)(_\w+)?|default")
_AITER_BOUNDS = (
    "1",
    "4",
    "8",
    "16",
    "32",
    "64",
    "128",
    "256",
    "512",
    "1024",
    "2048",
    "4096",
    "8192",
)
"""Those of M_LEQ_<n> that aiter's reader looks for."""
_FINDS_BY = {
    "vllm": ["E", "N", "device_name"],
    "sglang": ["E", "N", "device_name", "triton_version"],
    "fla": ["kernel"],
    "aiter": ["name"],
}
_TOLD = {
    "vllm": "VLLM_TUNED_CONFIG_FOLDER",
    "sglang": "SGLANG_MOE_CONFIG_DIR",
    "fla": "FLA_CACHE_MODE=strict FLA_CONFIG_DIR",
}
"""Variables that name the folder; aiter has none."""
_MOE_NEEDS = [
    "BLOCK_SIZE_M",
    "BLOCK_SIZE_N",
    "BLOCK_SIZE_K",
    "GROUP_SIZE_M",
    "num_warps",
    "num_stages",
]
_NEEDS = {"vllm": _MOE_NEEDS, "sglang": _MOE_NEEDS, "fla": _MOE_NEEDS[-2:], "aiter": []}
_MOE_TAKES = {*_MOE_NEEDS, "num_ctas", "maxnreg", "waves_per_eu", "matrix_instr_nonkdim", "kpack"}
_TAKES = {"vllm": _MOE_TAKES | {"SPLIT_K", "grf_mode"}, "sglang": _MOE_TAKES | {"USE_TMA"}}
"""Both hand a config to their kernel as keywords: another name there would be an error in each
forward pass.
"""
_TRITON = {
    "num_warps": ...,
    "num_stages": ...,
    "num_ctas": 1,
    "maxnreg": None,
    "pre_hook": None,
    "ir_override": None,
}
"""Fields of a ``triton.Config`` beside its constants, with their defaults."""
# In a record's key, a word without quotes: a dtype, or another plain string.
_KEY_WORD = re.compile(
    r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?<![\w.])(?!(?:None|True|False|inf|nan)\b)[A-Za-z_][\w.-]*"""
)


class EngineConfig(NamedTuple):
    """One config.

    Its key is a size, "16"; the name of a class of sizes, or "default"; or a list, which is a whole
    tuning key.
    """

    where: str
    """File or record, for messages."""
    facts: dict[str, str]
    """What is known beside it, as files spell it: kernel, E, N, device_name, dtype, ..."""
    key: Any
    config: dict[str, Any]


def convert(
    sources: list[str], engine: str | None, folder: Path | None, words: list[str], *, replaces: bool
) -> Answer:
    """Show the configs of sources, or write them as files of ``engine`` below ``folder``: none that
    is there, unless ``replaces``.
    """
    given = facts_given(words)
    configs = [each for source in sources for each in _configs_of(Path(source))]
    if not configs:
        raise RefusedError(
            f"there is no config in {', '.join(sources)} (of a folder, .json files count)"
        )
    if engine is None:
        shown = [
            {
                "key": config.key if isinstance(config.key, str) else json.dumps(config.key),
                **config.config,
                **config.facts,
            }
            for config in configs
        ]
        names = dict.fromkeys(name for each in shown for name in each)
        lines = table(
            [{name: plain(each[name]) if name in each else "" for name in names} for each in shown]
        )
        return Answer({"configs": [config._asdict() for config in configs]}, lines)
    files = {
        (folder or Path()) / name: values
        for name, values in engine_files(engine, configs, given).items()
    }
    if folder and (there := [path for path in files if path.exists()]) and not replaces:
        raise RefusedError(
            f"{there[0]} exists: --force replaces it; named as a SOURCE as well, its configs stay"
        )
    lines = []
    for path, values in files.items():
        keys = [
            key
            for key, value in values.items()
            if isinstance(value, dict) and key != "autotune_entries"
        ]
        keys += [
            json.dumps(each["autotune_key"]) for each in values.get("autotune_entries", {}).values()
        ]
        lines.append(f"{path}: {amount(len(keys), 'config')}, for {plain(', '.join(keys))}")
        if folder:
            path.parent.mkdir(parents=True, exist_ok=True)
            if copy := write_file(
                path, f"{json.dumps(values, indent=4)}\n".encode(), keeps_old=True
            ):
                lines.append(f"the file that was there is {copy}")
    by = (
        f"{_TOLD[engine]}={folder}"
        if engine in _TOLD
        else "its own folder of configs, or dist_tune.offline.load_config"
    )
    told = f"{engine} finds it by {by}" if folder else "nothing is written: -o FOLDER does it"
    return Answer(
        {"written": bool(folder), "files": {str(path): values for path, values in files.items()}},
        [*lines, told],
    )


def facts_given(words: list[str]) -> dict[str, str]:
    """Facts as people write them, "E=8", "block_shape=[128, 128]", and sizes of classes,
    "any=4096".
    """
    given = {
        name: text.replace(", ", ",").replace(" ", "_")
        for name, _, text in (word.partition("=") for word in words)
    }
    for name, text in given.items():
        if not text or (name not in _FACTS and not _CLASS.fullmatch(name)):
            raise RefusedError(
                f"--set {name}: need NAME=VALUE of {', '.join(_FACTS)}, or a class and its size"
                " like any=4096"
            )
    return given


def _configs_of(path: Path) -> list[EngineConfig]:
    if path.is_dir():
        return [each for file in sorted(path.rglob("*.json")) for each in _configs_of(file)]
    if path.exists() and not any(isinstance(each, TuningRecord) for _, each in records_in(path)):
        return configs_in_file(path)
    return [config_of_record(each) for each in records_of(str(path))]


def configs_in_file(path: Path) -> list[EngineConfig]:
    """The configs of an engine's file. RefusedError if it is none."""
    try:
        values = json.loads(read_regular(path))
        if not isinstance(values, dict) or not values:
            raise ValueError("no JSON object of configs")
        facts, keyed = (
            {"triton_version": values.pop("triton_version", None)},
            list[tuple[Any, Any]](values.items()),
        )
        if name := _MOE_NAME.fullmatch(path.name):
            folder = re.fullmatch(r"triton_(.+)", path.parent.name)  # SGLang's
            version = facts["triton_version"] or (folder and folder[1].replace("_", "."))
            facts = name.groupdict() | {"down": name["down"] and "True", "triton_version": version}
            if wrong := [size for size in values if not _SIZE.fullmatch(size)]:
                raise ValueError(f"{wrong[0]!r} is no size, need a whole number of tokens")
        elif values.keys() & {"autotune_entries", "default_config"}:
            facts["kernel"], keyed = path.stem, _of_fla(values)
        elif unknown := [key for key in values if not _CLASS.fullmatch(key)]:
            told = (
                "of vLLM's and SGLang's files only those of fused MoE are read"
                " (E=...,N=...,device_name=....json)"
            )
            raise ValueError(
                f"{told}; it is none of these or FLA's, and {unknown[0]!r} is no class of aiter's"
            )
        else:
            facts["name"] = path.stem
        for key, config in keyed:
            if (
                not isinstance(config, dict)
                or not config
                or any(isinstance(value, dict | list) for value in config.values())
            ):
                raise ValueError(f"{key!r} has no config, need an object of plain values by name")
    except (AttributeError, KeyError, TypeError) as error:
        raise RefusedError(
            f"{path}: not the entries and configs that FLA reads ({error})"
        ) from None
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{path}: {error}") from None
    known = {name: str(value).replace(", ", ",") for name, value in facts.items() if value}
    return [EngineConfig(f"{path} {key}", known, key, config) for key, config in keyed]


def _of_fla(values: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Each whole key, or "default", with its config as others spell one."""
    found = [
        (each["autotune_key"], each["config"])
        for each in values.get("autotune_entries", {}).values()
    ]
    found += [("default", values["default_config"])] if values.get("default_config") else []
    return [
        (key, {**config.pop("kwargs"), **{n: v for n, v in config.items() if v != _TRITON[n]}})
        for key, config in found
    ]


def config_of_record(record: TuningRecord) -> EngineConfig:
    """The winner of a record, with its whole key.

    RefusedError where that holds other than plain values, as a function's may.
    """
    made_on, fields = record.environment, record.best.fields
    where = f"the record of {record.kernel} {record.key} of {record.tuned_at:%Y-%m-%d %H:%M:%S} UTC"
    try:
        key = ast.literal_eval(_KEY_WORD.sub(lambda word: word[1] or repr(word[0]), record.key))
    except (ValueError, SyntaxError, RecursionError):
        raise RefusedError(f"{where}: its key holds other than plain values") from None
    # Also those of a function's one triton.Config, "config.BLOCK".
    if len({name.rpartition(".")[0] for name in fields}) == 1:
        fields = {name.rpartition(".")[2]: value for name, value in fields.items()}
    facts = {
        "kernel": record.kernel.rpartition(".")[2],
        "device_name": made_on.device.partition(",")[0].replace(" ", "_"),
    }
    return EngineConfig(where, facts | {"triton_version": made_on.triton}, key, fields)


def engine_files(
    engine: str, configs: list[EngineConfig], given: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Files for an engine: path in the folder that the engine is told of -> content, to be written
    as JSON.

    ``given``: facts that the configs do not have, or others than theirs, and sizes of classes; see
    ``facts_given``.

    Raises:
        RefusedError: a fact is missing, a field does not fit, or two configs are for one size.
    """
    files: dict[str, list[EngineConfig]] = {}
    for config in configs:
        if engine == "fla" and config.key != "default" and not isinstance(config.key, list):
            raise RefusedError(
                f"{config.where} is a size alone: FLA finds a config by the whole key of its"
                " kernel, as a record has it"
            )
        if lacking := [name for name in _NEEDS[engine] if type(config.config.get(name)) is not int]:
            raise RefusedError(
                f"{config.where}: {lacking[0]} is {config.config.get(lacking[0])}, and {engine}"
                " needs a whole number"
            )
        if unknown := config.config.keys() - _TAKES.get(
            engine, config.config.keys() - {"pre_hook"}
        ):
            raise RefusedError(
                f"{config.where}: {engine} takes no {min(unknown)}, which is"
                f" {config.config[min(unknown)]}"
            )
        files.setdefault(_path_for(engine, config.facts | given, config.where), []).append(config)
    return {path: _content(engine, found, given) for path, found in files.items()}


def _path_for(engine: str, facts: dict[str, str], where: str) -> str:
    if missing := [name for name in _FINDS_BY[engine] if name not in facts]:
        raise RefusedError(
            f"{where} does not say what {engine} finds a file by:"
            f" {' '.join(f'--set {name}=...' for name in missing)}"
        )
    for name in _FACTS if engine in _TAKES else _FINDS_BY[engine]:
        if name in facts and not re.fullmatch(_FACTS[name][1], facts[name]):
            raise RefusedError(
                f"{where}: {name}={facts[name]} is nothing that {engine} looks for, need one like"
                f" {name}={_FACTS[name][0]}"
            )
    if engine == "vllm" and (unfit := facts.keys() & {"per_channel_quant", "down"}):
        raise RefusedError(f"{where}: vllm has no files for {min(unfit)}")
    if engine == "vllm" and "H200" in facts["device_name"].split("_"):
        facts = facts | {"device_name": "NVIDIA_H200"}
    if engine == "sglang" and "block_shape" in facts:
        facts = facts | {"block_shape": facts["block_shape"].replace(",", ", ")}
    parts = [
        f"{name}={facts[name]}"
        for name in [*_FACTS][:6]
        if name in facts and facts[name] not in _NO_DTYPES
    ]
    down = "_down" if "down" in facts else ""
    name = (
        f"{','.join(parts)}{down}.json"
        if engine in _TAKES
        else f"{facts[_FINDS_BY[engine][0]]}.json"
    )
    return (
        f"configs/triton_{facts['triton_version'].replace('.', '_')}/{name}"
        if engine == "sglang"
        else name
    )


def _content(engine: str, configs: list[EngineConfig], given: dict[str, str]) -> dict[str, Any]:
    facts, found = dict(given), dict[str, EngineConfig]()
    keyed = [config for config in configs if isinstance(config.key, list)]
    place = (
        _place([each.key for each in keyed], keyed[0].where, given.get("size"))
        if keyed and engine != "fla"
        else -1
    )
    for config in configs:
        for name, value in config.facts.items():
            if facts.setdefault(name, value) != value and name not in given:
                raise RefusedError(
                    f"{config.where}: {name} is {value}, and {facts[name]} in {configs[0].where}:"
                    " one file has one"
                )
        key = _key_for(engine, config, place, given)
        if found.setdefault(key, config).config != config.config:
            raise RefusedError(
                f"two configs for {key}: {found[key].where} and {config.where}; leave one out"
            )
    version = {
        name: value
        for name, value in facts.items()
        if name == "triton_version" and engine in ("vllm", "fla")
    }
    if engine == "fla":
        default = (
            {"default_config": _of_triton(found.pop("default").config)}
            if "default" in found
            else {}
        )
        entries = {
            name: {"autotune_key": each.key, "config": _of_triton(each.config)}
            for name, each in sorted(found.items())
        }
        return {"kernel_name": facts["kernel"], **version, **default, "autotune_entries": entries}
    return version | {
        key: found[key].config for key in (found if engine == "aiter" else sorted(found, key=int))
    }


def _of_triton(config: dict[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in config.items() if name in _TRITON}
    return {
        "kwargs": {name: value for name, value in config.items() if name not in own},
        "num_ctas": 1,
        **own,
    }


def _key_for(engine: str, each: EngineConfig, place: int, given: dict[str, str]) -> str:
    """The name of the config in the engine's file: of FLA the hash of the key, of aiter the class,
    of the others the size.
    """
    key = each.key
    if engine == "fla":
        spelled = json.dumps(key, separators=(",", ":"), sort_keys=True).encode()
        return (
            "default"
            if key == "default"
            else hashlib.md5(spelled, usedforsecurity=False).hexdigest()
        )
    if engine == "aiter" and isinstance(key, str) and not _SIZE.fullmatch(key) and key != "default":
        return key
    size = str(key[place]) if isinstance(key, list) else given.get(key, key.removeprefix("M_LEQ_"))
    if not _SIZE.fullmatch(size):
        raise RefusedError(f"{each.where}: the class {key} has no size: --set {key}=...")
    named = [
        name
        for name, value in given.items()
        if value == size and _CLASS.fullmatch(name) and name != "default"
    ]
    if engine == "aiter" and not named and size not in _AITER_BOUNDS:
        raise RefusedError(
            f"{each.where}: aiter looks for no M_LEQ_{size}, unless its caller has that bound:"
            f" --set M_LEQ_{size}={size}"
        )
    return [*named, f"M_LEQ_{size}"][0] if engine == "aiter" else size


def _place(keys: list[list[Any]], where: str, given: str | None) -> int:
    """The place of the size in whole keys: of the only number that differs, or of the given or only
    one in keys that are alike.
    """
    numbers = [
        k for k, value in enumerate(keys[0]) if type(value) is int and given in (None, str(k))
    ]
    differing = [
        k
        for k in range(max(map(len, keys)))
        if len({json.dumps(key[k : k + 1]) for key in keys}) > 1
    ]
    if len(places := differing or numbers) != 1 or places[0] not in numbers:
        told = "Name records that differ in it alone, or --set size=<its place, from 0>"
        raise RefusedError(
            f"{where}: which number of its key {json.dumps(keys[0])} is the size? {told}"
        )
    return places[0]
