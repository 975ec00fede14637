"""Mixed precision by option, by autocast in a step and by autocast around it: errors like those of eager autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lit_ort_tasks.transformer_lm import TransformerLM
from torch import Tensor, nn

from lit_ort.backend.explanation import explain
from lit_ort.errors import LitOrtWarning, OptionsError, VerificationError
from lit_ort.options import ORTOptions
from tests.backend.wrong import scale_outputs
from tests.compare import backend, gradients, relative_error
from tests.hf_models import CASES

pytestmark = pytest.mark.usefixtures("one_thread")

# The largest ratio of our error to that of eager autocast, for single tensors and on average.
WORST, MEAN = 2.0, 1.2
BF16 = {"precision": "bf16-mixed"}
Step = Callable[..., Tensor]


def autocast(step: Step) -> Step:
    def run(*args: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return step(*args)

    return run


def double(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: double(part) for name, part in value.items()}
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def assert_as_close_as_autocast(module: nn.Module, ours: Step, eager: Step, exact: Step, *args: Any) -> None:
    """Compares the errors of loss and gradients, relative to float64, with those of eager autocast."""
    twin, reference = copy.deepcopy(module), copy.deepcopy(module).double()
    losses = [ours(module, *args), eager(twin, *args), exact(reference, *map(double, args))]
    for loss in losses:
        loss.backward()
    ours_loss, eager_loss, exact_loss = (loss.detach().double() for loss in losses)
    # The error of one number can be far below its usual size, half of bfloat16's precision.
    assert relative_error(ours_loss, exact_loss) <= WORST * relative_error(eager_loss, exact_loss) + 2**-10
    expected = gradients(reference)
    floor = 1e-3 * max(float(g.norm()) for g in expected.values())

    def errors(actual: dict[str, Tensor]) -> Tensor:
        return torch.tensor(
            [float((actual[name].double() - g).norm()) / max(float(g.norm()), floor) for name, g in expected.items()]
        )

    our_errors, eager_errors = errors(gradients(module)), errors(gradients(twin))
    assert float(our_errors.mean()) <= MEAN * float(eager_errors.mean())
    worst = int((our_errors - WORST * eager_errors).argmax())
    assert our_errors[worst] <= WORST * eager_errors[worst] + 2e-3, list(expected)[worst]
    assert float(our_errors.mean()) > 1e-4, "nothing was rounded"
    assert {p.grad.dtype for p in module.parameters() if p.grad is not None} == {torch.float32}


def test_transformer_lm_is_as_close_to_float64_as_autocast() -> None:
    module, engine = TransformerLM(2_000, dropout=0.0), backend(**BF16)
    batch = (torch.randint(2_000, (20, 8)), torch.randint(2_000, (20, 8)))
    loss = TransformerLM.loss

    def step(module: Any, *batch: Tensor) -> Tensor:
        return loss(module, batch)

    assert_as_close_as_autocast(module, torch.compile(step, backend=engine), autocast(step), step, *batch)
    (report,) = engine.compile_log.graphs
    assert (report.kind, report.precision) == ("fused", "bf16-mixed")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bert_pretrain", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("gpt2", "bert_finetune"))]
)
def test_gpt2_and_bert_are_as_close_to_float64_as_autocast(name: str) -> None:
    build, make_batch = CASES[name]
    task, engine = build().train(), backend(**BF16)

    def step(task: Any, batch: dict[str, Tensor]) -> Tensor:
        return task.loss(batch)

    compiled = torch.compile(step, backend=engine)
    assert_as_close_as_autocast(task, compiled, autocast(step), step, make_batch(task))
    assert [report.kind for report in engine.compile_log.graphs] == ["fused"]


class Two(nn.Module):
    """Two layers, for steps with autocast around one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 48), nn.Linear(48, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x)))


def rounded_weights(module: Two) -> set[str]:
    """The weights whose gradients are matmuls in bfloat16, so that bfloat16 represents them exactly."""
    grads = {name: parameter.grad for name, parameter in module.named_parameters() if name.endswith("weight")}
    return {name for name, gradient in grads.items() if gradient is not None and is_rounded(gradient)}


def is_rounded(value: Tensor) -> bool:
    return torch.equal(value, value.bfloat16().float())


