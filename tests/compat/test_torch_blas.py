"""On which CPUs matmuls are MKL's."""

from __future__ import annotations

import pytest
import torch

from lit_ort._compat import torch_blas


@pytest.mark.parametrize(
    ("cpu", "llvm_name", "is_fast"),
    [
        ("Intel(R) Xeon(R) Processor", "sapphirerapids", True),
        ("Intel(R) Xeon(R) Processor", None, True),
        ("AMD EPYC", "znver4", True),
        ("AMD EPYC", "znver5", False),
        ("AMD EPYC", None, False),
    ],
)
def test_mkl_is_used_where_it_uses_all_vector_units(
    cpu: str, llvm_name: str | None, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": cpu})
    monkeypatch.setattr(torch_blas, "_llvm_name", lambda: llvm_name)
    monkeypatch.setattr(torch_blas, "matmul_functions", dict)
    assert torch_blas.is_mkl_fast.__wrapped__() is is_fast


def test_the_name_of_this_cpu_is_known() -> None:
    assert torch_blas._llvm_name()
