"""Compares losses, results and gradients of training files with those of the module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from lit_ort.export.artifacts import CHECKPOINT, EVALUATION_MODEL, OPTIMIZER_MODEL, TRAINING_MODEL
from lit_ort.export.call import Call, evaluating
from lit_ort.export.check import cases_of, compare, run_cases
from lit_ort.export.graph import dynamic_dimensions
from lit_ort.export.loss import LossCall
from lit_ort.export.result import Checked

# With onnxruntime and NumPy only, as on a device.
_RUN = f"""
import sys
import numpy
from onnxruntime.training.api import CheckpointState, Module, Optimizer
folder, inputs_path, results_path = sys.argv[1:]
inputs = numpy.load(inputs_path)
state = CheckpointState.load_checkpoint(folder + "/{CHECKPOINT}")
module = Module(folder + "/{TRAINING_MODEL}", state, folder + "/{EVALUATION_MODEL}")
optimizer = Optimizer(folder + "/{OPTIMIZER_MODEL}", module)
arrays = {{}}
for case in sorted({{key.split("/")[0] for key in inputs.files}}):
    feeds = {{key.split("/", 1)[1]: inputs[key] for key in inputs.files if key.split("/")[0] == case}}
    module.eval()
    results = module(*(feeds[name] for name in module.input_names()))
    results = results if isinstance(results, tuple) else (results,)
    arrays.update({{f"{{case}}/{{name}}": value for name, value in zip(module.output_names(), results)}})
    module.train()
    module(*(feeds[name] for name in module.input_names()))
    gradients = {{name: parameter.grad.copy() for name, parameter in state.parameters if parameter.requires_grad}}
    arrays.update({{f"gradients {{case}}/{{name}}": value for name, value in gradients.items()}})
    module.lazy_reset_grad()
numpy.savez(results_path, **arrays)
"""
_RANDOM = frozenset({"Dropout", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli"})


def check_training(
    model: onnx.ModelProto, folder: Path, loss: LossCall, trainable: Sequence[str]
) -> tuple[Checked, ...]:
    """Runs the files at the batch's sizes, at half of them and at one, as far as they are dynamic.

    Args:
        model: the model from which the files were generated.
        folder: the folder of the files.
        loss: the loss.
        trainable: the names of the trainable parameters.

    Raises:
        ExportError: a session rejects a model, or results have another shape.
    """
    batch = Call(_WithOwnParameters(loss), loss.batch_names, loss.batch, loss.call.output_names)
    with evaluating(batch.function):
        cases = list(cases_of(batch, {name: dynamic_dimensions(model)[name] for name in batch.names}))
    results = run_cases(_RUN, folder, [tensors for tensors, _ in cases], batch.names)
    producers = {name: node.op_type for node in model.graph.node for name in node.output}
    checks = [
        compare(batch, tensors, expected, results[str(k)], producers) for k, (tensors, expected) in enumerate(cases)
    ]
    if any(node.op_type in _RANDOM for node in model.graph.node):
        return tuple(checks)
    for k, (tensors, _) in enumerate(cases):
        expected = _gradients(loss, tensors, trainable)
        if expected is not None:
            checks.append(_compare_gradients(loss, tensors, expected, results[f"gradients {k}"]))
    return tuple(checks)


class _WithOwnParameters(nn.Module):
    """A loss as a function of a batch only, with the module's parameters."""

    def __init__(self, loss: LossCall) -> None:
        super().__init__()
        self.loss, self._own = loss.call.function, loss.call.tensors[len(loss.batch) :]

    def forward(self, *batch: Tensor) -> tuple[Tensor, ...]:
        return self.loss(*batch, *self._own)


def _compare_gradients(
    loss: LossCall, batch: Sequence[Tensor], expected: Mapping[str, Tensor], actual: Mapping[str, np.ndarray]
) -> Checked:
    """Compares gradients. Errors are relative to the largest value of all gradients: some are zero up to rounding."""
    largest = max((float(gradient.abs().max()) for gradient in expected.values()), default=0.0)
    errors = {
        name: float((torch.from_numpy(actual[name]) - gradient).abs().max()) / max(largest, 1e-12)
        for name, gradient in expected.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    shapes = {name: tuple(tensor.shape) for name, tensor in zip(loss.batch_names, batch, strict=True)}
    return Checked(shapes, errors[worst], f"the gradient of {worst}")


def _gradients(loss: LossCall, batch: Sequence[Tensor], trainable: Sequence[str]) -> dict[str, Tensor] | None:
    """The gradients of the loss in training mode, which keeps the module's buffers; None if it can't be computed."""
    function = loss.call.function
    buffers = {name: buffer.clone() for name, buffer in function.named_buffers()}
    own = loss.call.tensors[len(loss.batch) :]
    parameters = [
        value.clone().requires_grad_(name in trainable) for name, value in zip(loss.parameters, own, strict=True)
    ]
    with torch.enable_grad():
        try:
            value, *_ = torch.func.functional_call(function, buffers, (*batch, *parameters))
        # For example, batch normalization of a single value.
        except (RuntimeError, ValueError, IndexError):
            return None
    if value.isnan():
        return None
    differentiated = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = torch.autograd.grad(value, differentiated, allow_unused=True, materialize_grads=True)
    return dict(zip((name for name in loss.parameters if name in trainable), gradients, strict=True))
