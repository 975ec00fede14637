"""A module's training step as functions of named tensors, without state outside of their arguments and results."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_ort._compat.lightning import is_from_lightning
from lit_ort._compat.metric_calls import value_to_log
from lit_ort._compat.torch import seen_inside
from lit_ort.errors import ExportError
from lit_ort.export.call import FORWARD, TRAINING_STEP, function_of, names_of, tensors_of
from lit_ort.export.differentiable_forms import FORMS, DifferentiableForms
from lit_ort.export.seeded_random import SeededRandom
from lit_ort.export.side_effects import undone
from lit_ort.export.step_optimizers import Optimizer, Tensors, clipped, state_names
from lit_ort.export.trainer import without_trainer

LOSS, RATE, SEED = "loss", "learning_rate", "seed"
# The name of a new value is that of the old one with this suffix.
NEXT = ".next"
_FLOATS = (torch.float16, torch.float32, torch.float64)


@dataclasses.dataclass(frozen=True)
class Results:
    """What a step returns.

    Args:
        loss: the loss, a scalar.
        logged: the values that it logs, by name.
        predictions: the results of the module, or of the last part of it that the step calls, by name.
    """

    loss: Tensor
    logged: Tensors
    predictions: Tensors


class Step(nn.Module):
    """A copy of a module, whose training step maps the tensors of a batch to its results.

    Args:
        module: a module with a `training_step`, or whose `forward` returns a loss (alone, first, or as `loss`).
        batch: a batch with which the step is called.
        dropout: whether dropout is computed.

    Raises:
        ExportError: the module can't be copied, the step rejects the batch, there is no loss, or tensors have a type
            without kernels.
    """

    def __init__(self, module: nn.Module, batch: Any, dropout: bool) -> None:
        super().__init__()
        name = _step_of(module)
        with without_trainer(module):
            self.module = _copied(module)
        if not module.training:
            self.module.train()
        self._dropout = dropout
        self._modes = [part.training for part in self.module.modules()]
        function, names, tensors = function_of(self.module, batch, name)
        # A function, which copies of this step share.
        self._result: Callable[..., Any] = lambda module, tensors: function.of(module).result(tensors)
        self._name = name
        parameters, buffers = self.parameters_and_buffers()
        taken = {*parameters, *buffers, *state_names(parameters), LOSS, RATE, SEED}
        self.names = tuple(f"batch_{n}" if n in taken else n for n in names)
        self.batch = tuple(tensor.contiguous() for tensor in tensors)
        self._taken = taken.union(self.names)
        _require_kernels({**parameters, **buffers, **dict(zip(self.names, self.batch, strict=True))})
        self.logged, self.logged_in_eval = (tuple(self._tried(training).logged) for training in (True, False))

    def set_mode(self, training: bool) -> None:
        """Sets the module to eval mode, or to the modes that its parts have in training."""
        self.module.eval()
        for part, mode in zip(self.module.modules(), self._modes if training else (), strict=training):
            part.training = mode

    def renamed(self, outputs: Mapping[str, Tensor], others: Collection[str] = ()) -> Tensors:
        """Outputs under names that no input, no state and none of the `others` has."""
        found: Tensors = {}
        for name, value in outputs.items():
            while name in self._taken or name in others or name in found or name.endswith(NEXT):
                name = f"{name}_out"
            found[name] = value
        return found

    def _tried(self, training: bool) -> Results:
        """The results of a call with the batch, which leaves no traces."""
        twin = copy.deepcopy(self)
        twin.set_mode(training)
        try:
            with torch.random.fork_rng(devices=[]):
                return twin(*self.batch)
        except ExportError:
            raise
        # User code can raise any exception.
        except Exception as error:
            raise ExportError(
                f"{type(self.module).__name__}.{self._name} rejects the batch: {type(error).__name__}: "
                f"{error}. Pass a batch that it accepts."
            ) from error

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of parameters and buffers."""
        return tuple(name for part in self.parameters_and_buffers() for name in part)

    def parameters_and_buffers(self) -> tuple[Tensors, Tensors]:
        parts = self.module.named_parameters(), self.module.named_buffers()
        parameters, buffers = ({name: value.detach() for name, value in part} for part in parts)
        return parameters, buffers

    def forward(self, *tensors: Tensor) -> Results:
        # The forms of attention for a CPU draw dropout in other places, or have no decomposition.
        with (
            _logging(self.module) as logged,
            _main_call(self.module) as calls,
            seen_inside(FORMS),
            DifferentiableForms(self._dropout),
            sdpa_kernel(SDPBackend.MATH),
        ):
            value = self._result(self.module, tensors)
        loss = _loss_in(value, f"{type(self.module).__name__}.{self._name}")
        own = _without_loss(value)
        returned = own if not calls or (self._name == FORWARD and tensors_of(own)) else calls[0]
        predictions = dict(zip(names_of(returned), tensors_of(returned), strict=True))
        return Results(loss, self.renamed({n: v for n, v in logged.items() if n != LOSS}), predictions)


