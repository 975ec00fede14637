"""`lit_ort.export_training`: a module's own loss becomes the files that train it on a device."""

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
# What the exporter writes without converting, and the training build reads.
OPSET = 18
TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class ExportedTraining:
    """A folder that `export_training` wrote, readable when printed.

    Args:
        folder: with training_model.onnx, eval_model.onnx, optimizer_model.onnx and checkpoint.
        inputs: of both models in their order, with their sizes; those that may change by name.
        outputs: of both models: the loss, and then what an inference model gives.
        trainable, frozen: names of the parameters.
        checked: how far the evaluation model is from the module at each size that was compared, and the gradients at
            the batch's own; empty with `verify=False`.
        size_bytes: of all files.
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
                f"{len(self.trainable)} parameters train, {len(self.frozen)} are frozen",
                *(f"  {one}" for one in self.checked),
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
    """Writes a module as `onnxruntime.training.api` trains it: training, evaluation and optimizer model, checkpoint.

    The training model is the module in training mode, with its own loss inside; parts that are in eval mode while the
    module itself is in training mode stay so. Running statistics of batch normalization and padding rows of embeddings
    keep their values on a device.
    The files are those of `onnxruntime.training.artifacts.generate_artifacts`, which the training build has.

    Args:
        module: with a `training_step` of one loss, or whose `forward` returns a loss (alone, first, or as `loss`).
        folder: is made; files of these names in it are replaced when the new ones are whole and have been compared.
        batch: that the step is called with. Its tensors become inputs.
        trainable: names or patterns (`*.lora_*`) of parameters; None takes those that require a gradient. The others
            are frozen.
        optimizer: `adamw` or `sgd`. The learning rate is set on the device.
        betas, eps, weight_decay: of AdamW, with torch's defaults.
        gradient_clip_val: the norm to which all gradients together are clipped.
        dynamic: as `lit_ort.export` takes it.
        result: name of the part of the module whose results `export_model_for_inferencing` gives; None takes the
            module itself where its step calls it, and otherwise what `forward` returns beside the loss.
        verify: runs the files in a process of their own: the loss and the results of the evaluation model at the
            batch's sizes, at half of them and at one, and, without dropout, every gradient.
        tolerance: the largest error that verification accepts, as a part of the largest value.

    Raises:
        ExportError: a value outside its rule, a batch that doesn't fit, an operator without a gradient, or results
            that are not the module's. No file is left then.
    """
    # What follows imports onnx, which training doesn't need.
    from lit_ort.export.artifacts import CHECKPOINT, generate, operator_with_fixed_sizes, require_training_build
    from lit_ort.export.check_training import check_training
    from lit_ort.export.loss import hold_parameters, loss_call_of
    from lit_ort.export.trainer import without_trainer
    from lit_ort.export.write import bytes_of, require_close, sizes_of, unfinished_files

    if optimizer not in OPTIMIZERS:
        raise ExportError(f"optimizer={optimizer!r} is unknown. Use one of {' and '.join(OPTIMIZERS)}.")
    require_training_build()
    trained, frozen = _parameters(module, trainable)
    target = Path(folder)
    settings = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "gradient_clip_val": gradient_clip_val}
    with without_trainer(module), _in_training(module):
        loss = loss_call_of(module, batch, result)
        model = _model_of(module, loss, dynamic)
        sized = operator_with_fixed_sizes(model)
        if sized and dynamic is not True:
            raise ExportError(f"{_fixed(sized)} Pass dynamic=False.")
        if sized:
            warnings.warn(f"{_fixed(sized)} All sizes are fixed.", LitOrtWarning, stacklevel=2)
            model = _model_of(module, loss, False)
        inputs = sizes_of(model, loss.batch_names)
        hold_parameters(model, loss)
        with unfinished_files(target, CHECKPOINT) as unfinished:
            generate(model, unfinished, trained, frozen, optimizer, settings)
            checked = check_training(model, unfinished, loss, trained) if verify else ()
            require_close(checked, tolerance)
            size = bytes_of(unfinished)
    return ExportedTraining(target, inputs, loss.call.output_names, trained, frozen, checked, size)


def _model_of(module: nn.Module, loss: LossCall, dynamic: bool | Mapping[str, Mapping[int, str]]) -> onnx.ModelProto:
    """The loss as a model, in forms that have a gradient where there are such."""
    from lit_ort.export.derivable import derivable_forms
    from lit_ort.export.graph import model_of

    with derivable_forms(module):
        return model_of(loss.call, dynamic, OPSET, fixed=loss.parameters)


def _fixed(operator: str) -> str:
    return f"ONNX Runtime computes the gradient of {operator} for the sizes of the batch alone."


def _parameters(module: nn.Module, patterns: Sequence[str] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the parameters that train, and of the frozen ones."""
    parameters = dict(module.named_parameters())
    if patterns is None:
        trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    else:
        patterns = [patterns] if isinstance(patterns, str) else patterns
        for pattern in patterns:
            if not fnmatch.filter(parameters, pattern):
                raise ExportError(
                    f"trainable={pattern!r} matches no parameter of {type(module).__name__}. Use names of its "
                    f"named_parameters() or patterns of them, such as {next(iter(parameters), '')!r}."
                )
        trained = [name for name in parameters if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if not trained:
        raise ExportError(f"No parameter of {type(module).__name__} requires a gradient. Name some by trainable=.")
    return tuple(trained), tuple(name for name in parameters if name not in trained)


@contextlib.contextmanager
def _in_training(module: nn.Module) -> Iterator[None]:
    """Puts a module that is in eval mode in training mode, and back afterwards."""
    with keeping_modes(module):
        if not module.training:
            module.train()
        yield
