"""Config files of engines: what those of vLLM, SGLang, FLA and aiter hold, and how each engine spells and finds them.

Knows files as values; neither the cache nor where files are written. Read from the engines' own readers:

    vLLM    vllm-project/vllm, vllm/model_executor/layers/fused_moe/fused_moe.py (get_config_file_name, get_moe_configs), 0.33.0
    SGLang  sgl-project/sglang, python/sglang/srt/layers/moe/moe_runner/triton_utils/fused_moe_triton_config.py, 0.5.23
    FLA     fla-org/flash-linear-attention, fla/ops/utils/cache.py, scripts/utils/autotune_export.py, bc3b101d
    aiter   ROCm/aiter, aiter/ops/triton/utils/moe_config_utils.py and gemm_config_utils.py, e4048607
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dist_tune.cache import TuningRecord
from dist_tune.files import read_regular

Engine = Literal["vllm", "sglang", "fla", "aiter"]

_MOE_NAME = re.compile(
    r"E=(?P<E>[1-9]\d*),N=(?P<N>[1-9]\d*),device_name=(?P<device_name>[^,/]+?)(,dtype=(?P<dtype>\w+?))?"
    r"(,block_shape=(?P<block_shape>\[\d+, ?\d+\]))?(,per_channel_quant=(?P<per_channel_quant>True))?(?P<down>_down)?\.json"
)
_SIZE = re.compile(r"[1-9]\d{0,17}")
_FACTS = ("E", "N", "device_name", "dtype", "block_shape", "per_channel_quant", "down", "triton_version", "kernel", "name", "size")
"""``name`` is that of aiter's file without .json, ``size`` the place of the size in a whole key, from 0."""
_CLASS = re.compile(r"M_[LG]EQ_[1-9]\d{0,17}|any|(small|medium|large)(_\w+)?|default")  # the last is FLA's default_config
_AITER_BOUNDS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Those of M_LEQ_<n> that aiter's reader looks for."""
_FINDS_BY = {"vllm": ["E", "N", "device_name"], "sglang": ["E", "N", "device_name", "triton_version"], "fla": ["kernel"], "aiter": ["name"]}
_MOE_NEEDS = ["BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages"]
_NEEDS = {"vllm": _MOE_NEEDS, "sglang": _MOE_NEEDS, "fla": _MOE_NEEDS[-2:], "aiter": []}
_MOE_TAKES = {*_MOE_NEEDS, "num_ctas", "maxnreg", "waves_per_eu", "matrix_instr_nonkdim", "kpack"}
_TAKES = {"vllm": _MOE_TAKES | {"SPLIT_K", "grf_mode"}, "sglang": _MOE_TAKES | {"USE_TMA"}}
"""Both hand a config to their kernel as keywords: another name there would be an error in each forward pass."""
_TRITON = {"num_warps": ..., "num_stages": ..., "num_ctas": 1, "maxnreg": None, "pre_hook": None, "ir_override": None}
"""Fields of a ``triton.Config`` beside its constants, with their defaults."""
# In a record's key, a word without quotes: a dtype, or another plain string.
_KEY_WORD = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?<![\w.])(?!(?:None|True|False|inf|nan)\b)[A-Za-z_][\w.-]*""")


class UnfitError(ValueError):
    """A file is none of these engines', or what it holds does not fit another's. One line: the file, the field, and what is needed."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One config, for one size or key."""

    where: str
    """File or record, for messages."""
    facts: dict[str, str]
    """What is known beside it, as files spell it: kernel, E, N, device_name, dtype, ..."""
    key: Any
    """A size; the name of a class of sizes, or "default"; or a list, which is a whole tuning key."""
    config: dict[str, Any]


def facts_given(words: Iterable[str]) -> dict[str, str]:
    """Facts as people write them, "E=8", "block_shape=[128,128]", and sizes of classes, "any=4096". Raises UnfitError."""
    given = {}
    for word in words:
        name, _, text = word.partition("=")
        if not text or (name not in _FACTS and not _CLASS.fullmatch(name)):
            raise UnfitError(f"--set {word}: need NAME=VALUE of {', '.join(_FACTS)}, or a class and its size like any=4096")
        given[name] = _spelled(name, text)
    return given


def _spelled(name: str, text: str) -> str:
    """A fact as all engines spell it: the device of torch's "NVIDIA H200" is NVIDIA_H200 to them."""
    return text.replace(" ", "_" if name == "device_name" else "")


# -- reading -----------------------------------------------------------------------------------------------------------


