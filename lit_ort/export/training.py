"""`lit_ort.export_training`: exports a module and its loss as the files that train it on a device."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    import onnx

    from lit_ort.export.loss import LossCall

from lit_ort.errors import ExportError, LitOrtWarning
from lit_ort.export.call import keeping_modes
from lit_ort.export.result import MIB, Checked, inputs_as_text

ADAMW, SGD = OPTIMIZERS = ("adamw", "sgd")
# The opset that the exporter writes without conversion and the training build can read.
OPSET = 18
TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class ExportedTraining:
    """The result of `export_training`; prints as a summary.

    Args:
        folder: the folder with training_model.onnx, eval_model.onnx, optimizer_model.onnx and checkpoint.
        inputs: the inputs of both models in order, with their sizes; dynamic sizes are names.
        outputs: the outputs of both models: the loss, and then the outputs of an inference model.
        trainable, frozen: the names of the parameters.
        checked: the errors of the evaluation model's results and of the gradients, compared with the module, at each
            size; empty with `verify=False`.
        size_bytes: the size of all files.
    """

    folder: Path
    inputs: Mapping[str, tuple[int | str, ...]]
    outputs: tuple[str, ...]
    trainable: tuple[str, ...]
    frozen: tuple[str, ...]
    checked: tuple[Checked, ...]
    size_bytes: int

    def __str__(self) -> str:
        inputs = inputs_as_text(self.inputs)
        return "\n".join(
            [
                f"{self.folder}: {self.size_bytes / MIB:.1f} MiB; {inputs} -> {', '.join(self.outputs)}; "
                f"{len(self.trainable)} parameters are trainable, {len(self.frozen)} are frozen",
                *(f"  {check}" for check in self.checked),
            ]
        )


def export_training(
    module: nn.Module,
    folder: str | os.PathLike[str],
    batch: Any,
    *,
    trainable: Sequence[str] | None = None,
    optimizer: str = ADAMW,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    gradient_clip_val: float | None = None,
    dynamic: bool | Mapping[str, Mapping[int, str]] = True,
    result: str | None = None,
    verify: bool = True,
    tolerance: float = TOLERANCE,
) -> ExportedTraining:
    """Exports a module for `onnxruntime.training.api`: training, evaluation and optimizer models and a checkpoint.

    The training model is the module in training mode with its loss. Submodules that are in eval mode while the module
    is in training mode stay in eval mode. Running statistics of batch normalization and padding rows of embeddings are
    constant on the device. The files are written by `onnxruntime.training.artifacts.generate_artifacts`, which is part
    of the training build.

    Args:
        module: a module with a `training_step` that returns one loss, or whose `forward` returns a loss (alone, first,
            or as `loss`).
        folder: the folder of the files; it is created. Existing files with the same names are replaced only after the
            new ones have been written and compared.
        batch: a batch with which the step is called. Its tensors become inputs.
        trainable: names or patterns (`*.lora_*`) of parameters; None selects those that require a gradient. All others
            are frozen.
        optimizer: `adamw` or `sgd`. The learning rate is set on the device.
        betas, eps, weight_decay: of AdamW, with torch's defaults.
        gradient_clip_val: the maximum norm of all gradients, or None.
        dynamic: as in `lit_ort.export`.
        result: the name of the submodule whose results `export_model_for_inferencing` returns. None selects the module
            itself if its step calls it, and otherwise the outputs of `forward` other than the loss.
        verify: whether to run the files in a separate process, at the batch's sizes, at half of them and at one.
            Compares the loss and the results of the evaluation model and, for modules without dropout, every gradient.
        tolerance: the largest error that verification accepts, relative to the largest value.

    Raises:
        ExportError: an argument is invalid, the step rejects the batch, an operator has no gradient, or results differ
            from the module's. No file is written then.
    """
    # These imports load onnx, which training doesn't need.
    from lit_ort.export.artifacts import CHECKPOINT, generate, operator_with_fixed_sizes, require_training_build
    from lit_ort.export.check_training import check_training
    from lit_ort.export.loss import loss_call_of, make_initializers
    from lit_ort.export.trainer import without_trainer
    from lit_ort.export.write import bytes_of, require_close, sizes_of, unfinished_files

    if optimizer not in OPTIMIZERS:
        raise ExportError(f"optimizer={optimizer!r} is unknown. Use one of {' and '.join(OPTIMIZERS)}.")
    require_training_build()
    trainable_names, frozen_names = _parameters(module, trainable)
    target = Path(folder)
    settings = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "gradient_clip_val": gradient_clip_val}
    with without_trainer(module), _in_training(module):
        loss = loss_call_of(module, batch, result)
        model = _model_of(module, loss, dynamic)
        fixed_operator = operator_with_fixed_sizes(model)
        if fixed_operator and dynamic is not True:
            raise ExportError(f"{_fixed(fixed_operator)} Pass dynamic=False.")
        if fixed_operator:
            warnings.warn(f"{_fixed(fixed_operator)} All sizes are fixed.", LitOrtWarning, stacklevel=2)
            model = _model_of(module, loss, False)
        inputs = sizes_of(model, loss.batch_names)
        make_initializers(model, loss)
        with unfinished_files(target, CHECKPOINT) as unfinished:
            generate(model, unfinished, trainable_names, frozen_names, optimizer, settings)
            checked = check_training(model, unfinished, loss, trainable_names) if verify else ()
            require_close(checked, tolerance)
            size = bytes_of(unfinished)
    outputs = loss.call.output_names
    return ExportedTraining(target, inputs, outputs, trainable_names, frozen_names, checked, size)


def _model_of(module: nn.Module, loss: LossCall, dynamic: bool | Mapping[str, Mapping[int, str]]) -> onnx.ModelProto:
    """The loss as a model, with functions replaced by forms that have correct gradients."""
    from lit_ort.export.derivable import derivable_forms
    from lit_ort.export.graph import model_of

    with derivable_forms(module):
        return model_of(loss.call, dynamic, OPSET, fixed=loss.parameters).model


def _fixed(operator: str) -> str:
    return f"ONNX Runtime supports the gradient of {operator} for fixed sizes only."


def _parameters(module: nn.Module, patterns: Sequence[str] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the trainable and of the frozen parameters."""
    parameters = dict(module.named_parameters())
    if patterns is None:
        selected = [name for name, parameter in parameters.items() if parameter.requires_grad]
    else:
        patterns = [patterns] if isinstance(patterns, str) else patterns
        for pattern in patterns:
            if not fnmatch.filter(parameters, pattern):
                raise ExportError(
                    f"trainable={pattern!r} matches no parameter of {type(module).__name__}. Use names of its "
                    f"named_parameters() or patterns of them, such as {next(iter(parameters), '')!r}."
                )
        selected = [name for name in parameters if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if not selected:
        raise ExportError(f"No parameter of {type(module).__name__} requires a gradient. Select some with trainable=.")
    return tuple(selected), tuple(name for name in parameters if name not in selected)


@contextlib.contextmanager
def _in_training(module: nn.Module) -> Iterator[None]:
    """Sets a module that is in eval mode to training mode, and restores the modes afterwards."""
    with keeping_modes(module):
        if not module.training:
            module.train()
        yield