class StepFunction(nn.Module):
    """A function of tensors by name.

    Args:
        step: the step that it computes.
        inputs: examples of all inputs.
        outputs_of: maps a dictionary of inputs to one of outputs.
    """

    def __init__(self, step: Step, inputs: Tensors, outputs_of: Callable[[Mapping[str, Tensor]], Tensors]) -> None:
        super().__init__()
        self.module, self.inputs = step.module, inputs
        self._outputs_of = outputs_of
        self.output_names: tuple[str, ...] = ()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = self._outputs_of(dict(zip(self.inputs, tensors, strict=True)))
        self.output_names = tuple(outputs)
        # Copies, since a value has one name in ONNX, and the same one can be logged twice.
        return tuple(value.clone() for value in outputs.values())


def training_function(
    step: Step, trainable: Sequence[str], optimizer: Optimizer, clip_norm: float | None
) -> StepFunction:
    """Maps state, learning rate, seed and batch to loss, logged values and new state."""
    parameters, buffers = step.parameters_and_buffers()
    own = {name: parameters[name] for name in trainable}
    extra = {RATE: torch.tensor(1e-3), SEED: torch.tensor(0)}
    state = {**parameters, **buffers, **optimizer.state_of(own)}

    def outputs_of(values: Mapping[str, Tensor]) -> Tensors:
        copies = {name: values[name].detach().clone() for name in (*parameters, *buffers)}
        leaves = {name: copies[name].requires_grad_() for name in trainable}
        step.set_mode(training=True)
        with SeededRandom(values[SEED]):
            results, changed = _called(step, {**copies, **leaves}, values)
            if not results.loss.requires_grad:
                raise ExportError(
                    f"The loss of {type(step.module).__name__} depends on none of the parameters that are trained. "
                    "Return a loss that does, or select others with trainable=."
                )
            found = torch.autograd.grad(results.loss, list(leaves.values()), allow_unused=True)
        gradients = {name: value for name, value in zip(leaves, found, strict=True) if value is not None}
        with torch.no_grad():
            gradients = gradients if clip_norm is None else clipped(gradients, clip_norm)
            # The step itself can write into parameters, as into those of a teacher.
            own = {name: value.detach() for name, value in changed.items() if not value.is_complex()}
            new = {**own, **optimizer.updated({**values, **own}, gradients, values[RATE])}
        return {**_reported(results), **{f"{name}{NEXT}": value for name, value in new.items()}}

    return StepFunction(step, {**state, **extra, **dict(zip(step.names, step.batch, strict=True))}, outputs_of)


