"""Names for people: as short as tells sites apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.log.formatting import (
    KEY_WIDTH,
    closure_name,
    milliseconds,
    plain,
    printable,
    site_name,
    site_names,
    table,
)

PUSH = (
    "[666,1003,1008,2,True,0,triton.language.bfloat16,"
    "torch.bfloat16,torch.int64,torch.int64,torch.int32]"
)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("__main__.gla.<locals>.step", "step"),
        ("kernels.row_parallel_tuners.tune_products.<locals>.<lambda>", "tune_products.<lambda>"),
        ("__main__.<lambda>", "<lambda>"),
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
        ("[torch.float16,torch.float16]", ""),
        (
            "[((4096,5504),(5504,1),torch.bfloat16),((64,),(1,),torch.float16),'None',2,2]",
            "[4096x5504 bf16, 64 fp16, None, 2, 2]",
        ),
        ("['a,b',(1,(2,3)),torch.float32]", "['a, b', (1, (2, 3))]"),
        ("[((),(),torch.float8_e4m3fn),1]", "[scalar fp8_e4m3fn, 1]"),
        ("a name", "a name"),
    ],
)
def test_a_site_is_named_by_what_the_user_has_named(key: str, brief: str):
    """Kernel and values of ``key=`` with short dtypes; the dtypes of all arguments that Triton
    appends are in the log.
    """
    assert site_name("m.f", key) == f"f {brief}".rstrip()


def test_a_key_has_a_bound_width():
    """A name has an ellipsis where the key function has returned something long."""
    text = site_name("f", f"[{','.join(str(n) for n in range(1000, 1100))}]")
    assert (len(text), text[-1]) == (len("f ") + KEY_WIDTH, "\N{HORIZONTAL ELLIPSIS}")


def test_sites_that_look_alike_have_longer_names():
    """Of another dtype or module, or with other strides; of one kernel and key those that the
    caller gives.
    """
    strided = [("m.f", f"[((8,8),({stride},1),torch.float32)]") for stride in (8, 16)]
    sites = [
        ("m.h", "[32]"),
        ("m.h", "[64,torch.float32]"),
        ("n.h", "[64,torch.bfloat16]"),
        *strided,
        ("m.k", "[2]"),
        ("m.k", "[2]"),
    ]
    names = site_names(sites, [f"site {n}" for n in range(len(sites))])
    assert names[:3] == ["h [32]", "m.h [64, fp32]", "n.h [64, bf16]"]
    assert names[3:] == [
        "m.f [((8, 8), (8, 1), fp32)]",
        "m.f [((8, 8), (16, 1), fp32)]",
        "site 5",
        "site 6",
    ]


@given(st.text())
def test_any_text_is_one_printable_line(text: str):
    """Text that was printable stays as it is."""
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
    assert not text.isprintable() or printable(text) == text


@pytest.mark.parametrize(
    ("ms", "text"), [(0.0146, "0.0146"), (9.9994, "9.999"), (12.34, "12.3"), (1234.4, "1234")]
)
def test_milliseconds_have_three_digits(ms: float, text: str):
    assert milliseconds(ms) == text


def test_a_table_shows_what_there_is():
    """Numbers to the right, no column without a text, one line for each row; any text is one
    printable line of limited length.
    """
    rows = [
        {"id": "0123 x", "ms": 0.1391, "regs": None, "why": "because"},
        {"id": "a", "ms": 12.0, "regs": None, "why": ["b", 1]},
    ]
    assert table(rows) == [
        "id           ms  why",
        "0123 x   0.1391  because",
        "a       12.0000  b, 1",
    ]
    assert (table([]), table([{"name": "a", "gain": "1.43x"}], has_header=False)) == (
        [],
        ["a  1.43x"],
    )
    assert plain("größe  =\n 7 a\x1b[2Jb\udc80\x00") == "größe = 7 a\\x1b[2Jb\\udc80\\x00"
    assert plain("begin" + "x" * 100, 7) == "beginx…"
