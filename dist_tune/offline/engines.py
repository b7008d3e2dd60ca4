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
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Json, PositiveInt, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from dist_tune.cache import TuningRecord
from dist_tune.files import read_regular
from dist_tune.output import first_mistake

Engine = Literal["vllm", "sglang", "fla", "aiter"]

_MOE_NAME = re.compile(
    r"E=(?P<E>[1-9]\d*),N=(?P<N>[1-9]\d*),device_name=(?P<device_name>[^,/]+?)(,dtype=(?P<dtype>\w+?))?"
    r"(,block_shape=(?P<block_shape>\[\d+, ?\d+\]))?(,per_channel_quant=(?P<per_channel_quant>True))?(?P<down>_down)?\.json"
)
_SIZE = re.compile(r"[1-9]\d{0,17}")
_CLASS = re.compile(r"M_[LG]EQ_[1-9]\d{0,17}|any|(small|medium|large)(_\w+)?|default")  # the last is FLA's default_config
_AITER_BOUNDS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Those of M_LEQ_<n> that aiter's reader looks for."""
_FINDS_BY = {"vllm": ["E", "N", "device_name"], "sglang": ["E", "N", "device_name", "triton_version"], "fla": ["kernel"], "aiter": ["name"]}
_MOE_NEEDS = ["BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages"]
_NEEDS = {"vllm": _MOE_NEEDS, "sglang": _MOE_NEEDS, "fla": _MOE_NEEDS[-2:], "aiter": []}
_MOE_TAKES = {*_MOE_NEEDS, "num_ctas", "maxnreg", "waves_per_eu", "matrix_instr_nonkdim", "kpack"}
_TAKES = {"vllm": _MOE_TAKES | {"SPLIT_K", "grf_mode"}, "sglang": _MOE_TAKES | {"USE_TMA"}}
"""Both hand a config to their kernel as keywords: another name there would be an error in each forward pass."""
# In a record's key, a word without quotes: a dtype, or another plain string.
_KEY_WORD = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?<![\w.])(?!(?:None|True|False|inf|nan)\b)[A-Za-z_][\w.-]*""")


class UnfitError(ValueError):
    """A file is none of these engines', or what it holds does not fit another's. One line: the file, the field, and what is needed."""


class _Facts(TypedDict, total=False):
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    E: PositiveInt
    N: PositiveInt
    device_name: Annotated[str, AfterValidator(lambda name: name.replace(" ", "_"))]  # as all of them spell it
    dtype: str
    block_shape: Json[tuple[PositiveInt, PositiveInt]]
    per_channel_quant: bool
    down: bool
    triton_version: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+[\w.+-]*$")]
    kernel: Annotated[str, Field(pattern="^[^/]+$")]
    name: Annotated[str, Field(pattern="^[^/]+$")]  # of aiter's file, without .json
    size: int  # the place of the size in a whole key, from 0


_FACTS = TypeAdapter(_Facts)


class _TritonConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    kwargs: dict[str, Any]
    num_warps: int
    num_ctas: int = 1
    num_stages: int
    maxnreg: int | None = None
    pre_hook: None = None
    ir_override: str | None = None


class _FlaEntry(BaseModel):
    autotune_key: list[Any]
    config: _TritonConfig


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One config, for one size or key."""

    where: str
    """File or record, for messages."""
    facts: dict[str, Any]
    """What is known beside it: kernel, E, N, device_name, dtype, ..."""
    key: Any
    """A size; the name of a class of sizes, or "default"; or a list, which is a whole tuning key."""
    config: dict[str, Any]


def facts_given(words: Iterable[str]) -> dict[str, Any]:
    """Facts as people write them, "E=8", "block_shape=[128,128]", and sizes of classes, "any=4096". Raises UnfitError."""
    pairs = {name: text for name, _, text in (word.partition("=") for word in words)}
    classes = {name: pairs.pop(name) for name in list(pairs) if _CLASS.fullmatch(name)}
    try:
        return {**_FACTS.validate_python(pairs), **TypeAdapter(dict[str, PositiveInt]).validate_python(classes)}
    except ValueError as error:
        known = ", ".join(_Facts.__annotations__)
        raise UnfitError(f"--set {first_mistake(error)}; it takes NAME=VALUE of {known}, or a class and its size like any=4096") from None


