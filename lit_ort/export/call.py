"""A module's call as a function of named tensors, like an ONNX model."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_ort._compat.lightning import step_arguments
from lit_ort._compat.torch_fx import tree_flatten, tree_leaves, tree_unflatten
from lit_ort.errors import ExportError
from lit_ort.export.caches import Layers, Pair, is_cache, is_pair, pack_caches, unpack_caches

FORWARD, PREDICT_STEP = STEPS = ("forward", "predict_step")
TRAINING_STEP = "training_step"
# The name of a result without a name.
OUTPUT = "output"


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a module's step.

    Args:
        function: maps the input tensors, in order, to the tensors of the result.
        names, tensors: the inputs.
        output_names: the names of the results.
    """

    function: nn.Module
    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    output_names: tuple[str, ...]


def call_of(
    module: nn.Module, batch: Any, step: str, input_names: Sequence[str] | None, output_names: Sequence[str] | None
) -> Call:
    """The call of a step with a batch. The module must be in eval mode.

    Args:
        module: the module.
        batch: for `forward` a dictionary of keyword arguments, a tuple of arguments, or the only argument; for
            `predict_step` a batch of the dataloader.
        step: `forward` or `predict_step`.
        input_names, output_names: names that replace those of the signature and of the result.

    Raises:
        ExportError: the module has no such step, the batch has no tensors or the step rejects it, or the number of
            names is wrong.
    """
    if step not in STEPS or not hasattr(module, step):
        raise ExportError(f"{type(module).__name__} has no step={step!r}. Use {' or '.join(STEPS)}.")
    function, names, tensors = function_of(module, batch, step, input_names)
    result = result_of(function, tensors)
    default_names = tuple(f"{name}_out" if name in names else name for name in names_of(result))
    result_names = default_names if output_names is None else tuple(output_names)
    if not default_names:
        raise ExportError(
            f"{type(module).__name__}.{step} returns a {type(result).__name__} without tensors. Return a tensor, or a "
            "tuple or dictionary of tensors."
        )
    _require_count("output_names", result_names, len(default_names))
    return Call(function, names, tensors, result_names)


def function_of(
    module: nn.Module, batch: Any, step: str, input_names: Sequence[str] | None = None
) -> tuple[Function, tuple[str, ...], tuple[Tensor, ...]]:
    """A step as a function of the batch's tensors, the names of the tensors, and the tensors.

    Raises:
        ExportError: the batch has no tensors, or the number of names is wrong.
    """
    arguments, keywords = _arguments(module, batch, step)
    leaves, spec = tree_flatten((arguments, keywords))
    positions = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if not positions:
        raise ExportError(
            f"The batch, a {type(batch).__name__}, has no tensor. Pass a batch with which the step is called."
        )
    names = _input_names(module, step, arguments, keywords) if input_names is None else tuple(input_names)
    _require_count("input_names", names, len(positions))
    return Function(module, step, leaves, spec, positions), names, tuple(leaves[k].detach() for k in positions)


def result_of(function: Function, tensors: Sequence[Tensor]) -> Any:
    """Runs a step and returns its result.

    Raises:
        ExportError: the step rejects the batch.
    """
    try:
        with torch.no_grad():
            return function.result(tensors)
    # User code can raise any exception.
    except Exception as error:
        raise ExportError(
            f"{type(function.module).__name__}.{function.step} rejects the batch: {type(error).__name__}: {error}. "
            "Pass a batch that it accepts."
        ) from error


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Sets a module and all its submodules to eval mode, and restores their modes afterwards."""
    with keeping_modes(module):
        module.eval()
        yield


@contextlib.contextmanager
def keeping_modes(module: nn.Module) -> Iterator[None]:
    """Restores the modes of a module and all its submodules afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


class Function(nn.Module):
    """A step as a function of a batch's tensors; all other values of the batch are constants."""

    def __init__(self, module: nn.Module, step: str, leaves: list[Any], spec: Any, positions: list[int]) -> None:
        super().__init__()
        self.module, self.step = module, step
        self._leaves, self._spec, self._positions = leaves, spec, positions
        self.training = module.training

    def of(self, module: nn.Module) -> Function:
        """The same step of another module of the same class."""
        return Function(module, self.step, self._leaves, self._spec, self._positions)

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """Runs the step and returns its result."""
        leaves = list(self._leaves)
        for position, tensor in zip(self._positions, tensors, strict=True):
            leaves[position] = tensor
        arguments, keywords = pack_caches(tree_unflatten(leaves, self._spec))
        return getattr(self.module, self.step)(*arguments, **keywords)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors_of(self.result(tensors))


def tensors_of(value: Any) -> tuple[Tensor, ...]:
    """The tensors of a result, in the order of `names_of`."""
    return tuple(leaf for leaf in tree_leaves(_plain(value)) if isinstance(leaf, Tensor))


def _arguments(module: nn.Module, batch: Any, step: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    batch = unpack_caches(batch)
    if step != FORWARD:
        return step_arguments(getattr(module, step), batch), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def _input_names(
    module: nn.Module, step: str, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[str, ...]:
    """The names of the tensors: the step's parameters or the batch's keys, with an index for nested tensors."""
    parameters = list(inspect.signature(getattr(module, step)).parameters.values())
    named = [(_parameter_name(parameters, k), value) for k, value in enumerate(arguments)]
    if step != FORWARD and isinstance(arguments[0], Mapping):
        named[0] = ("", arguments[0])
    names = [name for part, value in [*named, *keywords.items()] for name in names_of(value, part)]
    return _unique(names)


def _parameter_name(parameters: Sequence[inspect.Parameter], k: int) -> str:
    variadic = [p for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL]
    plain = [p for p in parameters if p.kind in (inspect.Parameter.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if k < len(plain):
        return plain[k].name
    return f"{variadic[0].name}_{k - len(plain)}" if variadic else f"input_{k}"


def names_of(value: Any, name: str = "") -> list[str]:
    """The names of the tensors in a value."""
    value = _plain(value)
    if isinstance(value, Tensor):
        return [name or OUTPUT]
    if isinstance(value, Mapping):
        parts: list[tuple[str, Any]] = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, (tuple, list)):
        parts = [(f"{name or OUTPUT}_{k}", part) for k, part in enumerate(value)]
        return [nested for part_name, part in parts for nested in names_of(part, part_name)]
    else:
        return []
    prefix = f"{name}_" if name else ""
    return [nested for part_name, part in parts for nested in names_of(part, f"{prefix}{part_name}")]


def _plain(value: Any) -> Any:
    """A value as dictionaries and lists: dataclasses, such as transformers' outputs, and caches become dictionaries."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if is_pair(value) or is_cache(value):
        value = unpack_caches(value)
    if isinstance(value, Pair):
        return {"self": _plain(value.own), "cross": _plain(value.cross)}
    if isinstance(value, Layers):
        return {f"{k}": {"key": keys, "value": values} for k, (keys, values) in enumerate(value.tensors)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [_plain(part) for part in value] if isinstance(value, (tuple, list)) else value


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    counts: dict[str, int] = {}
    unique = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        unique.append(name if counts[name] == 1 else f"{name}_{counts[name] - 1}")
    return tuple(unique)


def _require_count(argument: str, names: Sequence[str], count: int) -> None:
    if len(names) != count or len(set(names)) != count:
        raise ExportError(f"{argument}={list(names)}, but the call has {count} tensors. Pass a unique name for each.")