def first_only(module: Two, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        hidden = module.first(x)
    return module.second(F.gelu(hidden.float())).square().mean()


def all_but_second(module: Two, x: Tensor) -> Tensor:
    hidden = F.gelu(module.first(x))
    with torch.autocast("cpu", enabled=False):
        return module.second(hidden.float()).square().mean()


def exact_two(module: Two, x: Tensor) -> Tensor:
    return module(x).square().mean()


CASES_OF_REGIONS: dict[str, tuple[Step, Step, dict[str, str], set[str]]] = {
    "a region": (first_only, first_only, {}, {"first.weight"}),
    "off inside the option": (all_but_second, autocast(all_but_second), BF16, {"first.weight"}),
    "off inside autocast": (autocast(all_but_second), autocast(all_but_second), {}, {"first.weight"}),
    "around": (autocast(exact_two), autocast(exact_two), {}, {"first.weight", "second.weight"}),
    "option": (exact_two, autocast(exact_two), BF16, {"first.weight", "second.weight"}),
    "neither": (exact_two, exact_two, {}, set()),
}


@pytest.mark.parametrize("name", list(CASES_OF_REGIONS))
def test_regions_round_the_same_matmuls_as_eager(name: str) -> None:
    step, eager, options, expected = CASES_OF_REGIONS[name]
    engine, module, x = backend(**options), Two(), torch.randn(32, 64)
    compiled = torch.compile(step, backend=engine)
    if expected:
        assert_as_close_as_autocast(module, compiled, eager, exact_two, x)
    else:
        compiled(module, x).backward()
    assert rounded_weights(module) == expected
    report = engine.compile_log.graphs[0]
    assert report.kind == "fused"
    both = "32-true and bf16-mixed"
    assert report.precision == {0: "32-true", 1: both, 2: "bf16-mixed"}[len(expected)]
    assert report.precision in explain(engine).details()


def attended(module: Two, x: Tensor) -> Tensor:
    """Converts a mask to the dtype of the query, which autocast determines."""
    hidden = module.first(x)[None]
    mask = torch.eye(len(x)).to(hidden.dtype)
    hidden = F.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=mask)
    return module.second(hidden).float().square().mean()


def test_code_of_a_step_sees_the_dtypes_of_its_autocast() -> None:
    engine, step = backend(), autocast(attended)
    compiled = torch.compile(step, backend=engine)
    assert_as_close_as_autocast(Two(), compiled, step, attended, torch.randn(32, 64))
    assert [graph.kind for graph in engine.compile_log.graphs] == ["fused"]


def test_autocast_around_the_call_needs_another_graph() -> None:
    engine, module, x = backend(), Two(), torch.randn(32, 64)
    compiled = torch.compile(exact_two, backend=engine)
    plain = compiled(module, x)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = compiled(module, x)
    torch.testing.assert_close(compiled(module, x), plain, rtol=0, atol=0)
    assert mixed != plain
    assert [report.precision for report in engine.compile_log.graphs] == ["32-true", "bf16-mixed"]


@pytest.mark.parametrize("wants_gradient", [True, False])
def test_outputs_have_the_dtypes_of_eager(wants_gradient: bool) -> None:
    module, x = Two(), torch.randn(32, 64)

    def step(module: Two, x: Tensor) -> tuple[Tensor, ...]:
        hidden = module.first(x)
        narrow = hidden.to(x.dtype).to(hidden.dtype)
        return hidden, narrow.tanh(), hidden.float().sum(), x, (hidden * hidden.dtype.itemsize).argmax(-1)

    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(wants_gradient):
        expected = step(module, x)
        actual = torch.compile(step, backend=backend())(module, x)
    assert [value.dtype for value in actual] == [value.dtype for value in expected]
    assert [value.requires_grad for value in actual] == [value.requires_grad for value in expected]
    for a, b in zip(actual[:4], expected[:4], strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=5e-2)
    if wants_gradient:
        weight = module.first.weight
        (ours,), (eager,) = (torch.autograd.grad(o[0], weight, torch.ones_like(o[0])) for o in (actual, expected))
        assert relative_error(ours, eager) < 1e-2


