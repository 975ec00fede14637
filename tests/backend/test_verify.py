"""Verification against eager during training: it passes, detects errors, and doesn't change the training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from lit_ort.backend import verify
from lit_ort.errors import VerificationError
from tests.backend.classifier import Classifier, classes
from tests.backend.wrong import scale_outputs
from tests.compare import backend


def test_verification_passes_with_dropout() -> None:
    engine = backend(verify_first_step=True)
    loss = torch.compile(Classifier.loss, backend=engine)
    loss(Classifier(dropout=0.3), *classes(7)).backward()
    assert engine.compile_log.graphs[0].kind == "fused"


def test_verification_names_the_wrong_values(monkeypatch: pytest.MonkeyPatch) -> None:
    scale_outputs(monkeypatch, (5, 8), 1.5)
    loss = torch.compile(Classifier.loss, backend=backend(verify_first_step=True))
    with pytest.raises(VerificationError, match=r"gradient of head\.weight 5\.0e-01"):
        loss(Classifier(), *classes(7))


def test_every_nth_run_is_verified_and_reported() -> None:
    engine = backend(verify_every_n_steps=3)
    module = Classifier(dropout=0.3)
    loss = torch.compile(Classifier.loss, backend=engine)
    for _ in range(7):
        loss(module, *classes(7)).backward()
    (report,) = engine.compile_log.graphs
    assert report.verified == 3
    assert all(float(line.rpartition(" ")[2]) < 1e-5 for line in report.worst)
    assert "verified 3 times; errors at most " in str(report)


def test_a_later_wrong_run_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = backend(verify_every_n_steps=2)
    module = Classifier()
    loss = torch.compile(Classifier.loss, backend=engine)
    loss(module, *classes(7))
    loss(module, *classes(7))
    monkeypatch.setattr(verify, "run_in_eager", lambda graph, inputs, precision: [inputs[0].new_zeros(())])
    monkeypatch.setattr(verify, "in_float64", lambda graph, inputs: [inputs[0].new_zeros(())])
    with pytest.raises(VerificationError, match="disagrees"):
        loss(module, *classes(7))


def test_verification_does_not_change_random_numbers() -> None:
    def masks(**options: Any) -> list[Tensor]:
        torch.manual_seed(3)
        loss = torch.compile(Classifier.loss, backend=backend(**options))
        module = Classifier(dropout=0.5)
        return [loss(module, *classes(7)).detach() for _ in range(4)]

    assert torch.equal(torch.stack(masks()), torch.stack(masks(verify_every_n_steps=1)))


def test_float64_decides_where_eager_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(graph: fx.GraphModule, inputs: Sequence[Any], precision: str) -> tuple[Tensor, ...]:
        return tuple((output + 1e4) - 1e4 for output in graph(*inputs))

    monkeypatch.setattr(verify, "run_in_eager", rounded)
    engine = backend(verify_first_step=True, verify_tolerance=1e-6)
    torch.compile(Classifier.loss, backend=engine)(Classifier(), *classes(7))
    assert engine.compile_log.graphs[0].verified == 1


def agree(eager: Callable[[Tensor], Tensor], compiled: Callable[[Tensor], Tensor], x: Tensor) -> None:
    verify.require_agreement(
        lambda x: (eager(x),),
        lambda x: (compiled(x),),
        [x.requires_grad_()],
        names=["x"],
        tolerance=1e-4,
        graph="graph",
        exact=lambda x: (eager(x.double()),),
    )


def test_a_unit_that_is_zero_up_to_rounding_takes_either_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.full((64,), 0.1).nextafter(torch.zeros(()))
    x[:32] = 1.0
    functions = lambda x: (x * 3 - 0.3).relu().sum(), lambda x: (x * 3 - 0.3 + 1e-7).relu().sum()
    agree(*functions, x)
    monkeypatch.setattr(verify, "_PERTURBATIONS", 0)
    with pytest.raises(VerificationError, match="gradient of x"):
        agree(*functions, x)


def test_a_small_error_is_not_taken_for_rounding() -> None:
    with pytest.raises(VerificationError, match="gradient of x 1.0e-03"):
        agree(lambda x: x.tanh().sum(), lambda x: x.tanh().sum() * 1.001, torch.randn(64))


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(4, 3),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(4, 3) + torch.randn_like(x),
    "normal": lambda x: torch.normal(x.detach(), 2.0),
    "randint": lambda x: x[torch.randint(0, 4, (5,))],
    "randperm": lambda x: x[torch.randperm(4)],
    "multinomial": lambda x: x.detach().softmax(1).multinomial(2).float(),
    "bernoulli": lambda x: torch.bernoulli(x.detach().sigmoid()),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.4) + torch.rand_like(x),
    "dropout_in_place": lambda x: torch.nn.functional.dropout(x * 2, 0.4, inplace=True) + torch.rand_like(x),
    "dropout_of_rows": lambda x: torch.nn.functional.dropout1d(x, 0.4) + torch.rand_like(x),
    "alpha_dropout": lambda x: torch.nn.functional.alpha_dropout(x, 0.4, True) + torch.rand_like(x),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3) + torch.rand_like(x),
    "rrelu": lambda x: torch.nn.functional.rrelu(x, training=True) + torch.rand_like(x),
    "rsample": lambda x: torch.distributions.Normal(x, 1.0, validate_args=False).rsample(),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", DRAWS)
def test_eager_draws_the_same_numbers(name: str) -> None:
    def step(x: Tensor) -> Tensor:
        return (x * 2 - DRAWS[name](x).sum()).square().mean()

    engine = backend(verify_every_n_steps=1)
    compiled = torch.compile(step, backend=engine)
    for _ in range(2):
        compiled(torch.randn(4, 3, requires_grad=True)).backward()
    assert engine.compile_log.graphs[0].verified == 2


def test_the_graph_that_trains_is_compared() -> None:
    def step(module: Classifier, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = module.loss(x, y)
        return loss, loss * 2

    engine = backend(verify_first_step=True)
    torch.compile(step, backend=engine)(Classifier(), *classes(7))[0].backward()
    assert [(graph.kind, graph.verified) for graph in engine.compile_log.graphs] == [("fused", 1)]


def test_gradients_are_compared_if_the_loss_is_also_returned_detached(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(module: Classifier, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = Classifier.loss(module, x, y)
        return loss.detach(), loss

    module, batch = Classifier(), classes(7)
    engine = backend(verify_first_step=True)
    torch.compile(step, backend=engine)(module, *batch)[1].backward()
    (report,) = engine.compile_log.graphs
    assert report.kind == "fused"
    assert any(name.startswith("gradient of") for name in report.worst)
    scale_outputs(monkeypatch, (5, 8), 1.5)
    with pytest.raises(VerificationError, match=r"gradient of .*head\.weight"):
        torch.compile(step, backend=backend(verify_first_step=True))(Classifier(), *batch)


@pytest.mark.parametrize("other", [None, 0.0, math.inf])
@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_values_that_are_not_finite_have_to_be_the_same(
    value: float, other: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def masked(x: Tensor, value: float) -> Tensor:
        return (x.exp() * 3).masked_fill(x > 0, value)

    x = torch.linspace(-1, 1, 64)
    compiled = torch.compile(lambda x: masked(x, value), backend=backend(verify_first_step=True))
    if other is None:
        compiled(x)
        return
    monkeypatch.setattr(verify, "run_in_eager", lambda graph, inputs, precision: [masked(inputs[0], other)])
    monkeypatch.setattr(verify, "in_float64", lambda graph, inputs: [masked(inputs[0].double(), other)])
    with pytest.raises(VerificationError, match=r"output 0 (inf|nan)"):
        compiled(x)
