"""Names for people: as short as tells sites apart."""

from __future__ import annotations

import pytest

from dist_tune.output.words import KEY_WIDTH, brief_key, closure_name, site_name, site_names

PUSH = "[666,1003,1008,2,True,0,triton.language.bfloat16,torch.bfloat16,torch.int64,torch.int64,torch.int32]"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("__main__.gla.<locals>.step", "step"),
        ("kernels.row_parallel_tuners.tune_products.<locals>.<lambda>", "tune_products.<lambda>"),
        ("tests.<lambda>", "tests.<lambda>"),
        ("f", "f"),
        ("<lambda>", "<lambda>"),
        ("", ""),
    ],
)
def test_a_closure_is_named_without_its_module(name: str, short: str):
    """A lambda has no name of its own: it goes by the function that makes it."""
    assert closure_name(name) == short


@pytest.mark.parametrize(
    ("key", "brief"),
    [
        ("[4096,11008,4096]", "[4096, 11008, 4096]"),
        (PUSH, "[666, 1003, 1008, 2, True, 0, bf16]"),
        ("[64,torch.float32,torch.float32]", "[64]"),
        ("[torch.float16,torch.float16]", ""),
        ("[]", ""),
        ("[((4096,5504),(5504,1),torch.bfloat16),((64,),(1,),torch.float16),'None',2,2]", "[4096x5504 bf16, 64 fp16, None, 2, 2]"),
        ("['a,b',(1,(2,3)),torch.float32]", "['a, b', (1, (2, 3))]"),
        ("[((),(),torch.float8_e4m3fn),1]", "[scalar fp8_e4m3fn, 1]"),
        ("a name", "a name"),
    ],
)
def test_a_key_shows_what_the_user_has_named(key: str, brief: str):
    """Values of ``key=`` with short dtypes; the dtypes of all arguments that Triton appends are in the log."""
    assert brief_key(key) == brief


def test_a_key_has_a_bound_width():
    """A name has an ellipsis where the key function has returned something long."""
    text = brief_key(f"[{','.join(str(n) for n in range(1000, 1100))}]")
    assert KEY_WIDTH - 6 < len(text) <= KEY_WIDTH
    assert text.endswith("1008, \N{HORIZONTAL ELLIPSIS}]")
    assert brief_key(f"[{'9' * 100},2]") == f"[{'9' * (KEY_WIDTH - 3)}\N{HORIZONTAL ELLIPSIS}]"
    assert len(brief_key("x" * 300)) == KEY_WIDTH


def test_a_kernel_without_key_values_goes_by_its_name():
    assert site_name("m.scale_kernel", "[torch.float32]") == "scale_kernel"


def test_dtypes_are_named_where_sites_differ_in_nothing_else():
    """The two that need it have them, and the third does not."""
    keys = ["[64,torch.bfloat16,torch.float32]", "[64,torch.bfloat16,torch.bfloat16]", "[32,torch.bfloat16,torch.float32]"]
    names = site_names([("m.h", key) for key in keys], ["", "", ""])
    assert names == ["h [64, bf16, fp32]", "h [64, bf16, bf16]", "h [32]"]


def test_sites_that_look_alike_have_longer_names():
    """Of another module; with strides that differ; of one kernel and key by what the caller gives."""
    strided = [("m.f", f"[((8,8),({stride},1),torch.float32)]") for stride in (8, 16)]
    sites = [("a.g", "[1]"), ("b.g", "[1]"), *strided, ("m.k", "[2]"), ("m.k", "[2]")]
    names = site_names(sites, [f"site {n}" for n in range(6)])
    assert names[:2] == ["a.g [1]", "b.g [1]"]
    assert names[2:4] == ["m.f [((8, 8), (8, 1), float32)]", "m.f [((8, 8), (16, 1), float32)]"]
    assert names[4:] == ["site 4", "site 5"]


def test_dtypes_that_tell_sites_apart_are_not_cut_off():
    """The values before them are, which the two sites have in common."""
    values = "64,False,True,False,False,128,128,4096,8192,16384"
    keys = [f"[{values},torch.bfloat16,torch.{last}]" for last in ("float32", "bfloat16")]
    names = site_names([("m.h", key) for key in keys], ["", ""])
    assert all(len(name) <= len("h ") + KEY_WIDTH for name in names)
    assert [name.rpartition("\N{HORIZONTAL ELLIPSIS}")[2] for name in names] == [", bf16, fp32]", ", bf16, bf16]"]
