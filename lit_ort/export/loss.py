"""A module's loss as a function of named tensors and parameters, which is what a training model is built from."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from lit_ort.errors import ExportError
from lit_ort.export.call import (
    FORWARD,
    TRAINING_STEP,
    Call,
    Function,
    evaluating,
    filled,
    names_of,
    result_of,
    tensors_of,
)

LOSS = "loss"
# Of Lightning itself: modules without a training step inherit one that does nothing.
_LIGHTNING = ("lightning.", "pytorch_lightning.")


@dataclasses.dataclass(frozen=True)
class LossCall:
    """One call of a module's loss.

    Args:
        call: takes a batch's tensors and then the parameters, and returns the loss and then the results that an
            inference model gives.
        parameters: names of the parameters, as the module has them; a shared one is there once.
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
    """The call of a module's loss with a batch: of `training_step`, where it has one, or else of `forward`.

    Args:
        result: the part of the module whose results an inference model gives; None takes the module itself where its
            step calls it, and otherwise what `forward` returns beside the loss.

    Raises:
        ExportError: no loss, no such part, a batch that the step refuses, or one without tensors.
    """
    step = _step_of(module)
    parts = dict(module.named_modules())
    if result is not None and result not in parts:
        raise ExportError(
            f"result={result!r} is no part of {type(module).__name__}. Use one of its named_modules(), such as "
            f"{next(filter(None, parts), '')!r}."
        )
    function, names, tensors = filled(module, batch, step)
    with _watching(module, result or "") as seen, evaluating(module):
        value = result_of(function, tensors)
    _loss_in(value, function)
    if result is not None and not seen:
        raise ExportError(f"result={result!r} is not called by {step}. Name a part that is.")
    both = _WithParameters(function, tuple(dict(module.named_parameters())), (result or "") if seen else None)
    parameters = dict(module.named_parameters())
    inputs = (*names, *parameters)
    own = names_of(seen[-1] if seen else _besides_loss(value))
    outputs = tuple(f"{name}_out" if name in (*inputs, LOSS) else name for name in own)
    given = (*tensors, *(parameter.detach() for parameter in parameters.values()))
    return LossCall(Call(both, inputs, given, (LOSS, *outputs)), tuple(parameters))


def hold_parameters(model: onnx.ModelProto, loss: LossCall) -> None:
    """Makes a model's inputs that are parameters initializers of its own, in place.

    They are inputs while the model is written, since the exporter would compute with the values of initializers.
    """
    values = dict(zip(loss.call.names, loss.call.tensors, strict=True))
    kept = [value for value in model.graph.input if value.name not in loss.parameters]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    held = [numpy_helper.from_array(values[name].numpy(), name) for name in loss.parameters]
    model.graph.initializer.extend(held)


class _WithParameters(nn.Module):
    """A step that takes the parameters as arguments, behind the batch's tensors."""

    def __init__(self, function: Function, parameters: Sequence[str], watched: str | None) -> None:
        super().__init__()
        self._raw, self._watched = _Raw(function), watched
        self._parameter_names = tuple(f"function.module.{name}" for name in parameters)
        self.training = function.training

    @property
    def module(self) -> nn.Module:
        return self._raw.function.module

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(tensors) - len(self._parameter_names)
        replaced = dict(zip(self._parameter_names, tensors[count:], strict=True))
        with _watching(self.module, self._watched) as seen:
            value = torch.func.functional_call(self._raw, replaced, tensors[:count])
        besides = seen[-1] if seen else _besides_loss(value)
        return (_loss_in(value, self._raw.function), *tensors_of(besides))


class _Raw(nn.Module):
    """A step that returns what it returns, which need not be tensors."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.training = function.training

    def forward(self, *tensors: Tensor) -> Any:
        return self.function.result(tensors)


@contextlib.contextmanager
def _watching(module: nn.Module, part: str | None) -> Iterator[list[Any]]:
    """Collects what a part of a module returns."""
    seen: list[Any] = []
    if part is None:
        yield seen
        return
    handle = module.get_submodule(part).register_forward_hook(lambda _module, _given, result: seen.append(result))
    try:
        yield seen
    finally:
        handle.remove()


def _step_of(module: nn.Module) -> str:
    own = getattr(type(module), TRAINING_STEP, None)
    if own is None or own.__module__.startswith(_LIGHTNING):
        return FORWARD
    if not getattr(module, "automatic_optimization", True):
        raise ExportError(
            f"{type(module).__name__} has automatic_optimization=False, so its training step has no one loss. Export a "
            "module that returns it."
        )
    return TRAINING_STEP


def _loss_in(value: Any, function: Function) -> Tensor:
    loss = value.get(LOSS) if isinstance(value, Mapping) else getattr(value, LOSS, value)
    loss = loss[0] if isinstance(loss, (tuple, list)) and loss else loss
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss.reshape(())
    found = f"{list(loss.shape)} of {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
    raise ExportError(
        f"{type(function.module).__name__}.{function.step} returns {found}, and a loss is one number. Return it alone, "
        "first, or under the name 'loss'."
    )


def _besides_loss(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: part for name, part in value.items() if name != LOSS}
    return value[1:] if isinstance(value, (tuple, list)) else ()
