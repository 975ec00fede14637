"""Matmuls with both libraries and any transposed factor: correct results in the given memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lit_ort.ops import OPERATORS
from lit_ort.ops import matmul as module
from lit_ort.ops.matmul import Gain, Method, matmul, method_of
from tests.ops.helpers import RecordingAllocator

aten = torch.ops.aten
ROWS, INNER, COLUMNS = 300, 512, 700


@pytest.fixture(params=list(Gain), ids=lambda gain: gain.name)
def gain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gain:
    """The gain of oneDNN that is simulated."""
    if request.param is not Gain.NONE and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(module, "onednn_gain", lambda: request.param)
    monkeypatch.setattr(module, "LITTLE_MATMUL", 1e8)
    return request.param


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The shapes of the results that oneDNN computes."""
    linear, shapes = module.onednn_linear, list[tuple[int, int]]()

    def recorded(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        shapes.append((len(left), len(right)))
        return linear(left, right, bias)

    monkeypatch.setattr(module, "onednn_linear", recorded)
    return shapes


def factors(transposed: str, rows: int = ROWS, inner: int = INNER, columns: int = COLUMNS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(rows, inner, generator=generator)
    right = torch.randn(inner, columns, generator=generator)
    left = left.t().contiguous().t() if "left" in transposed else left
    return left, right.t().contiguous().t() if "right" in transposed else right


@pytest.mark.parametrize("parts", [2**20, 2**16])
@pytest.mark.parametrize("kind", ["", "bias", "matrix", "number", "accumulate"])
@pytest.mark.parametrize("transposed", ["", "left", "right", "left right"])
@pytest.mark.parametrize("shape", [(300, 512, 700), (700, 512, 300)])
def test_matches_float64(
    shape: tuple[int, int, int],
    transposed: str,
    kind: str,
    parts: int,
    gain: Gain,
    calls: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PART_ELEMENTS", parts)
    rows, inner, columns = shape
    left, right = factors(transposed, *shape)
    shapes = {"bias": (columns,), "matrix": (rows, columns), "number": (1,)}
    added = torch.randn(shapes[kind]) if kind in shapes else None
    whole = torch.full((rows, columns + 100), torch.nan)
    out = whole[:, 50 : 50 + columns]
    before = out.fill_(2.0).double() if kind == "accumulate" else 0
    assert matmul(left, right, out, added, accumulate=kind == "accumulate").data_ptr() == out.data_ptr()
    exact = left.double() @ right.double() + (0 if added is None else added.double()) + before
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=2e-4)
    assert bool(whole[:, :50].isnan().all())
    assert bool(whole[:, 50 + columns :].isnan().all())
    if gain is Gain.NONE:
        assert not calls
    if gain is Gain.MUCH and kind in ("", "accumulate"):
        assert calls


@pytest.mark.parametrize("gain", [Gain.MUCH, Gain.LITTLE], indirect=True)
def test_mkl_computes_matmuls_that_are_slow_with_onednn(gain: Gain) -> None:
    left, right = factors("right")
    assert method_of(left, right) is Method.DIRECT
    assert method_of(left.double(), right.double()) is Method.MKL
    assert method_of(left, torch.randn(INNER, 8)) is Method.MKL
    # Rows of these factors are not adjacent in memory.
    assert method_of(left, torch.randn(COLUMNS, 2 * INNER)[:, :INNER].t()) is Method.MKL
    assert method_of(torch.randn(ROWS, 2 * INNER)[:, :INNER], right) is Method.MKL
    assert method_of(torch.randn(0, INNER), right) is Method.MKL


@pytest.mark.parametrize("gain", [Gain.MUCH], indirect=True)
def test_a_tall_gradient_of_a_weight_is_transposed(gain: Gain) -> None:
    grad, x = torch.randn(INNER, 3000), torch.randn(INNER, 200)
    assert method_of(grad.t(), x) is Method.TRANSPOSED
    assert method_of(x.t(), grad) is Method.DIRECT
    # The inner size is small, so the copy takes longer than the matmul saves.
    assert method_of(torch.randn(16, 4096).t(), torch.randn(16, 4096)) is Method.MKL
    workspace = OPERATORS[aten.mm.default].workspace_bytes
    assert workspace is not None
    assert workspace(grad.t(), x) == 4 * 3000 * 200
    assert workspace(torch.randn(9000, INNER), x) == 4 * module.PART_ELEMENTS


@pytest.mark.parametrize("gain", [Gain.LITTLE], indirect=True)
def test_with_a_little_gain_onednn_computes_wide_gradients_of_weights(gain: Gain) -> None:
    grad, x = torch.randn(INNER, 200), torch.randn(INNER, 800)
    assert method_of(grad.t(), x) is Method.DIRECT
    assert method_of(x.t(), grad) is Method.MKL
    assert method_of(grad[:, :100].t().contiguous().t(), x[:, :100].contiguous()) is Method.MKL


def kernel_and_torch(target: torch._ops.OpOverload, *args: object, **kwargs: object) -> tuple[Tensor, Tensor, bool]:
    allocator = RecordingAllocator()
    result = OPERATORS[target].kernel(allocator, *args, **kwargs)
    return result, target(*args, **kwargs), allocator.contains(result)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("transposed", ["", "left", "right"])
def test_kernels_match_torch_in_the_given_memory(transposed: str, dtype: torch.dtype) -> None:
    left, right = (t.to(dtype) for t in factors(transposed))
    stacked = left.expand(3, -1, -1), right.expand(3, -1, -1)
    bias, matrix = torch.randn(COLUMNS, dtype=dtype), torch.randn(ROWS, COLUMNS, dtype=dtype)
    checks = (
        kernel_and_torch(aten.mm.default, left, right),
        kernel_and_torch(aten.addmm.default, bias, left, right),
        kernel_and_torch(aten.addmm.default, matrix, left, right, beta=0.5, alpha=2),
        kernel_and_torch(aten.bmm.default, *stacked),
        kernel_and_torch(aten.baddbmm.default, bias, *stacked, beta=0.5, alpha=2),
    )
    relative, absolute = (2e-2, 2e-1) if dtype == torch.bfloat16 else (1e-4, 1e-3)
    for actual, expected, is_in_memory in checks:
        assert is_in_memory
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual, expected, rtol=relative, atol=absolute)


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_empty_factors(shape: tuple[int, int, int]) -> None:
    left, right = factors("", *shape)
    actual, expected, _ = kernel_and_torch(aten.mm.default, left, right)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("cpu", "expected"),
    [
        ({"cpu_name": "Intel(R) Xeon(R)", "avx512_f": True, "avx_vnni": True}, Gain.NONE),
        ({"cpu_name": "AMD EPYC", "avx512_f": True, "avx_vnni": True}, Gain.MUCH),
        ({"cpu_name": "AMD EPYC", "avx512_f": True, "avx_vnni": False}, Gain.LITTLE),
        ({}, Gain.NONE),
    ],
)
def test_the_gain_depends_on_the_cpu(cpu: dict[str, object], expected: Gain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    uncached: Callable[[], Gain] = module.onednn_gain.__wrapped__
    assert uncached() is (expected if torch.backends.mkldnn.is_available() else Gain.NONE)
