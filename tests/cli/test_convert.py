"""``dist-tune convert``: sources of all kinds, what is printed, and files that are never written by
mistake.
"""

import json
from pathlib import Path

from dist_tune.cli.records import packed
from dist_tune.records import Cache
from tests.cached_records import candidate, record
from tests.cli.test_engines import FILES, MOE, NAME, SGLANG, VLLM
from tests.cli_answers import everything, keep, refusal, run

SIZES = ["96", "128", "256", "512", "1024"]
KNOWN = ("--set", "E=8", "--set", "N=512")
ROWS = [
    record(
        kernel="moe.fused_moe_kernel", key=f"[{M}]", winner=0, candidates=[candidate(0, fields=MOE)]
    )
    for M in (16, 64)
]


def test_without_an_engine_it_shows_what_there_is():
    """Facts of the name, sizes and configs, for people and for programs."""
    lines = run("convert", SGLANG[1]).stdout.splitlines()
    assert lines[0].split() == [
        *(
            "key",
            "BLOCK_SIZE_M",
            "BLOCK_SIZE_N",
            "BLOCK_SIZE_K",
            "GROUP_SIZE_M",
            "num_warps",
            "num_stages",
            "USE_TMA",
        ),
        *("E", "N", "device_name", "dtype", "block_shape", "down", "triton_version"),
    ]
    assert lines[1].split() == [
        "1",
        "16",
        "128",
        "128",
        "16",
        "4",
        "2",
        "True",
        *("257", "256", "NVIDIA_H200", "fp8_w8a8", "[128,128]", "True", "3.5.1"),
    ]
    mixed = run("convert", FILES / "aiter", VLLM[1]).stdout.splitlines()
    assert {"NUM_KSPLIT", "kpack", "block_shape"} < {*mixed[0].split()}
    assert [line.split()[0] for line in mixed[1:] if line] == [
        "M_LEQ_16",
        "M_LEQ_64",
        "any",
        "small_M",
        "medium_M",
        "large_M",
        *SIZES,
    ]
    shown = json.loads(run("convert", VLLM[0], "--json").stdout)["configs"]
    assert [each["key"] for each in shown] == [
        size for size in json.loads(VLLM[0].read_text()) if size != "triton_version"
    ]
    assert shown[0]["facts"] == {
        "E": "128",
        "N": "1856",
        "device_name": "NVIDIA_L40S",
        "triton_version": "3.5.0",
    }


def test_nothing_is_written_without_a_folder_nor_over_a_file_unless_told_so(tmp_path: Path):
    """The path is printed first; a file that is there stays, also beside those that are new."""
    first, second = (
        tmp_path / f"configs/triton_{version}/{path.name}"
        for version, path in zip(("3_5_0", "3_6_0"), VLLM, strict=True)
    )
    second = second.with_name(second.name.replace("[128,128]", "[128, 128]"))
    shown = run("convert", VLLM[0], "--to", "sglang").stdout.splitlines()
    assert shown[0].startswith(
        f"configs/triton_3_5_0/{VLLM[0].name}: 18 configs, for 1, 2, 4, 8, 16, 24, "
    )
    assert shown[1] == "nothing is written: -o FOLDER does it"
    run("convert", VLLM[1], "--to", "sglang", "-o", tmp_path)
    before = everything(tmp_path)
    assert [*before] == [second]
    assert f"{second} exists: --force replaces it" in refusal(
        "convert", *VLLM, "--to", "sglang", "-o", tmp_path
    )
    assert everything(tmp_path) == before
    done = json.loads(
        run("convert", FILES / "vllm", "--to", "sglang", "-o", tmp_path, "--force", "--json").stdout
    )
    assert [*done["files"]] == [str(first), str(second)]
    (copy,) = everything(tmp_path).keys() - {first, second}
    assert copy.read_bytes() == before[second], (
        "what we know nothing of, as FLA's times, is not lost"
    )


def test_records_come_from_all_places_that_show_knows(cache: Cache, tmp_path: Path):
    """A kernel's name, ids, an export, a cache folder: the same file; a file of the engine beside
    them adds its sizes.
    """
    ids = keep(cache, *ROWS)
    (tmp_path / "export.json").write_bytes(packed(ROWS))
    expected = {"triton_version": "3.6.0", "16": MOE, "64": MOE}
    sources: list[list[str | Path]] = [
        ["fused_moe_kernel"],
        [*ids],
        [tmp_path / "export.json"],
        [cache.folder],
    ]
    for number, source in enumerate(sources):
        run("convert", *source, "--to", "vllm", *KNOWN, "-o", tmp_path / str(number))
        assert json.loads((tmp_path / str(number) / NAME).read_text()) == expected
    (tmp_path / NAME).write_text(json.dumps({"8": MOE}))
    run(
        "convert",
        tmp_path / NAME,
        tmp_path / "export.json",
        "--to",
        "vllm",
        *KNOWN,
        "-o",
        tmp_path,
        "--force",
    )
    assert json.loads((tmp_path / NAME).read_text()) == {
        "triton_version": "3.6.0",
        "8": MOE,
        "16": MOE,
        "64": MOE,
    }


def test_the_help_names_the_facts_and_has_examples():
    """One to show a file, one to make records an engine's."""
    text = " ".join(run("convert", "--help").stdout.split())
    facts = (
        "E, N, device_name, dtype, block_shape, per_channel_quant, down, triton_version, kernel,"
        " name, size"
    )
    assert f"What a source lacks: {facts}; " in text
    assert 'dist-tune convert "E=8,N=512,device_name=NVIDIA_H200.json"' in text
    assert "dist-tune convert fused_moe_kernel --to vllm --set E=8 --set N=512 -o out" in text


def test_what_stands_for_nothing_is_one_line(tmp_path: Path, cache: Cache):
    """On stderr with exit code 1, and nothing is written."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "export.json").write_bytes(packed(ROWS).replace(b'"winner":0', b'"winner":9', 1))
    (tmp_path / "other.json").write_text('{"schema_version": 4}')
    assert "no such file or folder" in refusal("convert", tmp_path / "none.json")
    assert "nothing is called 'moe'" in refusal("convert", "moe")
    assert refusal("convert", tmp_path / "empty").endswith(
        "/empty (of a folder, .json files count)"
    )
    for name, values in {
        "fla.json": {"triton_version": "3.6.0", "autotune_entries": {}},
        NAME: {"triton_version": "3.6.0"},
    }.items():
        (tmp_path / name).write_text(json.dumps(values))
        assert f"there is no config in {tmp_path / name}" in refusal("convert", tmp_path / name)
        (tmp_path / name).unlink()
    assert "'schema_version' is no class of aiter's" in refusal("convert", tmp_path / "other.json")
    assert "no candidate that runs" in refusal(
        "convert", tmp_path / "export.json", "--to", "vllm", *KNOWN
    )
    assert "--set K: need NAME=VALUE of E, N" in refusal(
        "convert", VLLM[0], "--to", "vllm", "--set", "K=1"
    )
    assert "other.json: " in refusal(
        "convert", VLLM[0], "--to", "vllm", "-o", tmp_path / "other.json"
    ), "a file is no folder"
    assert everything(tmp_path).keys() == {tmp_path / "export.json", tmp_path / "other.json"}