def configs_in_file(path: Path) -> list[EngineConfig]:
    """The configs of an engine's file.

    Raises:
        UnfitError: it is none, or holds what its engine would not read as it stands.
        OSError: it cannot be read.
    """
    try:
        values = json.loads(read_regular(path), object_pairs_hook=_once)
        if not isinstance(values, dict) or not values:
            raise UnfitError("no JSON object of configs")
        facts, keyed = {"triton_version": values.get("triton_version")}, list[tuple[Any, Any]](values.items())
        if name := _MOE_NAME.fullmatch(path.name):
            folder = re.fullmatch(r"triton_(.+)", path.parent.name)  # SGLang's
            version = facts["triton_version"] or (folder and folder[1].replace("_", "."))
            facts = name.groupdict() | {"triton_version": version, "down": name["down"] and "True"}
            if wrong := [size for size in values if not _SIZE.fullmatch(size) and size != "triton_version"]:
                raise UnfitError(f"{wrong[0]!r} is no size, need a whole number of tokens")
            keyed = [(int(size), config) for size, config in keyed if size != "triton_version"]
        elif values.keys() & {"autotune_entries", "default_config"}:
            facts, keyed = facts | {"kernel": path.stem}, _of_fla(path.stem, values)
        elif unknown := [key for key in values if not _CLASS.fullmatch(key)]:
            raise UnfitError(f"not named as files of vLLM and SGLang, no file of FLA, and {unknown[0]!r} is no class of aiter's")
        else:
            facts = {"name": path.stem}
        for key, config in keyed:
            if not isinstance(config, dict) or not config or any(isinstance(value, dict | list) for value in config.values()):
                raise UnfitError(f"{key!r} has no config, need an object of plain values by name")
    except (ValueError, RecursionError) as error:
        raise UnfitError(f"{path}: {error}") from None
    known = {name: _spelled(name, str(value)) for name, value in facts.items() if value}
    return [EngineConfig(f"{path} {key}", known, key, config) for key, config in keyed]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise UnfitError(f"one of {', '.join(found)} is there twice, need one value for each")
    return found


def _of_fla(kernel: str, values: dict[str, Any]) -> list[tuple[Any, Any]]:
    if values.get("kernel_name", kernel) != kernel:
        raise UnfitError(f"kernel_name is {values['kernel_name']!r}, and FLA goes by the name of the file: rename it")
    try:
        entries = {name: (each["autotune_key"], each["config"]) for name, each in values.get("autotune_entries", {}).items()}
        found = [*entries.values(), *([("default", values["default_config"])] if values.get("default_config") else [])]
        if wrong := [name for name, (key, _) in entries.items() if _fla_hash(key) != name]:
            raise UnfitError(f"the entry {wrong[0]!r} is not that of its autotune_key: FLA would not find it")
        if unknown := [name for _, config in found for name in config.keys() - _TRITON.keys() - {"kwargs"}]:
            raise UnfitError(f"{unknown[0]} is no field of a triton.Config")
        return [(key, {**config.pop("kwargs"), **{n: v for n, v in config.items() if v != _TRITON[n]}}) for key, config in found]
    except (AttributeError, KeyError, TypeError) as error:
        raise UnfitError(f"not the entries and configs that FLA reads ({error})") from None


def _fla_hash(key: list[Any]) -> str:
    return hashlib.md5(json.dumps(key, separators=(",", ":"), sort_keys=True).encode(), usedforsecurity=False).hexdigest()


def config_of_record(record: TuningRecord) -> EngineConfig:
    """The winner of a record, with its whole key. Raises UnfitError where that holds other than plain values, as a function's may."""
    made_on, fields = record.environment, record.best.fields
    where = f"the record of {record.kernel} {record.key} of {record.tuned_at:%Y-%m-%d %H:%M:%S} UTC"
    try:
        key = ast.literal_eval(_KEY_WORD.sub(lambda word: word[1] or repr(word[0]), record.key))
    except (ValueError, SyntaxError, RecursionError):
        raise UnfitError(f"{where}: its key holds other than plain values") from None
    if len({name.rpartition(".")[0] for name in fields}) == 1:  # also those of a function's one triton.Config, "config.BLOCK"
        fields = {name.rpartition(".")[2]: value for name, value in fields.items()}
    facts = {"kernel": record.kernel.rpartition(".")[2], "device_name": _spelled("device_name", made_on.device)}
    return EngineConfig(where, facts | {"triton_version": made_on.triton}, key, fields)


# -- writing -----------------------------------------------------------------------------------------------------------


