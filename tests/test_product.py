"""Matrix products by either library: the same figures, whichever factor is transposed."""

from __future__ import annotations

import pytest
import torch

from lit_ort.compiler.kernels import product as module
from lit_ort.compiler.kernels.product import product

ROWS, INNER = 300, 512


@pytest.fixture(params=[False, True], ids=["MKL", "oneDNN"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each of oneDNN's products had; none where it isn't to be called."""
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    own, made = torch.ops.mkldnn._linear_pointwise, list[int]()

    def noted(left: torch.Tensor, *others: object) -> torch.Tensor:
        made.append(len(left))
        return own(left, *others)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", noted)
    monkeypatch.setattr(module, "not_intel", lambda: request.param)
    return made


def factors(transposed: bool, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(ROWS, INNER, generator=generator)
    right = torch.randn(columns, INNER, generator=generator).t()
    return left, right if transposed else right.contiguous()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_equals_float64(transposed: bool, bias: bool, calls: list[int], request: pytest.FixtureRequest) -> None:
    left, right = factors(transposed, 700)
    added = torch.randn(700) if bias else None
    out = torch.full((ROWS, 800), torch.nan)
    assert product(left, right, out[:, 50:750], added).data_ptr() == out[:, 50:].data_ptr()
    exact = left.double() @ right.double() + (0 if added is None else added.double())
    torch.testing.assert_close(out[:, 50:750].double(), exact, rtol=1e-5, atol=1e-4)
    assert bool(out[:, :50].isnan().all())
    assert bool(out[:, 750:].isnan().all())
    assert calls == ([ROWS] if "oneDNN" in request.node.name else [])


@pytest.mark.parametrize("calls", [True], indirect=True)
def test_mkl_has_what_onednn_is_slow_at(calls: list[int]) -> None:
    left, right = factors(True, 700)
    small = torch.randn(INNER, 64)
    doubles = left.double(), right.double()
    for a, b, added in (
        (torch.randn(INNER, ROWS).t(), right, None),
        (left, small, None),
        (*doubles, None),
        (left, right, torch.randn(ROWS, 700)),
        (left, right, torch.randn(1)),
        (torch.randn(3000, INNER), right, None),
    ):
        expected = a @ b + (0 if added is None else added)
        found = product(a, b, torch.empty(len(a), b.shape[1], dtype=a.dtype), added)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not calls