def evaluation_function(step: Step) -> StepFunction:
    """Maps parameters, buffers and batch to loss, logged values and predictions, in eval mode."""
    parameters, buffers = step.parameters_and_buffers()

    def outputs_of(values: Mapping[str, Tensor]) -> Tensors:
        step.set_mode(training=False)
        with torch.no_grad(), SeededRandom(torch.tensor(0)):
            results, _ = _called(step, {name: values[name].clone() for name in (*parameters, *buffers)}, values)
        return {**_reported(results), **prediction_names(step, results.predictions)}

    return StepFunction(step, {**parameters, **buffers, **dict(zip(step.names, step.batch, strict=True))}, outputs_of)


def prediction_names(step: Step, predictions: Tensors) -> Tensors:
    """Predictions under names that no input and no logged value has."""
    return step.renamed(predictions, step.logged_in_eval)


def _called(step: Step, state: Tensors, values: Mapping[str, Tensor]) -> tuple[Results, Tensors]:
    """The results of a call with other parameters and buffers, and what these are afterwards."""
    replaced = {f"module.{name}": value for name, value in state.items()}
    with undone(step.module):
        # Updates the dictionary with what the call assigns.
        results = torch.func.functional_call(step, replaced, tuple(values[name] for name in step.names))
    return results, {name.removeprefix("module."): value for name, value in replaced.items()}


def _reported(results: Results) -> Tensors:
    return {LOSS: results.loss.detach(), **results.logged}


@contextlib.contextmanager
def _logging(module: nn.Module) -> Iterator[Tensors]:
    """Collects the scalars that a LightningModule logs, instead of handing them to a trainer."""
    logged: Tensors = {}

    def log(name: str, value: Any, *_: Any, **__: Any) -> None:
        value = value_to_log(value)
        if isinstance(value, Tensor) and value.numel() == 1:
            logged[name] = value.detach().reshape(())

    if not hasattr(module, "log_dict"):
        yield logged
        return
    vars(module)["log"] = log
    try:
        yield logged
    finally:
        del vars(module)["log"]


@contextlib.contextmanager
def _main_call(module: nn.Module) -> Iterator[list[Any]]:
    """Holds the last result of the module or, if its step doesn't call it, of a part with parameters that it calls."""
    results: list[Any] = []
    is_of_module = False
    depth = 0

    def enter(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(part: nn.Module, _args: Any, result: Any) -> None:
        nonlocal depth, is_of_module
        depth -= 1
        if not depth and (part is module or not is_of_module):
            results[:] = [result]
            is_of_module = part is module

    parts = [part for part in module.modules() if any(True for _ in part.parameters())]
    handles = [handle for p in parts for handle in (p.register_forward_pre_hook(enter), p.register_forward_hook(leave))]
    try:
        yield results
    finally:
        for handle in handles:
            handle.remove()


def _require_kernels(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dtype not in _FLOATS:
            raise ExportError(
                f"{name} is of {tensor.dtype}, for which onnxruntime has no kernels on a CPU. Convert the module and "
                "its batch with .float()."
            )


def _copied(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    # Attributes of a user's class can raise any exception.
    except Exception as error:
        raise ExportError(
            f"{type(module).__name__} can't be copied: {type(error).__name__}: {error}. Remove the attribute that "
            "can't be copied, such as the result of an earlier step."
        ) from error


def _without_loss(value: Any) -> Any:
    """A step's results other than the loss."""
    if isinstance(value, Mapping):
        return {name: part for name, part in value.items() if name != LOSS}
    return value[1:] if isinstance(value, (tuple, list)) else ()


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


def _loss_in(value: Any, step: str) -> Tensor:
    loss = value.get(LOSS) if isinstance(value, Mapping) else getattr(value, LOSS, value)
    loss = loss[0] if isinstance(loss, (tuple, list)) and loss else loss
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss.reshape(())
    description = f"{list(loss.shape)} of {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
    raise ExportError(
        f"{step} returns {description}, but a loss is a scalar. Return it alone, first, or under the name 'loss'."
    )
