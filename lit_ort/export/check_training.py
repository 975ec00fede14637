"""Takes several steps with the files of an exported training step, and compares them with steps in eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_ort.errors import ExportError
from lit_ort.export.check import FIX_SIZE, error_of, resized, run_cases
from lit_ort.export.export_result import Checked
from lit_ort.export.exported_graph import dynamic_dimensions
from lit_ort.export.seeded_random import SeededRandom
from lit_ort.export.side_effects import changed_attributes
from lit_ort.export.step_function import LOSS, Step, prediction_names
from lit_ort.export.step_optimizers import OPTIMIZER, STEP, Optimizer, Tensors
from lit_ort.export.training_files import Models
from lit_ort.export.write import require_close

STEPS, SLOW = 3, 1e-3
_AS_BUFFER = (
    "Steps change {}, of which the models have the first value. If results depend on it, register it as a buffer and "
    "write into that"
)
# Below this part of the largest gradient, a gradient can be rounding alone, as that of a bias before a normalization.
# Adam follows its sign.
_NOISE = 1e-4
# With onnxruntime and NumPy only: the programs of the folder, one step at a time.
_RUN = f"""
import os, sys
import numpy
folder, inputs_path, results_path = sys.argv[1:]
sys.path.insert(0, folder)
sys.dont_write_bytecode = True
import train
inputs = numpy.load(inputs_path)
cases = {{}}
for key in inputs.files:
    case, name = key.split("/", 1)
    cases.setdefault(int(case), {{}})[name] = inputs[key]
states = {{name: train.read(name) for name in ("parameters.safetensors", "optimizer.safetensors")}}
results = {{}}
for k in sorted(cases):
    for file, names in states.items():
        train.write(file, {{name: cases[k].pop(name) for name in names}})
    for model in ("eval_step.onnx", "predict.onnx"):
        if k == 0 and os.path.exists(os.path.join(folder, model)):
            results.update({{f"evaluated/{{name}}": value for name, value in train.run(model, cases[k]).items()}})
    for report in train.train([cases[k]], {SLOW}, k):
        results.update({{f"{{k}}/{{name}}": value for name, value in report.items()}})
    for file in states:
        results.update({{f"{{k}}/{{name}}": value for name, value in train.read(file).items()}})
for file, arrays in states.items():
    train.write(file, arrays)
