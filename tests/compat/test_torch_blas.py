"""On which CPUs MKL uses half of the vectors."""

from __future__ import annotations

import pytest
import torch

from lit_ort._compat import torch_blas


@pytest.mark.parametrize(
    ("features", "has_wide_vectors"),
    [
        ({"cpu_name": "Intel(R) Xeon(R) Processor", "avx512_f": True}, False),
        ({"cpu_name": "AMD EPYC", "avx512_f": True}, True),
        ({"cpu_name": "AMD EPYC"}, False),
        ({"avx512_f": True}, False),
    ],
)
def test_mkl_uses_half_of_amds_wide_vectors(
    features: dict[str, object], has_wide_vectors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    assert torch_blas.has_wide_vectors() is has_wide_vectors
