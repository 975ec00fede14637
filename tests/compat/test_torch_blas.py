"""On which CPUs matmuls are MKL's."""

from __future__ import annotations

import pytest
import torch

from lit_ort._compat import torch_blas

WIDE = {"avx512_f": True, "avx_vnni": True}


@pytest.mark.parametrize(
    ("features", "is_preferred"),
    [
        ({"cpu_name": "Intel(R) Xeon(R) Processor", **WIDE}, True),
        ({"cpu_name": "AMD EPYC", "avx512_f": True}, True),
        ({"cpu_name": "AMD EPYC"}, True),
        ({"cpu_name": "AMD EPYC", **WIDE}, False),
    ],
)
def test_mkl_is_used_where_it_uses_all_vector_units(
    features: dict[str, object], is_preferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    monkeypatch.setattr(torch_blas, "matmul_functions", dict)
    assert torch_blas.prefers_mkl.__wrapped__() is is_preferred
