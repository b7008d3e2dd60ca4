"""Results of kernels/cute_gemm.py on a Hopper GPU with the extra `cute`.

python -m pytest -m gpu tests/gpu/test_cute_gemm.py
"""

from __future__ import annotations

import itertools

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
    """Odd sizes, more tiles than multiprocessors, one K tile: into poisoned memory, twice; one kernel for all shapes."""
    compile_ahead(search_space(8192, 8192, 8192), dtype)
    for (m, n, k), _ in itertools.product(SHAPES, range(2)):
        a, b = torch.randn(m, k, dtype=dtype, device="cuda"), torch.randn(n, k, dtype=dtype, device="cuda")
        expected = a.float() @ b.float().T
        for config in search_space(m, n, k):
            result = cute_gemm.__wrapped__(a, b, config)
            assert torch.allclose(result.float(), expected, rtol=2**-6, atol=2**-6 * k**0.5), f"{m, n, k} {config}"
            result.fill_(float("nan"))
    assert len(kernels.loaded) <= 2 * len(search_space(8192, 8192, 8192)) + len(search_space(1, 1, 1)) + len(search_space(33, 17, 70))


def test_a_tuned_product_is_right_and_shares_its_config_in_a_bucket():
    """Tuning drops nothing that compiles, for every config answers rightly."""
    for n_records, (m, n, k) in ((1, (512, 768, 1024)), (1, (500, 600, 900))):
        a, b = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16()
        assert torch.allclose(cute_gemm(a, b).float(), a.float() @ b.float().T, rtol=2**-6, atol=0.5)
        assert len(cute_gemm.records) == n_records
    assert [each.failure for each in cute_gemm.records[-1].candidates if each.failure] == []
