"""Output layer and cross entropy in one operator, compared with torch's two."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lit_ort.kernels.loss_arguments import chunk_rows
from lit_ort.ops import OPERATORS
from tests.ops.helpers import MeasuringAllocator, RecordingAllocator, closeness, relative_error

operator = torch.ops.lit_ort.linear_cross_entropy
ALL = (True, True, True)
IGNORED = -100
ROWS, WIDTH, CLASSES = 300, 40, 90


class Case:
    """An output layer whose rows are three chunks; the last one is smaller."""

    def __init__(self, ignored: float = 0.3, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
        self.hidden = (torch.randn(ROWS, WIDTH) * scale).to(dtype)
        self.weight, self.bias = torch.randn(CLASSES, WIDTH).to(dtype), torch.randn(CLASSES).to(dtype)
        self.class_weight = (torch.rand(CLASSES) + 0.5).to(dtype)
        self.labels = torch.where(torch.rand(ROWS) < ignored, IGNORED, torch.randint(CLASSES, (ROWS,)))

    def arguments(self, options: Options) -> tuple[Any, ...]:
        return (
            *(self.hidden, self.weight, self.bias if options.bias else None, self.labels),
            *(self.class_weight if options.weighted else None, IGNORED, options.mean, options.low_precision),
            list(options.wanted),
        )

    def results(self, options: Options) -> tuple[Tensor, ...]:
        return operator(*self.arguments(options))

    def torch_results(self, options: Options, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (self.hidden, self.weight, self.bias)]
        with torch.autocast("cpu", torch.bfloat16, enabled=options.low_precision):
            scores = functional.linear(leaves[0], leaves[1], leaves[2] if options.bias else None)
            weight = (
                self.class_weight.to(scores.dtype if dtype != torch.float32 else dtype) if options.weighted else None
            )
            reduction = "mean" if options.mean else "sum"
            loss = functional.cross_entropy(scores, self.labels, weight, reduction=reduction, ignore_index=IGNORED)
        return loss.detach(), *torch.autograd.grad(loss, leaves[: 2 + options.bias])


@dataclasses.dataclass(frozen=True)
class Options:
    mean: bool = True
    bias: bool = True
    weighted: bool = False
    low_precision: bool = False
    wanted: tuple[bool, bool, bool] = ALL


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_ort.kernels.loss_arguments.CHUNK_BYTES", 110 * CLASSES * 4)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ignored", [0.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mean", [False, True])
def test_matches_torch(mean: bool, bias: bool, weighted: bool, ignored: float, dtype: torch.dtype) -> None:
    case, options = Case(ignored, dtype=dtype), Options(mean, bias, weighted, wanted=(True, True, bias))
    expected = case.torch_results(options)
    for actual, reference in zip(case.results(options), expected, strict=False):
        assert actual.dtype == dtype
        assert relative_error(actual.double(), reference) < (1e-6 if dtype == torch.float32 else 1e-13)


def test_a_loss_whose_probability_underflows_is_exact() -> None:
    case = Case(scale=30.0)
    loss, *_ = case.results(Options())
    assert loss > 200
    assert relative_error(loss.double(), case.torch_results(Options())[0]) < 1e-6


@pytest.mark.parametrize("position", [0, 1, 2])
def test_gradients_that_are_not_wanted_are_empty(position: int) -> None:
    case = Case()
    expected = case.results(Options())
    first, second, third = (k == position for k in range(3))
    actual = case.results(Options(wanted=(first, second, third)))
    assert torch.equal(actual[0], expected[0])
    assert [gradient.numel() for k, gradient in enumerate(actual[1:]) if k != position] == [0, 0]
    assert torch.equal(actual[1 + position], expected[1 + position])


@pytest.mark.parametrize("mean", [False, True])
def test_all_labels_are_ignored(mean: bool) -> None:
    case, options = Case(ignored=1.0), Options(mean)
    actual = case.results(options)
    for value, reference in zip(actual, case.torch_results(options, torch.float32), strict=True):
        torch.testing.assert_close(value, reference, equal_nan=True)
    assert bool(actual[0].isnan()) == mean


def test_nan_in_the_activations_is_propagated() -> None:
    case = Case(ignored=0.0)
    case.hidden[7] = float("nan")
    assert case.results(Options())[0].isnan()


@pytest.mark.parametrize("label", [CLASSES, -1])
def test_a_label_out_of_range_is_reported(label: int) -> None:
    case = Case()
    case.labels[17] = label
    with pytest.raises(IndexError, match=f"label {label} is out of range: the loss has {CLASSES} classes"):
        case.results(Options())


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_low_precision_is_as_close_as_autocast(scale: float, weighted: bool) -> None:
    case, options = Case(scale=scale), Options(weighted=weighted, low_precision=True)
    exact = case.torch_results(Options(weighted=weighted))
    baseline = case.torch_results(options, torch.float32)
    actual = case.results(options)
    assert relative_error(actual[0].double(), exact[0]) < 1e-3
    for gradient, eager, reference in zip(actual[1:], baseline[1:], exact[1:], strict=True):
        assert gradient.dtype == torch.float32
        assert closeness(gradient, eager, reference) < 1.5


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("low_precision", [False, True])
def test_bf16_inputs_are_as_close_as_torch(low_precision: bool) -> None:
    case, options = Case(scale=0.3, dtype=torch.bfloat16), Options(low_precision=low_precision)
    exact, baseline = case.torch_results(Options()), case.torch_results(options, torch.bfloat16)
    actual = case.results(options)
    assert actual[0].dtype == baseline[0].dtype
    assert relative_error(actual[0].double(), exact[0]) < 1e-2
    for gradient, eager, reference in zip(actual[1:], baseline[1:], exact[1:], strict=True):
        assert gradient.dtype == torch.bfloat16
        assert closeness(gradient, eager, reference) < 1.5


def test_a_confident_prediction_has_an_exact_loss_and_gradient_in_bf16() -> None:
    """The label's probability is rounded to 1 in bfloat16, but the loss is not 0."""
    arguments = (torch.eye(4), torch.eye(4) * 9, None, torch.arange(4), None, IGNORED, True)
    actual = operator(*arguments, True, [True, True, False])
    expected = operator(*arguments, False, [True, True, False])
    assert expected[0] < 1e-3
    for value, reference in zip(actual[:3], expected[:3], strict=True):
        assert relative_error(value, reference) < 1e-2