# -- reading -----------------------------------------------------------------------------------------------------------


def configs_in_file(path: Path) -> list[EngineConfig]:
    """The configs of an engine's file.

    Raises:
        UnfitError: it is none, or holds what its engine would not read as it stands.
        OSError: it cannot be read.
    """
    keyed: Iterable[tuple[Any, Any]]
    try:
        values = json.loads(read_regular(path), object_pairs_hook=_once)
        if not isinstance(values, dict) or not values:
            raise UnfitError("no JSON object of configs")
        version, keyed = values.get("triton_version"), values.items()
        if name := _MOE_NAME.fullmatch(path.name):
            facts: dict[str, Any] = name.groupdict() | {"down": bool(name["down"]) or None}
            folder = re.fullmatch(r"triton_(.+)", path.parent.name)  # SGLang's
            version = version or (folder and folder[1].replace("_", "."))
            if wrong := [size for size in values if not _SIZE.fullmatch(size) and size != "triton_version"]:
                raise UnfitError(f"{wrong[0]!r} is no size, need a whole number of tokens")
            keyed = [(int(size), config) for size, config in keyed if size != "triton_version"]
        elif values.keys() & {"autotune_entries", "default_config"}:
            facts, keyed = {"kernel": path.stem}, _of_fla(path.stem, values)
        elif unknown := [key for key in values if not _CLASS.fullmatch(key)]:
            raise UnfitError(
                f"neither the name of vLLM's and SGLang's files nor the content of FLA's, and {unknown[0]!r} is no class of aiter's"
            )
        else:
            facts = {"name": path.stem}
        facts = {**_FACTS.validate_python({name: value for name, value in {**facts, "triton_version": version}.items() if value})}
        for key, config in keyed:
            if not isinstance(config, dict) or not config or any(isinstance(value, dict | list) for value in config.values()):
                raise UnfitError(f"{key!r} has no config, need an object of plain values by name")
    except (ValueError, RecursionError) as error:
        raise UnfitError(f"{path}: {first_mistake(error) if isinstance(error, ValueError) else 'nested too deep'}") from None
    return [EngineConfig(f"{path} {key}", facts, key, config) for key, config in keyed]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise UnfitError(f"one of {', '.join(found)} is there twice, need one value for each")
    return found


