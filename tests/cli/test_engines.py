"""Config files of vLLM, SGLang, FLA and aiter: public ones keep all they hold, and what does not
fit is told in one line.

The readers here are transcriptions of the engines' own (sources: dist_tune/cli/convert.py): which
file they open, and what they take.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from dist_tune.cli.convert import (
    EngineConfig,
    config_of_record,
    configs_in_file,
    engine_files,
    facts_given,
)
from dist_tune.cli.render import RefusedError
from dist_tune.records import Environment
from tests.cached_records import candidate, environment, record

FILES = Path(__file__).parent / "engine_files"
VLLM = sorted((FILES / "vllm").iterdir())
SGLANG = sorted((FILES / "sglang/configs/triton_3_5_1").iterdir())
AITER = sorted((FILES / "aiter").iterdir())
MOE = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}
NAME = "E=8,N=512,device_name=NVIDIA_H200.json"


def vllm_reads(
    folder: Path,
    device: str,
    E: int,
    N: int,
    dtype: str | None = None,
    block_shape: list[int] | None = None,
) -> Any:
    """``get_moe_configs`` of vLLM under VLLM_TUNED_CONFIG_FOLDER; None where it finds no file."""
    device = device.replace(" ", "_")
    device = "NVIDIA_H200" if "H200" in device.split("_") else device
    shape = f",block_shape={block_shape}".replace(" ", "") if block_shape else ""
    path = (
        folder / f"E={E},N={N},device_name={device}{f',dtype={dtype}' if dtype else ''}{shape}.json"
    )
    if not path.exists():
        return None
    values = json.loads(path.read_text())
    values.pop("triton_version", None)
    return {int(size): config for size, config in values.items()}


def sglang_reads(
    folder: Path, triton: str, device: str, E: int, N: int, dtype: str | None = None, **more: Any
) -> Any:
    """``get_moe_configs`` of SGLang under SGLANG_MOE_CONFIG_DIR, in the folder of its Triton; None
    where it finds no file.
    """
    parts = [
        f"E={E},N={N},device_name={device.replace(' ', '_')}",
        f",dtype={dtype}" if dtype else "",
    ]
    parts += [f",block_shape={more['block_shape']}" if "block_shape" in more else ""]
    parts += [
        ",per_channel_quant=True" if "per_channel_quant" in more else "",
        "_down" if "down" in more else "",
    ]
    path = folder / "configs" / f"triton_{triton.replace('.', '_')}" / f"{''.join(parts)}.json"
    return (
        {int(size): config for size, config in json.loads(path.read_text()).items()}
        if path.exists()
        else None
    )


def aiter_reads(path: Path, M: int) -> Any:
    """``get_gemm_config`` of aiter; of its MoE files ``get_optimal_moe_config``."""
    values = json.loads(path.read_text())
    if "small_M" in values:
        return values["small_M" if M < 256 else "medium_M" if M < 1024 else "large_M"]
    bounds = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    return values[next((f"M_LEQ_{n}" for n in bounds if n >= M and f"M_LEQ_{n}" in values), "any")]


def write(folder: Path, files: dict[str, dict[str, Any]]) -> list[Path]:
    for name, values in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(values))
    return [folder / name for name in files]


def convert(engine: str, source: Path | list[EngineConfig], folder: Path, *given: str) -> Path:
    """The one file that is made."""
    configs = configs_in_file(source) if isinstance(source, Path) else source
    (path,) = write(folder, engine_files(engine, configs, facts_given([*given])))
    return path


def refusal(engine: str, source: Path | list[EngineConfig], *given: str) -> str:
    with pytest.raises(RefusedError) as caught:
        convert(engine, source, Path("/nothing"), *given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def written(tmp_path: Path, name: str, values: Any) -> Path:
    path = tmp_path / name
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


def tuned(
    key: str,
    fields: dict[str, Any] = MOE,
    kernel: str = "moe.fused_moe_kernel",
    where: Environment | None = None,
) -> EngineConfig:
    made: dict[str, Any] = {"winner": 0, "candidates": [candidate(0, fields=fields)]}
    return config_of_record(
        record(key=key, kernel=kernel, environment=where or environment(), **made)
    )


@pytest.mark.parametrize("path", [*VLLM, *SGLANG, *AITER], ids=lambda path: path.name)
def test_a_public_file_comes_back_as_it_was(path: Path, tmp_path: Path):
    """With its name, its folder of a Triton version, the order of its sizes and fields."""
    engine: str = "vllm" if path in VLLM else "sglang" if path in SGLANG else "aiter"
    again = convert(engine, path, tmp_path)
    assert again.relative_to(tmp_path) == path.relative_to(FILES / engine)
    assert json.dumps(json.loads(again.read_text()), indent=4) == json.dumps(
        json.loads(path.read_text()), indent=4
    )


@pytest.mark.parametrize("path", VLLM, ids=lambda path: path.name)
def test_sglang_reads_a_file_of_vllm_and_vllm_reads_it_back(path: Path, tmp_path: Path):
    """The version of Triton is a key of vLLM's file and a folder of SGLang's."""
    facts = configs_in_file(path)[0].facts
    known: dict[str, Any] = {
        name: facts[name] for name in ("device_name", "dtype") if name in facts
    }
    known |= {name: json.loads(facts[name]) for name in ("E", "N", "block_shape") if name in facts}
    there = convert("sglang", path, tmp_path)
    device = known.pop("device_name")
    asked = vllm_reads(path.parent, device, **known)
    assert asked
    assert sglang_reads(tmp_path, facts["triton_version"], device, **known) == asked
    assert json.loads(convert("vllm", there, tmp_path).read_text()) == json.loads(path.read_text())
    assert vllm_reads(tmp_path, device, **known) == asked


def test_sglang_s_variants_have_names_of_their_own(tmp_path: Path):
    """Per-channel scales, and the second product of a layer: vLLM has neither, and its kernel takes
    no USE_TMA.
    """
    per_channel, down = SGLANG
    told = {"dtype": "fp8_w8a8", "triton": "3.5.1", "device": "NVIDIA H200"}
    assert sglang_reads(FILES / "sglang", E=20, N=1536, per_channel_quant=True, **told) == {
        int(each.key): each.config for each in configs_in_file(per_channel)
    }
    assert configs_in_file(down)[0].facts["down"] == "True"
    assert "vllm has no files for per_channel_quant" in refusal("vllm", per_channel)
    assert f"{down} 1: vllm takes no USE_TMA, which is True" in refusal("vllm", down)


def test_classes_of_aiter_are_sizes_of_vllm(tmp_path: Path):
    """M_LEQ_n is n; a class without a number gets the size that it is told, there and back."""
    moe = FILES / "aiter/gfx942-MOE-DEFAULT.json"
    sizes = ("small_M=255", "medium_M=1023", "large_M=4096")
    there = convert(
        "vllm", moe, tmp_path, *sizes, "E=8", "N=512", "device_name=AMD Instinct MI300X"
    )
    table = vllm_reads(tmp_path, "AMD Instinct MI300X", 8, 512)
    assert {size: table[size] for size in table} == {
        size: aiter_reads(moe, size) for size in (255, 1023, 4096)
    }
    back = convert("aiter", there, tmp_path, *sizes, "name=gfx942-MOE-DEFAULT")
    assert json.loads(back.read_text()) == json.loads(moe.read_text())
    bounds = [
        EngineConfig("x", {}, size, MOE | {"num_stages": k})
        for k, size in enumerate(("16", "64", "4096"))
    ]
    path = convert("aiter", bounds, tmp_path, "name=gfx942-GEMM-X", "any=4096")
    assert [*json.loads(path.read_text())] == ["M_LEQ_16", "M_LEQ_64", "any"]
    assert [aiter_reads(path, M)["num_stages"] for M in (1, 16, 17, 64, 65, 9999)] == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]


def test_records_of_a_kernel_are_its_table(tmp_path: Path):
    """The size is the number of the key that differs; H200s of all kinds are one to vLLM; a
    function's config has its fields.
    """
    there = environment(device="NVIDIA H200 NVL")
    rows = [
        tuned(f"[{M},8,512,torch.bfloat16]", MOE | {"num_warps": M}, where=there) for M in (64, 16)
    ]
    rows += [
        tuned(
            "[32,8,512,torch.bfloat16]",
            {f"config.{name}": value for name, value in MOE.items()},
            where=there,
        )
    ]
    path = convert(
        "vllm", rows, tmp_path, "E=8", "N=512", "dtype=fp8_w8a8", "block_shape=[128, 128]"
    )
    assert json.loads(path.read_text())["triton_version"] == "3.6.0"
    table = vllm_reads(tmp_path, "NVIDIA H200 NVL", 8, 512, "fp8_w8a8", [128, 128])
    assert [(size, each["num_warps"]) for size, each in table.items()] == [
        (16, 16),
        (32, 4),
        (64, 64),
    ]
    assert "NVIDIA_H200_NVL" in convert("sglang", rows, tmp_path, "E=8", "N=512").name
    assert (
        'which number of its key [64, 8, 512, "torch.bfloat16"] is the size? Name records that'
        " differ in it alone, or --set size=" in refusal("vllm", rows[:1], "E=8", "N=512")
    )
    assert vllm_reads(
        convert("vllm", rows[:1], tmp_path, "E=9", "N=512", "size=0").parent, "NVIDIA H200", 9, 512
    ).keys() == {64}


def test_a_whole_key_is_found_again_by_fla(tmp_path: Path):
    """As the values that FLA's tuner asks with; words of a key stand there without quotes, other
    strings with.
    """
    key = "[4096,-1,0.5,1e-05,True,None,plain-word,'a b,[',torch.bfloat16]"
    path = convert(
        "fla",
        [
            tuned(
                key,
                {"BLOCK": 64, "num_warps": 4, "num_stages": 2, "maxnreg": 128},
                "fla.ops.chunk_kernel",
            )
        ],
        tmp_path,
    )
    values = json.loads(path.read_text())
    ((name, entry),) = values["autotune_entries"].items()
    assert (path.name, values["kernel_name"], values["triton_version"]) == (
        "chunk_kernel.json",
        "chunk_kernel",
        "3.6.0",
    )
    assert entry["autotune_key"] == [
        4096,
        -1,
        0.5,
        1e-05,
        True,
        None,
        "plain-word",
        "a b,[",
        "torch.bfloat16",
    ]
    assert entry["config"] == {
        "kwargs": {"BLOCK": 64},
        "num_ctas": 1,
        "num_warps": 4,
        "num_stages": 2,
        "maxnreg": 128,
    }
    assert json.loads(convert("fla", path, tmp_path / "again").read_text()) == values
    spelled = entry["config"] | {"pre_hook": None, "ir_override": None}
    exported = values | {
        "default_config": entry["config"],
        "autotune_entries": {name: entry | {"config": spelled, "best_timing": [1.0]}},
    }
    path = written(tmp_path, path.name, exported)
    assert json.loads(convert("fla", path, tmp_path / "again").read_text()) == values | {
        "default_config": entry["config"]
    }
    assert "the class default has no size: --set default=..." in refusal(
        "aiter", path, "name=x", "size=0"
    )
    assert [
        *json.loads(convert("aiter", path, tmp_path, "name=x", "size=0", "default=8").read_text())
    ] == ["M_LEQ_4096", "M_LEQ_8"]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (NAME, "{", "Expecting property name"),
        (NAME, "[]", "no JSON object of configs"),
        (NAME, {"any": MOE}, "'any' is no size, need a whole number of tokens"),
        (NAME, {"016": MOE}, "'016' is no size, need a whole number of tokens"),
        (NAME, {"1.5": MOE}, "'1.5' is no size, need a whole number of tokens"),
        (NAME, {"16": [1]}, "'16' has no config, need an object of plain values by name"),
        (
            NAME,
            {"16": MOE | {"x": {}}},
            "'16' has no config, need an object of plain values by name",
        ),
        (
            NAME,
            {"16": {"BLOCK_SIZE_M": 16}},
            "16: BLOCK_SIZE_N is None, and vllm needs a whole number",
        ),
        (
            NAME,
            {"16": MOE | {"num_warps": "4"}},
            "16: num_warps is 4, and vllm needs a whole number",
        ),
        (NAME, {"16": MOE | {"BLOCK": 1}}, "16: vllm takes no BLOCK, which is 1"),
        (
            "E=8,N=512,device_name=X,backend=flydsl.json",
            {"16": MOE},
            "only those of fused MoE are read (E=...",
        ),
        (
            "N=512,K=7168,device_name=X,block_shape=[128,128].json",
            {"16": MOE},
            "of vLLM's and SGLang's files only those of fused MoE",
        ),
        ("E=8,N=0,device_name=X.json", {"16": MOE}, "and '16' is no class of aiter's"),
        ("package.json", {"dependencies": {}}, "and 'dependencies' is no class of aiter's"),
        (
            "k.json",
            {"autotune_entries": {"0": {"autotune_key": [1]}}},
            "not the entries and configs that FLA reads ('config')",
        ),
        (
            "k.json",
            {"default_config": {"kwargs": {}, "num_warps": 4, "x": 1}},
            "not the entries and configs that FLA reads ('x')",
        ),
        (
            "a.json",
            {"any": MOE},
            "a.json any does not say what vllm finds a file by:"
            " --set E=... --set N=... --set device_name=...",
        ),
    ],
)
def test_what_is_no_file_of_an_engine_or_does_not_fit_is_one_line(
    name: str, content: Any, told: str, tmp_path: Path
):
    """With the file, the field, and what is needed."""
    path = written(tmp_path, name, content)
    text = refusal("vllm", path)
    assert text.startswith(str(path))
    assert told in text


def test_two_configs_for_one_place_are_refused():
    """Two files, two kernels, two devices, two keys that differ in more than the size: told with
    both; the same one twice is one.
    """
    at = {"E": "8", "N": "512", "device_name": "X"}
    rows = [EngineConfig("a", at, "16", MOE), EngineConfig("b", at, "16", MOE)]
    assert engine_files("vllm", rows, {}) == {"E=8,N=512,device_name=X.json": {"16": MOE}}
    assert (
        refusal("vllm", [*rows, EngineConfig("c", at, "16", MOE | {"num_warps": 8})])
        == "two configs for 16: a and c; leave one out"
    )
    known = ("E=8", "N=512")
    assert "kernel is other, and fused_moe_kernel in " in refusal(
        "vllm", [tuned("[16]"), tuned("[32]", kernel="other")], *known
    )
    assert (
        "which number of its key [16, 8] is the size? Name records that differ in it alone"
        in refusal("vllm", [tuned("[16,8]"), tuned("[32,9]")], *known, "size=0")
    )
    assert "triton_version is 3.7.0, and 3.6.0 in " in refusal(
        "fla", [tuned("[1]"), tuned("[2]", where=environment(triton="3.7.0"))]
    )


def test_each_engine_says_what_it_lacks():
    """A fact for its file's name, a whole key, a size for a class, a bound that aiter looks for, a
    config without a hook.
    """
    size = EngineConfig("file 24", {"device_name": "X"}, "24", MOE)
    assert (
        refusal("sglang", [size])
        == "file 24 does not say what sglang finds a file by: --set E=... --set N=... --set"
        " triton_version=..."
    )
    assert "file 24 is a size alone: FLA finds a config by the whole key" in refusal("fla", [size])
    assert "file 24: aiter looks for no M_LEQ_24, unless" in refusal("aiter", [size], "name=x")
    assert engine_files("aiter", [size], facts_given(["name=x", "M_LEQ_24=24"])) == {
        "x.json": {"M_LEQ_24": MOE}
    }
    classes = [EngineConfig("file any", {}, "any", MOE)]
    assert "the class any has no size: --set any=..." in refusal(
        "vllm", classes, "E=1", "N=1", "device_name=X"
    )
    assert "fla takes no pre_hook, which is m.hook" in refusal(
        "fla", [tuned("[1]", MOE | {"pre_hook": "m.hook"})]
    )


@pytest.mark.parametrize("word", ["E", "N=", "sizes=4"])
def test_a_fact_that_no_file_has_is_refused_with_those_that_can_be(word: str):
    with pytest.raises(
        RefusedError,
        match=(
            f"--set {word.partition('=')[0]}: need NAME=VALUE of E, N, device_name, .*, or a class"
            " and its size like any=4096"
        ),
    ):
        facts_given([word])


@pytest.mark.parametrize(
    "word",
    [
        *(
            "E=0",
            "E=x",
            "N=x",
            "block_shape=128",
            "block_shape=128x128",
            "per_channel_quant=False",
            "down=1",
        ),
        *("dtype=a,b", "device_name=a/b", "device_name=a,b", "triton_version=a/b"),
    ],
)
def test_a_value_that_no_name_can_have_is_refused(word: str):
    """With the fact and what it looks like."""
    told = refusal(
        "sglang",
        [EngineConfig("x", {}, "16", MOE)],
        "E=1",
        "N=1",
        "device_name=X",
        "triton_version=3.6.0",
        word,
    )
    assert told.startswith(
        f"x: {word} is nothing that sglang looks for, need one like {word.partition('=')[0]}="
    )
    assert "kernel=a/b is nothing that fla looks for" in refusal(
        "fla", [tuned("[1]", kernel="m.a/b")]
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "bf16", "float16", "fp16"])
def test_dtypes_that_no_engine_puts_into_a_name_are_left_out(dtype: str, tmp_path: Path):
    """They look for a dtype where weights are quantized, or float32."""
    path = convert(
        "vllm",
        [tuned("[16]")],
        tmp_path,
        "E=8",
        "N=512",
        "device_name=NVIDIA H200",
        f"dtype={dtype}",
    )
    assert path.name == NAME
    assert vllm_reads(tmp_path, "NVIDIA H200", 8, 512) == {16: MOE}
    assert convert(
        "vllm", [tuned("[16]")], tmp_path, "E=8", "N=512", "dtype=float32"
    ).name == NAME.replace(".json", ",dtype=float32.json")


def test_a_record_of_amd_s_or_intel_s_names_the_device_as_torch_does(tmp_path: Path):
    """Ours has its compute units, too (dist_tune/accelerator.py)."""
    there = environment(device="AMD Instinct MI300X, gfx942, 304 compute units")
    path = convert("vllm", [tuned("[16]", where=there)], tmp_path, "E=8", "N=512")
    assert vllm_reads(path.parent, "AMD Instinct MI300X", 8, 512) == {16: MOE}


def test_a_record_of_a_function_with_another_key_is_refused():
    with pytest.raises(RefusedError, match="its key holds other than plain values"):
        tuned("[Shape([8]),torch.bfloat16]")