def engine_files(engine: Engine, configs: Iterable[EngineConfig], given: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Files for an engine: path in the folder that the engine is told of -> content, to be written as JSON.

    ``given``: facts that the configs do not have, or others than theirs, and sizes of classes; see ``facts_given``.

    Raises:
        UnfitError: a fact is missing, a field does not fit, or two configs are for one size.
    """
    files: dict[str, list[EngineConfig]] = {}
    for each in configs:
        if lacking := [name for name in _NEEDS[engine] if type(each.config.get(name)) is not int]:
            raise UnfitError(f"{each.where}: {lacking[0]} is {each.config.get(lacking[0])}, and {engine} needs a whole number")
        if unknown := each.config.keys() - _TAKES.get(engine, each.config.keys() - {"pre_hook"}):
            raise UnfitError(f"{each.where}: {engine} takes no {min(unknown)}, which is {each.config[min(unknown)]}")
        files.setdefault(_path_for(engine, each.facts | given, each.where), []).append(each)
    return {path: _content(engine, found, given) for path, found in files.items()}


def _path_for(engine: Engine, facts: dict[str, str], where: str) -> str:
    if missing := [name for name in _FINDS_BY[engine] if name not in facts]:
        raise UnfitError(f"{where} does not say what {engine} finds a file by: {' '.join(f'--set {name}=...' for name in missing)}")
    version, device = facts.get("triton_version", ""), facts.get("device_name", "")
    if version and not re.fullmatch(r"\d+\.\d+\.\d+[\w.+-]*", version):
        raise UnfitError(f"{where}: triton_version is {version}, need one like 3.6.0")
    if engine == "vllm" and (unfit := facts.keys() & {"per_channel_quant", "down"}):
        raise UnfitError(f"{where}: vllm has no files for {min(unfit)}")
    if engine == "vllm" and "H200" in device.split("_"):
        facts = facts | {"device_name": "NVIDIA_H200"}
    if engine == "sglang" and "block_shape" in facts:
        facts = facts | {"block_shape": facts["block_shape"].replace(",", ", ")}
    parts = [f"{name}={facts[name]}" for name in _FACTS[:6] if name in facts]
    name = f"{','.join(parts)}{'_down' * ('down' in facts)}.json" if engine in _TAKES else f"{facts[_FINDS_BY[engine][0]]}.json"
    if "/" in name or (engine in _TAKES and not _MOE_NAME.fullmatch(name)):
        raise UnfitError(f"{where}: {name} is no name that {engine} gives a file")
    return f"configs/triton_{version.replace('.', '_')}/{name}" if engine == "sglang" else name


def _content(engine: Engine, configs: list[EngineConfig], given: dict[str, str]) -> dict[str, Any]:
    facts, found = dict[str, str](), dict[str, EngineConfig]()
    keyed = [each for each in configs if isinstance(each.key, list)]
    place = _place([each.key for each in keyed], keyed[0].where, given.get("size")) if keyed and engine != "fla" else -1
    for each in configs:
        for name in each.facts.keys() - given.keys():
            if facts.setdefault(name, each.facts[name]) != each.facts[name]:
                raise UnfitError(f"{each.where}: {name} is {each.facts[name]}, and {facts[name]} in {configs[0].where}: one file has one")
        key = _key_for(engine, each, place, given)
        if found.setdefault(key, each).config != each.config:
            raise UnfitError(f"two configs for {key}: {found[key].where} and {each.where}; leave one out")
    facts |= given
    head = {name: value for name, value in facts.items() if name == "triton_version" and engine in ("vllm", "fla")}
    if engine == "aiter":
        return {key: each.config for key, each in found.items()}
    if engine != "fla":
        return head | {key: found[key].config for key in sorted(found, key=int)}
    default = {"default_config": _of_triton(found.pop("default").config)} if "default" in found else {}
    entries = {name: {"autotune_key": each.key, "config": _of_triton(each.config)} for name, each in sorted(found.items())}
    return {"kernel_name": facts["kernel"], **head, **default, "autotune_entries": entries}


def _of_triton(config: dict[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in config.items() if name in _TRITON}
    return {"kwargs": {name: value for name, value in config.items() if name not in own}, "num_ctas": 1, **own}


def _key_for(engine: Engine, each: EngineConfig, place: int, given: dict[str, str]) -> str:
    """The name of the config in the engine's file: of FLA the hash of the key, of aiter the class, of the others the size."""
    key = each.key
    if engine == "fla":
        if key != "default" and not isinstance(key, list):
            raise UnfitError(f"{each.where} is a size alone: FLA finds a config by the whole key of its kernel, as a record has it")
        return _fla_hash(key) if isinstance(key, list) else "default"
    if engine == "aiter" and isinstance(key, str) and key != "default":
        return key
    size = key[place] if isinstance(key, list) else given.get(key, key.removeprefix("M_LEQ_")) if isinstance(key, str) else key
    if not _SIZE.fullmatch(str(size)):
        raise UnfitError(f"{each.where}: the class {key} has no size: --set {key}=...")
    if engine != "aiter":
        return str(size)
    named = [name for name, value in given.items() if value == str(size) and _CLASS.fullmatch(name) and name != "default"]
    if not named and int(size) not in _AITER_BOUNDS:
        raise UnfitError(
            f"{each.where}: aiter looks for no M_LEQ_{size} unless its caller has that bound; if so: --set M_LEQ_{size}={size}"
        )
    return [*named, f"M_LEQ_{size}"][0]


def _place(keys: list[list[Any]], where: str, given: str | None) -> int:
    """The place of the size in whole keys: the given one, else the only number that differs, else the only number."""
    spelled, numbers = json.dumps(keys[0]), [k for k, value in enumerate(keys[0]) if type(value) is int]
    differing = [k for k in numbers if len({json.dumps(key[k : k + 1]) for key in keys}) > 1]
    places = differing or numbers if given is None else [k for k in numbers if str(k) == given]
    if len(places) != 1:
        raise UnfitError(f"{where}: which number of its key {spelled} is the size? --set size=<its place, from 0>")
    if len({json.dumps([*key[: places[0]], *key[places[0] + 1 :]]) for key in keys}) > 1:
        raise UnfitError(f"{where}: keys like {spelled} differ in more than the size: name records by their ids")
    return places[0]
