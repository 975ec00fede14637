"""Output layers with their cross entropy in sessions that call no Python."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_ort import SessionError
from lit_ort._compat import openmp
from lit_ort.kernels import loss_arguments
from lit_ort.ops.bfloat16_matmul import has_bfloat16_matmuls
from tests.compare import backend, mostly, relative_error
from tests.lower.test_native_phases import any_number_of_operators, assert_native

IGNORED = -100


@pytest.fixture(autouse=True)
def on_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    if openmp.find_openmp() is None:
        pytest.skip("torch has no OpenMP here")
    monkeypatch.setattr(openmp, "uses_openmp", lambda: True)


pytestmark = pytest.mark.usefixtures(any_number_of_operators.__name__)


@dataclasses.dataclass(frozen=True)
class Options:
    bias: bool = True
    weighted: bool = False
    mean: bool = True
    ignored: float = 0.3
    dtype: torch.dtype = torch.float32


class Step(nn.Module):
    class_weight: Tensor | None

    def __init__(self, options: Options, width: int = 24, classes: int = 1003) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, width))
        self.head = nn.Linear(width, classes, bias=options.bias)
        self.register_buffer("class_weight", torch.rand(classes) + 0.5 if options.weighted else None)
        self.reduction = "mean" if options.mean else "sum"
        self.to(options.dtype)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x).sin()), labels, self.class_weight, reduction=self.reduction)


def batch(options: Options, rows: int = 300, width: int = 24, classes: int = 1003) -> tuple[Tensor, Tensor]:
    labels = torch.where(torch.rand(rows) < options.ignored, IGNORED, torch.randint(classes, (rows,)))
    return torch.randn(rows, width, dtype=options.dtype), labels


def small_chunks(monkeypatch: pytest.MonkeyPatch, rows: int = 110) -> None:
    monkeypatch.setattr(loss_arguments, "CHUNK_BYTES", rows * 1003 * 4)


def check(
    step: Step, *batches: tuple[Tensor, Tensor], tolerance: float = 1e-5, dynamic: bool = False, mixed: bool = False
) -> None:
    """Loss and gradients as in eager, in a session without torch nodes."""
    compiled = torch.compile(step, backend=(engine := backend()), dynamic=dynamic)
    for x, labels in batches:
        found = []
        for call in (step, compiled):
            given = x.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                loss = call(given, labels)
            found.append([loss.detach(), *torch.autograd.grad(loss, [given, *step.parameters()])])
        for expected, actual in zip(*found, strict=True):
            assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
            if expected.isnan().all():
                assert actual.isnan().all()
            else:
                assert relative_error(actual, expected) <= tolerance
    assert_native(engine)
    assert all("LinearCrossEntropy" in graph.operators_after for graph in engine.compile_log.graphs)


TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 0.05}
CASES = [
    Options(*values)
    for values in itertools.product(
        (False, True), (False, True), (False, True), (0.0, 0.3, 1.0), (torch.float32, torch.float64, torch.bfloat16)
    )
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", mostly(pytest.mark.sweep, CASES, 7), ids=str)
def test_losses(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    if options.dtype == torch.bfloat16 and not has_bfloat16_matmuls():
        pytest.skip("torch's matmuls are faster here")
    small_chunks(monkeypatch)
    check(Step(options), batch(options), tolerance=TOLERANCES[options.dtype])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [0.0, 0.3])
def test_losses_under_autocast(ignored: float, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_bfloat16_matmuls():
        pytest.skip("torch's matmuls are faster here")
    small_chunks(monkeypatch)
    options = Options(weighted=weighted, ignored=ignored)
    check(Step(options), batch(options), tolerance=TOLERANCES[torch.bfloat16], mixed=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("classes", [600, 607, 608, 609, 640, 641])
def test_numbers_of_classes(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_arguments, "CHUNK_BYTES", 100 * classes * 4)
    options = Options(ignored=0.0)
    check(Step(options, classes=classes), batch(options, rows=500, classes=classes))


def test_sizes_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    options = Options()
    check(Step(options), *(batch(options, rows) for rows in (300, 301, 417, 550, 300)), dynamic=True)


def test_a_frozen_layer_and_input() -> None:
    for name in ("weight", "bias"):
        step = Step(Options())
        getattr(step.head, name).requires_grad_(False)
        step.body.requires_grad_(False)
        x, labels = batch(Options())
        compiled = torch.compile(step, backend=(engine := backend()))
        wanted = [p for p in step.parameters() if p.requires_grad]
        expected, actual = (torch.autograd.grad(call(x, labels), wanted) for call in (step, compiled))
        assert relative_error(actual[0], expected[0]) <= 1e-5
        assert_native(engine)


def test_an_evaluation() -> None:
    step = Step(Options())
    compiled = torch.compile(step, backend=(engine := backend()))
    with torch.no_grad():
        x, labels = batch(Options())
        assert relative_error(compiled(x, labels), step(x, labels)) <= 1e-6
    assert_native(engine)


def test_extreme_logits() -> None:
    """Probabilities that underflow, and infinite and missing logits, as in eager."""
    step = Step(Options(ignored=0.0))
    x, labels = batch(Options(ignored=0.0))
    compiled = torch.compile(step, backend=backend())
    for factor in (1e3, float("inf"), float("nan")):
        with torch.no_grad():
            step.head.weight[5, :].fill_(factor)
        expected, actual = (torch.autograd.grad(call(x, labels), step.head.bias)[0] for call in (step, compiled))
        torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("label", [1003, -1])
def test_a_label_that_is_no_class(label: int) -> None:
    step = Step(Options(ignored=0.0))
    x, labels = batch(Options(ignored=0.0))
    compiled = torch.compile(step, backend=backend())
    expected = compiled(x, labels).item()
    wrong = labels.clone()
    wrong[17] = label
    with pytest.raises(SessionError, match=f"label {label} is out of range: the loss has 1003 classes"):
        compiled(x, wrong)
    assert compiled(x, labels).item() == expected


@pytest.mark.usefixtures("compiled_matmuls")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_losses_with_compiled_matmuls(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    options = Options(dtype=dtype)
    check(Step(options), batch(options), tolerance=1e-5 if dtype == torch.float32 else 1e-13)


def test_threads_change_no_result() -> None:
    step, found = Step(Options()), []
    x, labels = batch(Options())
    compiled = torch.compile(step, backend=backend())
    threads = torch.get_num_threads()
    try:
        for count in (threads, 1):
            torch.set_num_threads(count)
            found.append([compiled(x, labels).detach(), *torch.autograd.grad(compiled(x, labels), step.head.bias)])
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))


def test_a_model_for_readers(tmp_path: Path) -> None:
    step, engine = Step(Options()), backend(dump_dir=str(tmp_path))
    torch.compile(step, backend=engine)(*batch(Options()))
    (path,) = tmp_path.rglob("*forward*.onnx")
    (loss,) = [node for node in onnx.load(path).graph.node if node.op_type == "LinearCrossEntropy"]
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in loss.attribute}
    assert attributes["reduction"] == b"mean"
    assert attributes["ignore_index"] == IGNORED
    assert attributes["arguments"] == [b"hidden", b"weight", b"bias", b"labels"]