def _of_fla(kernel: str, values: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    if values.get("kernel_name", kernel) != kernel:
        raise UnfitError(f"kernel_name is {values['kernel_name']!r}, and FLA goes by the name of the file: rename it")
    entries = TypeAdapter(dict[str, _FlaEntry]).validate_python(values.get("autotune_entries") or {})
    if wrong := [name for name, each in entries.items() if _fla_hash(each.autotune_key) != name]:
        raise UnfitError(f"the entry {wrong[0]!r} is not that of its autotune_key: FLA would not find it")
    keyed: list[tuple[Any, _TritonConfig]] = [(each.autotune_key, each.config) for each in entries.values()]
    keyed += [("default", _TritonConfig.model_validate(values["default_config"]))] if values.get("default_config") else []
    return [(key, each.kwargs | each.model_dump(exclude={"kwargs"}, exclude_defaults=True)) for key, each in keyed]


def _fla_hash(key: list[Any]) -> str:
    return hashlib.md5(json.dumps(key, separators=(",", ":"), sort_keys=True).encode(), usedforsecurity=False).hexdigest()


def config_of_record(record: TuningRecord) -> EngineConfig:
    """The winner of a record, with its whole key. Raises UnfitError where that holds other than plain values, as a function's may."""
    made_on, fields, kernel = record.environment, record.best.fields, record.kernel.rpartition(".")[2]
    where = f"the record of {record.kernel} {record.key} of {record.tuned_at:%Y-%m-%d %H:%M:%S} UTC"
    try:
        facts = _FACTS.validate_python({"kernel": kernel, "device_name": made_on.device, "triton_version": made_on.triton})
        key = ast.literal_eval(_KEY_WORD.sub(lambda word: word[1] or repr(word[0]), record.key))
    except (ValueError, SyntaxError, RecursionError) as error:
        raise UnfitError(
            f"{where}: {first_mistake(error) if isinstance(error, ValidationError) else 'its key holds other than plain values'}"
        ) from None
    if len({name.rpartition(".")[0] for name in fields}) == 1:  # also those of a function's one triton.Config, "config.BLOCK"
        fields = {name.rpartition(".")[2]: value for name, value in fields.items()}
    return EngineConfig(where, {**facts}, key, fields)


# -- writing -----------------------------------------------------------------------------------------------------------


def engine_files(engine: Engine, configs: Iterable[EngineConfig], given: dict[str, Any]) -> dict[str, dict[str, Any]]:
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


def _path_for(engine: Engine, facts: dict[str, Any], where: str) -> str:
    if missing := [name for name in _FINDS_BY[engine] if name not in facts]:
        raise UnfitError(f"{where} does not say what {engine} finds a file by: {' '.join(f'--set {name}=...' for name in missing)}")
    if engine in ("fla", "aiter"):
        return f"{facts[_FINDS_BY[engine][0]]}.json"
    device, shape = facts["device_name"], str([*facts.get("block_shape", ())])
    if engine == "vllm":
        device, shape = "NVIDIA_H200" if "H200" in device.split("_") else device, shape.replace(" ", "")
        if unfit := [name for name in ("per_channel_quant", "down") if facts.get(name)]:
            raise UnfitError(f"{where}: vllm has no files for {unfit[0]}")
    name = f"E={facts['E']},N={facts['N']},device_name={device}" + (f",dtype={facts['dtype']}" if "dtype" in facts else "")
    name += (f",block_shape={shape}" if "block_shape" in facts else "") + ",per_channel_quant=True" * facts.get("per_channel_quant", False)
    name += "_down" * facts.get("down", False) + ".json"
    if not _MOE_NAME.fullmatch(name):
        raise UnfitError(f"{where}: {name} is no name that {engine} gives a file")
    return name if engine == "vllm" else f"configs/triton_{facts['triton_version'].replace('.', '_')}/{name}"


def _content(engine: Engine, configs: list[EngineConfig], given: dict[str, Any]) -> dict[str, Any]:
    facts, found = dict[str, Any](), dict[str, EngineConfig]()
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
    own = {name: value for name, value in config.items() if name in _TritonConfig.model_fields}
    return {"kwargs": {name: value for name, value in config.items() if name not in own}, "num_ctas": 1, **own}


def _key_for(engine: Engine, each: EngineConfig, place: int, given: dict[str, Any]) -> str:
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
    named = [name for name, value in given.items() if value == size and _CLASS.fullmatch(name)]
    if not named and size not in _AITER_BOUNDS:
        raise UnfitError(
            f"{each.where}: aiter looks for no M_LEQ_{size} unless its caller has that bound; if so: --set M_LEQ_{size}={size}"
        )
    return [*named, f"M_LEQ_{size}"][0]


def _place(keys: list[list[Any]], where: str, given: int | None) -> int:
    """The place of the size in whole keys: the given one, else the only number that differs, else the only number."""
    spelled, numbers = json.dumps(keys[0]), [k for k, value in enumerate(keys[0]) if type(value) is int]
    differing = [k for k in numbers if len({json.dumps(key[k : k + 1]) for key in keys}) > 1]
    places = differing or numbers if given is None else [k for k in numbers if k == given]
    if len(places) != 1:
        raise UnfitError(f"{where}: which number of its key {spelled} is the size? --set size=<its place, from 0>")
    if len({json.dumps([*key[: places[0]], *key[places[0] + 1 :]]) for key in keys}) > 1:
        raise UnfitError(f"{where}: keys like {spelled} differ in more than the size: name records by their ids")
    return places[0]