def test_the_option_does_not_change_the_dtypes_that_code_sees() -> None:
    module, x = Two(), torch.randn(32, 64)
    output = torch.compile(module, backend=backend(**BF16))(x)
    assert output.dtype == torch.float32
    assert 1e-4 < relative_error(output.detach(), module(x).detach()) < 1e-2


def test_a_bfloat16_tensor_as_input_of_a_graph() -> None:
    module, engine = Two(), backend()
    x = torch.randn(32, 64)

    def step(module: Two, x: Tensor) -> Tensor:
        hidden = module.first(x)
        torch._dynamo.graph_break()
        return module.second(F.gelu(hidden)).float().square().mean()

    compiled = torch.compile(step, backend=engine)
    assert_as_close_as_autocast(module, autocast(compiled), autocast(step), step, x)
    assert {report.precision for report in engine.compile_log.graphs} == {"bf16-mixed"}


def test_float16_by_autocast() -> None:
    def step(module: Two, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return module(x).float().square().mean()

    assert_as_close_as_autocast(Two(), torch.compile(step, backend=backend()), step, exact_two, torch.randn(32, 64))
    with pytest.raises(OptionsError, match="precision='16-mixed' is not one of"):
        ORTOptions.from_mapping({"precision": "16-mixed"})


def test_fallback_runs_under_autocast() -> None:
    def step(module: Two, x: Tensor) -> tuple[Tensor, Tensor]:
        output = module(x)
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (output.float(),)).sum(), output

    module, x = Two(), torch.randn(32, 64)
    engine = backend(fallback="warn", **BF16)
    with pytest.warns(LitOrtWarning, match="runs in eager"):
        loss, output = torch.compile(step, backend=engine)(module, x)
    assert [graph.precision for graph in engine.compile_log.graphs] == ["bf16-mixed"]
    loss.backward()
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(x)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, expected.float(), rtol=0, atol=0)


@pytest.mark.parametrize("where", ["option", "around"])
def test_verification(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = BF16 if where == "option" else {}
    step = exact_two if where == "option" else autocast(exact_two)
    x = torch.randn(32, 64)
    torch.compile(step, backend=backend(verify_first_step=True, **options))(Two(), x).backward()
    torch.compiler.reset()
    scale_outputs(monkeypatch, (48, 64), 1.2)
    with pytest.raises(VerificationError, match=r"gradient of first"):
        torch.compile(step, backend=backend(verify_first_step=True, **options))(Two(), x)


@pytest.mark.slow
def test_attention_and_dropout_are_random_and_reproducible() -> None:
    module, x = nn.TransformerEncoderLayer(16, 2, 32, 0.3, batch_first=True), torch.randn(2, 8, 16)
    compiled = torch.compile(lambda x: module(x).square().mean(), backend=backend(**BF16))

    def losses() -> list[float]:
        torch.manual_seed(5)
        return [compiled(x).item() for _ in range(3)]

    first = losses()
    assert len(set(first)) == 3
    assert losses() == first


NORMS = {
    "layer norm": nn.LayerNorm(8),
    "group norm": nn.GroupNorm(2, 8),
    "batch norm": nn.BatchNorm1d(8),
    "batch norm of batches": nn.BatchNorm1d(8, track_running_stats=False),
}


@pytest.mark.parametrize("name", NORMS)
def test_normalization_statistics_are_passed_from_forward_to_backward(name: str) -> None:
    """Their dtype is that of the parameters, which torch's trace doesn't record."""
    layer, norm, x = nn.Linear(4, 8), NORMS[name], torch.randn(16, 4)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = norm(layer(x))
        return hidden, hidden.float().square().mean()

    engine = backend()
    with torch.autocast("cpu", torch.bfloat16):
        outputs, expected = torch.compile(step, backend=engine)(x), step(x)
    for output, reference in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, reference, rtol=2e-2, atol=2e-2)
    # A gradient for the first output needs the two-session form.
    ours = torch.autograd.grad(outputs[0].float().sum() + outputs[1], layer.weight)[0]
    eagers = torch.autograd.grad(expected[0].float().sum() + expected[1], layer.weight)[0]
    torch.testing.assert_close(ours, eagers, rtol=5e-2, atol=5e-2)
    assert [graph.kind for graph in engine.compile_log.graphs] == ["fused", "split"]