@pytest.mark.parametrize("options", [Options(), Options(mean=False), Options(weighted=True), Options(bias=False)])
def test_gradcheck(options: Options) -> None:
    hidden, weight, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((5, 3), (4, 3), (4,)))
    labels = torch.tensor([0, 3, IGNORED, 1, 1])
    class_weight = torch.rand(4, dtype=torch.float64) if options.weighted else None

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        added = bias if options.bias else None
        wanted = [True, True, options.bias]
        results = operator(hidden, weight, added, labels, class_weight, IGNORED, options.mean, False, wanted)
        # The gradient of the loss is not one.
        return results[0].square()

    if options.bias:
        assert torch.autograd.gradcheck(loss, (hidden, weight, bias))
    else:
        assert torch.autograd.gradcheck(lambda h, w: loss(h, w, bias), (hidden, weight))


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(mean=False, weighted=True),
        Options(bias=False, wanted=(True, True, False)),
        Options(low_precision=True),
        Options(low_precision=True, weighted=True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(options: Options, dtype: torch.dtype) -> None:
    case = Case(dtype=dtype)
    for tensor in (case.hidden, case.weight, case.bias):
        tensor.requires_grad_()
    torch.library.opcheck(operator.default, case.arguments(options))


def test_opcheck_with_frozen_inputs() -> None:
    case = Case()
    case.hidden.requires_grad_()
    torch.library.opcheck(operator.default, case.arguments(Options(wanted=(True, False, False))))
    torch.library.opcheck(operator.default, Case().arguments(Options(wanted=(False, False, False))))


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("ignored", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("options", [Options(), Options(low_precision=True)])
def test_results_use_the_given_memory(options: Options, ignored: float) -> None:
    case, allocator = Case(ignored), RecordingAllocator()
    results = OPERATORS[operator.default].kernel(allocator, *case.arguments(options))
    assert all(allocator.contains(gradient) for gradient in results[1:])
    for actual, expected in zip(results, case.results(options), strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.parametrize(("rows", "sizes"), [(0, []), (1, [1]), (100, [100]), (101, [51, 50]), (301, [76, 76, 76, 73])])
def test_chunks_are_few_and_even(rows: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_ort.kernels.loss_arguments.CHUNK_BYTES", 100 * CLASSES * 4)
    size = chunk_rows(rows, CLASSES, 4)
    assert [min(size, rows - start) for start in range(0, rows, size)] == sizes


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("low_precision", [False, True])
def test_needs_no_more_than_the_declared_workspace(low_precision: bool, dtype: torch.dtype) -> None:
    entry, allocator = OPERATORS[operator.default], MeasuringAllocator()
    arguments = Case(dtype=dtype).arguments(Options(low_precision=low_precision))
    results = entry.kernel(allocator, *arguments)
    assert entry.workspace_bytes is not None
    workspace = entry.workspace_bytes(*arguments)
    assert allocator.peak - sum(result.numel() * result.element_size() for result in results) <= workspace
    # Less than the logits of two chunks.
    assert workspace < 2 * 110 * CLASSES * 4 + 6 * 4 * (ROWS + CLASSES) * WIDTH
