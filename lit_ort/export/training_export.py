"""`lit_ort.export_training`: a module's training step as ONNX models that any onnxruntime can train with."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from lit_ort.errors import ExportError
from lit_ort.export.export_result import MIB, Checked, inputs_as_text

ADAMW = "adamw"
TOLERANCE = 1e-4
_NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class ExportedTraining:
    """The result of `export_training`; prints as a summary.

    Args:
        folder: the folder with train_step.onnx and the other files.
        inputs: the tensors of the batch, with their sizes; dynamic sizes are names.
        outputs: the loss and the logged values.
        predictions: the outputs of predict.onnx.
        trainable: the names of the parameters that are trained; all others are constants.
        checked: the errors of losses, of predictions and of state after several steps, compared with the module, at
            each size; empty with `verify=False`.
        size_bytes: the size of all files.
        fixed_sizes: sizes that could not be dynamic, and where the module uses them as constants.
    """

    folder: Path
    inputs: Mapping[str, tuple[int | str, ...]]
    outputs: tuple[str, ...]
    predictions: tuple[str, ...]
    trainable: tuple[str, ...]
    checked: tuple[Checked, ...]
    size_bytes: int
    fixed_sizes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.folder}: {self.size_bytes / MIB:.1f} MiB; {inputs_as_text(self.inputs)} -> "
            f"{', '.join(self.outputs)}; predictions: {', '.join(self.predictions) or 'none'}; "
            f"{len(self.trainable)} parameters are trained"
        ]
        if self.fixed_sizes:
            lines.append(f"  sizes that the module uses as constants: {'; '.join(self.fixed_sizes)}")
        return "\n".join([*lines, *(f"  {check}" for check in self.checked)])


def export_training(
    module: nn.Module,
    folder: str | os.PathLike[str],
    batch: Any,
    *,
    optimizer: str = ADAMW,
    optimizer_settings: Mapping[str, Any] = _NO_SETTINGS,
    trainable: Sequence[str] | None = None,
    clip_norm: float | None = None,
    dynamic: bool | Mapping[str, Mapping[int, str]] = True,
    dropout: bool = True,
    verify: bool = True,
    tolerance: float = TOLERANCE,
) -> ExportedTraining:
    """Exports a module's training step: forward, loss, backward and optimizer as one ONNX model of standard operators.

    The folder has train_step.onnx, eval_step.onnx, predict.onnx, parameters and optimizer state, train_step.json that
    describes them, and programs that train with them in Python, Node and a browser. They need onnxruntime alone.

    Args:
        module: a module with a `training_step` that returns one loss, or whose `forward` returns a loss (alone, first,
            or as `loss`). It isn't changed. Parts in eval mode stay in eval mode.
        folder: the folder to create.
        batch: a batch with which the step is called. Its tensors become inputs, its other values constants.
        optimizer: `adamw`, `adam` or `sgd`. The learning rate is an input of each step.
        optimizer_settings: settings other than torch's defaults: `betas`, `eps` and `weight_decay`, for sgd `momentum`,
            `nesterov` and `weight_decay`.
        trainable: names or patterns (`*.lora_*`) of parameters; None selects those that require a gradient. All others
            are constants.
        clip_norm: the largest norm of all gradients together, or None.
        dynamic: as in `lit_ort.export`.
        dropout: whether the training step computes dropout, as a function of its input `seed`.
        verify: whether to compare several steps, the state after them, and predictions with those of eager PyTorch.
        tolerance: the largest error that verification accepts, relative to the largest value.

    Raises:
        ExportError: an argument is invalid, the folder exists, the step rejects the batch, an operator has no form in
            ONNX, or results differ from the module's. No folder is left then.
    """
    # These imports load onnx, which training doesn't need.
    from lit_ort.export.check_training import check_training
    from lit_ort.export.step_function import LOSS, NEXT, Step, evaluation_function, training_function
    from lit_ort.export.step_model import changed_state, part_of, step_model
    from lit_ort.export.step_optimizers import optimizer_of
    from lit_ort.export.training_files import Models, new_folder, write_files
    from lit_ort.export.write import bytes_of, sizes_of

    chosen = optimizer_of(optimizer, optimizer_settings)
    if clip_norm is not None and clip_norm <= 0:
        raise ExportError(f"clip_norm={clip_norm} is not positive. Use the largest norm of all gradients, or None.")
    names = _trainable(module, trainable)
    with new_folder(Path(folder)) as unfinished:
        step = Step(module, batch, dropout)
        training = training_function(step, names, chosen, clip_norm)
        whole, fixed_sizes = step_model(training, step.names, dynamic)
        state = changed_state(whole)
        constants = {k: v for k, v in training.inputs.items() if k in step.state_names and k not in state}
        reports = (LOSS, *step.logged)
        evaluation = evaluation_function(step)
        evaluated = step_model(evaluation, step.names, dynamic).model
        evaluation_reports = (LOSS, *step.logged_in_eval)
        predictions = tuple(name for name in evaluation.output_names if name not in evaluation_reports)
        models = Models(
            part_of(whole, [*reports, *(f"{name}{NEXT}" for name in state)], constants),
            part_of(evaluated, evaluation_reports, constants),
            part_of(evaluated, predictions, constants),
            {name: training.inputs[name] for name in state},
        )
        write_files(unfinished, models, step, chosen, optimizer, clip_norm, fixed_sizes)
        checked = ()
        if verify:
            checked = check_training(unfinished, models, step, names, chosen, clip_norm, tolerance)
        size = bytes_of(unfinished)
    inputs = sizes_of(whole, step.names)
    return ExportedTraining(Path(folder), inputs, reports, predictions, names, checked, size, fixed_sizes)


def _trainable(module: nn.Module, patterns: Sequence[str] | None) -> tuple[str, ...]:
    """The names of the parameters to train."""
    parameters = dict(module.named_parameters())
    if patterns is None:
        selected = tuple(name for name, parameter in parameters.items() if parameter.requires_grad)
    else:
        patterns = [patterns] if isinstance(patterns, str) else patterns
        for pattern in patterns:
            if not fnmatch.filter(parameters, pattern):
                raise ExportError(
                    f"trainable={pattern!r} matches no parameter of {type(module).__name__}. Use names of its "
                    f"named_parameters() or patterns of them, such as {next(iter(parameters), '')!r}."
                )
        selected = tuple(name for name in parameters if any(fnmatch.fnmatchcase(name, p) for p in patterns))
    if not selected:
        raise ExportError(f"No parameter of {type(module).__name__} requires a gradient. Select some with trainable=.")
    return selected
