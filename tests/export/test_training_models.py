"""The models and operators of the zoo as exported training steps: loss, gradients and buffers beside eager."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from lit_ort.errors import ExportError
from lit_ort.export.seeded_random import SeededRandom
from lit_ort.export.step_function import LOSS, NEXT, Step, training_function
from lit_ort.export.step_model import part_of, step_model
from lit_ort.export.step_optimizers import optimizer_of
from tests.zoo import image_and_sound_models, operators, plain_models, text_models
from tests.zoo.cases import Case, weighted_mean

MODELS = {**text_models.CASES, **image_and_sound_models.CASES, **plain_models.CASES}
# Their code reads values of tensors, and does other things for other values.
REFUSED = {
    "Mixtral, experts in turn",
    "Wav2Vec2 with CTC",
    "LSTM of packed sequences",
    "set prediction, as DETR's",
}
OPERATORS = [
    (group, name)
    for group, make in (
        ("activations", operators.activations),
        ("normalizations", operators.normalizations),
        ("pooling", operators.pooling),
        ("padding and resizing", operators.padding_and_resizing),
        ("convolutions", operators.convolutions),
        ("losses", operators.losses),
        ("indexing", operators.indexing),
        ("arithmetic", operators.arithmetic),
    )
    for name in make()
]
# Without a form so far.
WITHOUT_FORM = {
    "antialias": "_upsample_bilinear2d_aa_backward",
    "mode of rounds": "mode",
    "cummax": "cummax",
    "det": "linalg",
}
pytestmark = [pytest.mark.sweep, pytest.mark.usefixtures("one_thread")]


class WithLoss(nn.Module):
    """A model of the zoo with its loss."""

    def __init__(self, module: nn.Module, case: Case) -> None:
        super().__init__()
        self.module, self._loss = module, case.loss

    def forward(self, **batch: Any) -> Tensor:
        return self._loss(self.module(**batch))


class OneOperator(nn.Module):
    def __init__(self, operation: Any, start: Tensor) -> None:
        super().__init__()
        self.operation, self.start = operation, nn.Parameter(start.detach().clone())

    def forward(self, one: Tensor) -> Tensor:
        return weighted_mean(self.operation(self.start * one).float())


def errors_of(module: nn.Module, batch: dict[str, Any]) -> dict[str, float]:
    """The errors of the loss, gradients and buffers of a step. With momentum, its first velocity is the gradient."""
    step = Step(module, batch, dropout=True)
    names = [name for name, parameter in step.module.named_parameters() if parameter.requires_grad]
    function = training_function(step, names, optimizer_of("sgd", {"momentum": 0.9}), None)
    np.random.seed(0)  # some models draw masks with NumPy
    whole = step_model(function, step.names, False).model
    model = part_of(whole, [value.name for value in whole.graph.output], {})
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    outputs = [value.name for value in session.get_outputs()]
    feeds = {value.name: function.inputs[value.name].numpy() for value in session.get_inputs()}
    found = {name: torch.as_tensor(v) for name, v in zip(outputs, session.run(outputs, feeds), strict=True)}

    twin = copy.deepcopy(step)
    twin.set_mode(training=True)
    np.random.seed(0)
    with SeededRandom(torch.tensor(0)):
        loss = twin(*step.batch).loss
        loss.backward()
    gradients = {name: value.grad for name, value in twin.module.named_parameters() if value.grad is not None}
    floor = 1e-2 * max(float(gradient.norm()) for gradient in gradients.values())
    errors = {LOSS: float(((found[LOSS] - loss) / loss.abs().clamp_min(1e-3)).abs().detach())}
    for name, gradient in gradients.items():
        velocity = found.get(f"optimizer.momentum_buffer.{name}{NEXT}", torch.zeros_like(gradient))
        errors[name] = float((velocity - gradient).norm()) / max(float(gradient.norm()), floor, 1e-12)
    for name, buffer in twin.module.named_buffers():
        if f"{name}{NEXT}" in found:
            difference = found[f"{name}{NEXT}"].double() - buffer.double()
            errors[name] = float(difference.norm() / buffer.double().norm().clamp_min(1e-3))
    return errors


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    module, batch = MODELS[name].make(0.0)
    if name in REFUSED:
        with pytest.raises(ExportError, match="can't be exported"):
            errors_of(WithLoss(module, MODELS[name]), batch)
        return
    errors = errors_of(WithLoss(module, MODELS[name]), batch)
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize(("group", "name"), OPERATORS)
def test_operators(group: str, name: str) -> None:
    torch.manual_seed(0)
    operations: Any = operators.GROUPS[group].make(0.0)[0]
    module = OneOperator(operations.operations[name], getattr(operations, f"input_of_{name}"))
    if name in WITHOUT_FORM:
        with pytest.raises(ExportError, match=re.escape(WITHOUT_FORM[name])):
            errors_of(module, {"one": torch.ones(())})
        return
    errors = errors_of(module, {"one": torch.ones(())})
    assert max(errors.values()) <= 1e-4, errors
