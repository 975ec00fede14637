"""A module's loss as a function of named tensors and parameters, from which a training model is built."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from lit_ort._compat.lightning import is_from_lightning
from lit_ort.errors import ExportError
from lit_ort.export.call import (
    FORWARD,
    TRAINING_STEP,
    Call,
    Function,
    evaluating,
    function_of,
    names_of,
    result_of,
    tensors_of,
)

LOSS = "loss"


@dataclasses.dataclass(frozen=True)
class LossCall:
    """One call of a module's loss.

    Args:
        call: maps a batch's tensors, followed by the parameters, to the loss, followed by the results of an inference
            model.
        parameters: the names of the module's parameters; a shared parameter is listed once.
    """

    call: Call
    parameters: tuple[str, ...]

    @property
    def batch_names(self) -> tuple[str, ...]:
        return self.call.names[: -len(self.parameters)]

    @property
    def batch(self) -> tuple[Tensor, ...]:
        return self.call.tensors[: -len(self.parameters)]


def loss_call_of(module: nn.Module, batch: Any, result: str | None) -> LossCall:
    """The call of a module's loss with a batch: of `training_step` if it has one, otherwise of `forward`.

    Args:
        module: the module.
        batch: the batch.
        result: the submodule whose results an inference model returns. None selects the module itself if its step calls
            it, and otherwise the outputs of `forward` other than the loss.

    Raises:
        ExportError: there is no loss or no such submodule, the step rejects the batch, or the batch has no tensors.
    """
    step = _step_of(module)
    parts = dict(module.named_modules())
    if result is not None and result not in parts:
        raise ExportError(
            f"result={result!r} is not a submodule of {type(module).__name__}. Use a name from named_modules(), such "
            f"as {next(filter(None, parts), '')!r}."
        )
    function, names, tensors = function_of(module, batch, step)
    with _recording(module, result or "") as outputs, evaluating(module):
        value = result_of(function, tensors)
    _loss_in(value, function)
    if result is not None and not outputs:
        raise ExportError(f"result={result!r} is not called by {step}. Use a submodule that it calls.")
    loss = _WithParameters(function, tuple(dict(module.named_parameters())), (result or "") if outputs else None)
    parameters = dict(module.named_parameters())
    input_names = (*names, *parameters)
    result_names = names_of(outputs[-1] if outputs else _without_loss(value))
    output_names = tuple(f"{name}_out" if name in (*input_names, LOSS) else name for name in result_names)
    inputs = (*tensors, *(parameter.detach() for parameter in parameters.values()))
    return LossCall(Call(loss, input_names, inputs, (LOSS, *output_names)), tuple(parameters))


def make_initializers(model: onnx.ModelProto, loss: LossCall) -> None:
    """Converts a model's inputs for parameters to initializers, in place.

    They are inputs during the export, since the exporter would fold the values of initializers.
    """
    values = dict(zip(loss.call.names, loss.call.tensors, strict=True))
    inputs = [value for value in model.graph.input if value.name not in loss.parameters]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    initializers = [numpy_helper.from_array(values[name].numpy(), name) for name in loss.parameters]
    model.graph.initializer.extend(initializers)


class _WithParameters(nn.Module):
    """A step with the parameters as arguments, after the batch's tensors.

    Args:
        function: the step.
        parameters: the names of the parameters.
        recorded: the submodule whose outputs are results, or None for the outputs other than the loss.
    """

    def __init__(self, function: Function, parameters: Sequence[str], recorded: str | None) -> None:
        super().__init__()
        self._raw, self._recorded = _Raw(function), recorded
        self._parameter_names = tuple(f"function.module.{name}" for name in parameters)
        self.training = function.training

    @property
    def module(self) -> nn.Module:
        return self._raw.function.module

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(tensors) - len(self._parameter_names)
        replaced = dict(zip(self._parameter_names, tensors[count:], strict=True))
        with _recording(self.module, self._recorded) as outputs:
            value = torch.func.functional_call(self._raw, replaced, tensors[:count])
        results = outputs[-1] if outputs else _without_loss(value)
        return (_loss_in(value, self._raw.function), *tensors_of(results))


class _Raw(nn.Module):
    """A step that returns its original result, not only tensors."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.training = function.training

    def forward(self, *tensors: Tensor) -> Any:
        return self.function.result(tensors)


@contextlib.contextmanager
def _recording(module: nn.Module, submodule: str | None) -> Iterator[list[Any]]:
    """Collects the outputs of a submodule."""
    outputs: list[Any] = []
    if submodule is None:
        yield outputs
        return
    handle = module.get_submodule(submodule).register_forward_hook(
        lambda _module, _args, output: outputs.append(output)
    )
    try:
        yield outputs
    finally:
        handle.remove()


def _step_of(module: nn.Module) -> str:
    training_step = getattr(type(module), TRAINING_STEP, None)
    # Modules without a training step inherit one that does nothing.
    if training_step is None or is_from_lightning(training_step):
        return FORWARD
    if not getattr(module, "automatic_optimization", True):
        raise ExportError(
            f"{type(module).__name__} has automatic_optimization=False, so its training step has no single loss. "
            "Export a module that returns its loss."
        )
    return TRAINING_STEP


def _loss_in(value: Any, function: Function) -> Tensor:
    loss = value.get(LOSS) if isinstance(value, Mapping) else getattr(value, LOSS, value)
    loss = loss[0] if isinstance(loss, (tuple, list)) and loss else loss
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss.reshape(())
    description = f"{list(loss.shape)} of {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
    raise ExportError(
        f"{type(function.module).__name__}.{function.step} returns {description}, but a loss is a scalar. Return it "
        "alone, first, or under the name 'loss'."
    )


def _without_loss(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: part for name, part in value.items() if name != LOSS}
    return value[1:] if isinstance(value, (tuple, list)) else ()