numpy.savez(results_path, **results)
"""


def check_training(
    folder: Path,
    models: Models,
    step: Step,
    trainable: Sequence[str],
    optimizer: Optimizer,
    clip_norm: float | None,
    tolerance: float,
) -> tuple[Checked, ...]:
    """Takes steps at the batch's sizes and at half of them, as far as they are dynamic, each from the state of eager's.

    Compares loss, logged values, and the new parameters, buffers and optimizer state of each step; and loss and
    predictions in eval mode.

    Args:
        folder: the folder of the files.
        models: the models, and the state.
        step: the step.
        trainable: the names of the parameters that are trained.
        optimizer: the optimizer.
        clip_norm: the largest norm of all gradients together, or None.
        tolerance: the largest error to accept.

    Raises:
        ExportError: a session rejects a model, results differ, the loss is not finite, or the step changes parameters
            or buffers that are constants in the models.
    """
    batches = list(_batches(step, dynamic_dimensions(models.train)))
    evaluated = _evaluated(step, batches[0])
    twin = copy.deepcopy(step)
    twin.set_mode(training=True)
    eager = _Eager(twin, trainable, optimizer, clip_norm, models.state)
    cases, expected = [], []
    for k, batch in enumerate(batches):
        cases.append((*batch, *eager.state().values()))
        try:
            expected.append(eager.step(batch, k))
        # User code can raise any exception.
        except Exception as error:
            changed = ", ".join(changed_attributes(step.module, twin.module)) or "nothing else"
            raise ExportError(
                f"Step {k + 1} of {type(step.module).__name__} fails in eager PyTorch: {type(error).__name__}: "
                f"{error}. Beside parameters and buffers, earlier steps have changed {changed}."
            ) from error
    _require_finite(step, expected[0].values[LOSS])
    _require_state(step, twin, models.state)
    found = run_cases(_RUN, folder, cases, (*step.names, *models.state))
    shapes = [{n: tuple(t.shape) for n, t in zip(step.names, batch, strict=True)} for batch in batches]
    first = _compared(shapes[0], evaluated, found["evaluated"], {}, " in eval mode")
    steps = enumerate(zip(shapes, expected, strict=True))
    later = (_compared(s, e.values, found[str(k)], e.noise, f" of step {k + 1}") for k, (s, e) in steps)
    checked = (first, *later)
    changed = changed_attributes(step.module, twin.module)
    require_close(checked, tolerance, remedy=_AS_BUFFER.format(", ".join(changed)) if changed else None)
    return checked


def _evaluated(step: Step, batch: Sequence[Tensor]) -> Tensors:
    """The results in eval mode, by name."""
    twin = copy.deepcopy(step)
    twin.set_mode(training=False)
    with torch.no_grad(), SeededRandom(torch.tensor(0)):
        results = twin(*batch)
    return {LOSS: results.loss, **results.logged, **prediction_names(step, results.predictions)}


def _require_finite(step: Step, loss: Tensor) -> None:
    if not loss.isfinite():
        raise ExportError(
            f"The loss of {type(step.module).__name__} for the batch is {float(loss)}, with which nothing can be "
            "compared. Pass a batch with a finite loss. verify=False writes the models without a comparison."
        )


def _require_state(step: Step, after: Step, state: Collection[str]) -> None:
    """Requires that steps in eager changed no parameters and buffers other than the state."""
    before, now = ({k: v for part in s.parameters_and_buffers() for k, v in part.items()} for s in (step, after))
    for name in before.keys() - set(state):
        if error_of(now[name], before[name]):
            raise ExportError(
                f"The training step of {type(step.module).__name__} changes {name} in a way that can't be traced. "
                f"Write into it instead, as in `{name}.copy_(value)`."
            )


def _batches(step: Step, dynamic: Mapping[str, Mapping[int, str]]) -> Iterator[tuple[Tensor, ...]]:
    """The batch, and in turns one of half its sizes that the module accepts."""
    other = step.batch
    for only_first in (True, False):
        tensors = resized(step.names, step.batch, dynamic, lambda size: -(-size // 2), only_first)
        try:
            loss = copy.deepcopy(step)(*tensors).loss
        # User code can raise any exception: for example, a convolution's kernel is larger than its input.
        except Exception:
            break
        if loss.isnan():
            break
        other = tensors
    for k in range(STEPS):
        yield other if k % 2 else step.batch


class _Expected(NamedTuple):
    """Results and new state of a step in eager, and where a new parameter may follow from rounding alone."""

    values: Tensors
    noise: Tensors


class _Eager:
    """Trains a copy of a step with torch's optimizer."""

    def __init__(
        self, twin: Step, trainable: Sequence[str], optimizer: Optimizer, clip_norm: float | None, state: Tensors
    ) -> None:
        self._twin, self._optimizer, self._clip_norm, self._state = twin, optimizer, clip_norm, dict(state)
        parameters = dict(twin.module.named_parameters())
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in trainable)
        self._trained = {name: parameters[name] for name in trainable}
        build: Any = optimizer.eager
        self._eager = build(self._trained.values(), lr=SLOW, **optimizer.settings)

    def state(self) -> Tensors:
        """The current values of the model's state."""
        parameters, buffers = self._twin.parameters_and_buffers()
        values = {**self._state, **parameters, **buffers}
        for name, parameter in self._trained.items():
            own = self._eager.state.get(parameter, {})
            values |= {f"{OPTIMIZER}.{slot}.{name}": own[slot] for slot in self._optimizer.slots if slot in own}
            values |= {STEP: own["step"]} if "step" in own else {}
        return {name: values[name].clone() for name in self._state}

    def step(self, batch: Sequence[Tensor], seed: int) -> _Expected:
        self._eager.zero_grad()
        with SeededRandom(torch.tensor(seed)):
            results = self._twin(*batch)
            results.loss.backward()
        gradients = {name: value.grad for name, value in self._trained.items() if value.grad is not None}
        largest = max(float(gradient.abs().max()) for gradient in gradients.values())
        noise = {name: gradient.abs() < _NOISE * largest for name, gradient in gradients.items()}
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._trained.values(), self._clip_norm)
        self._eager.step()
        values = {LOSS: results.loss.detach(), **results.logged, **self.state()}
        return _Expected(values, noise if self._optimizer.counts else {})


def _compared(
    shapes: dict[str, tuple[int, ...]], expected: Tensors, found: Mapping[str, Any], noise: Tensors, suffix: str
) -> Checked:
    """The largest error of any result.

    Raises:
        ExportError: a result has another shape.
    """
    errors = {}
    for name, value in expected.items():
        result = torch.as_tensor(found[name])
        if result.shape != value.shape:
            raise ExportError(
                f"The exported model returns {name} of shape {list(result.shape)} at {shapes}, but the module returns "
                f"{list(value.shape)}. {FIX_SIZE}."
            )
        result = torch.where(noise[name], value, result) if name in noise else result
        errors[name] = error_of(result, value) * _scale(name, value, expected)
    worst = max(errors, key=lambda name: errors[name])
    return Checked(shapes, errors[worst], f"{worst}{suffix}")


def _scale(name: str, value: Tensor, values: Tensors) -> float:
    """A factor of the error of an optimizer's tensor: a gradient that is zero up to rounding has no relative error."""
    slot = name.split(".")[1] if name.startswith(f"{OPTIMIZER}.") and name != STEP else None
    if slot is None or not value.numel():
        return 1.0
    slots = (v for n, v in values.items() if n.startswith(f"{OPTIMIZER}.{slot}.") and v.numel())
    largest = max((float(v.abs().max()) for v in slots), default=0.0)
    own = max(float(value.abs().max()), 1e-12)
    return own / max(own, 1e-2 * largest)
