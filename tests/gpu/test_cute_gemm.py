"""Results of kernels/cute_gemm.py on a Hopper GPU with the extra `cute`.

python -m pytest -m gpu tests/gpu/test_cute_gemm.py
"""

from __future__ import annotations

import pytest
import torch

from kernels.cute_build import kernels, reason_to_skip
from kernels.cute_gemm import compile_ahead, cute_gemm, search_space

REASON = reason_to_skip()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON)]
SHAPES = ((1, 1, 1), (33, 17, 70), (1000, 1000, 1000), (4096, 4096, 64), (300, 8192, 8192))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_kernel_is_right_at_every_shape_it_fits(dtype: torch.dtype):
    """Odd sizes, more tiles than multiprocessors, one K tile: into poisoned memory, twice; one
    kernel for all shapes.

    So tuning drops none.
    """
    compile_ahead(search_space(8192, 8192, 8192), dtype)
    for m, n, k in SHAPES * 2:
        a, b = (
            torch.randn(m, k, dtype=dtype, device="cuda"),
            torch.randn(n, k, dtype=dtype, device="cuda"),
        )
        expected = a.float() @ b.float().T
        for config in search_space(m, n, k):
            result = cute_gemm.__wrapped__(a, b, config)
            assert torch.allclose(result.float(), expected, rtol=2**-6, atol=2**-6 * k**0.5), (
                f"{m, n, k} {config}"
            )
            result.fill_(float("nan"))
    assert len(kernels.loaded) <= 2 * sum(
        len(search_space(*shape)) for shape in ((8192, 8192, 8192), (1, 1, 1), (33, 17, 70))
    )
    assert torch.allclose(cute_gemm(a, b).float(), expected, rtol=2**-6, atol=2**-6 * k**0.5)
    assert [each.failure for each in cute_gemm.records[-1].candidates if each.failure] == []
