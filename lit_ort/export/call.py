"""A module's call as a function of named tensors, which is what an ONNX model is."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_ort._compat.torch_fx import tree_flatten, tree_leaves, tree_unflatten
from lit_ort.errors import ExportError
from lit_ort.export.caches import Layers, Pair, closed, is_cache, is_pair, opened

FORWARD, PREDICT_STEP = STEPS = ("forward", "predict_step")
TRAINING_STEP = "training_step"
# What a result is called that has no name of its own.
OUTPUT = "output"


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a module's step.

    Args:
        function: takes the tensors in order, and returns the tensors of the result.
        names, tensors: of its inputs.
        output_names: of its results.
    """

    function: nn.Module
    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    output_names: tuple[str, ...]


def call_of(
    module: nn.Module, batch: Any, step: str, input_names: Sequence[str] | None, output_names: Sequence[str] | None
) -> Call:
    """The call of a step with a batch. The module has to be in eval mode.

    Args:
        batch: of `forward` a dictionary of keyword arguments, a tuple of arguments, or the only one; of `predict_step`
            what a loader gives.
        step: `forward` or `predict_step`.
        input_names, output_names: instead of those of the signature and the result.

    Raises:
        ExportError: no such step, a batch without tensors or that the step refuses, or names that don't fit.
    """
    if step not in STEPS or not hasattr(module, step):
        raise ExportError(f"step={step!r} is none that {type(module).__name__} has. Use one of {' and '.join(STEPS)}.")
    function, names, tensors = filled(module, batch, step, input_names)
    result = result_of(function, tensors)
    own = tuple(f"{name}_out" if name in names else name for name in names_of(result))
    wanted = own if output_names is None else tuple(output_names)
    if not own:
        raise ExportError(f"{type(module).__name__}.{step} returns a {type(result).__name__} without tensors.")
    _require_count("output_names", wanted, len(own))
    return Call(function, names, tensors, wanted)


def filled(
    module: nn.Module, batch: Any, step: str, input_names: Sequence[str] | None = None
) -> tuple[Function, tuple[str, ...], tuple[Tensor, ...]]:
    """A step with everything of a batch filled in but its tensors, with their names and themselves.

    Raises:
        ExportError: a batch without tensors, or names that don't fit.
    """
    arguments, keywords = _arguments(batch, step)
    leaves, spec = tree_flatten((arguments, keywords))
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if not places:
        raise ExportError(f"The batch, a {type(batch).__name__}, has no tensor. Pass what the step is called with.")
    names = _input_names(module, step, arguments, keywords) if input_names is None else tuple(input_names)
    _require_count("input_names", names, len(places))
    return Function(module, step, leaves, spec, places), names, tuple(leaves[k].detach() for k in places)


def result_of(function: Function, tensors: Sequence[Tensor]) -> Any:
    """What a step returns.

    Raises:
        ExportError: it refuses the batch.
    """
    try:
        with torch.no_grad():
            return function.result(tensors)
    # Whatever it raises is what the module says of the batch.
    except Exception as error:
        raise ExportError(
            f"{type(function.module).__name__}.{function.step} refuses the batch: {type(error).__name__}: {error}. "
            "Pass a batch that it takes."
        ) from error


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Puts a module and all its parts in eval mode, and each back into its own afterwards."""
    with keeping_modes(module):
        module.eval()
        yield


@contextlib.contextmanager
def keeping_modes(module: nn.Module) -> Iterator[None]:
    """Puts a module and all its parts back into the mode that each is in."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


class Function(nn.Module):
    """A step with everything but tensors filled in."""

    def __init__(self, module: nn.Module, step: str, leaves: list[Any], spec: Any, places: list[int]) -> None:
        super().__init__()
        self.module, self.step = module, step
        self._leaves, self._spec, self._places = leaves, spec, places
        self.training = module.training

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """What the step returns."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        arguments, keywords = closed(tree_unflatten(leaves, self._spec))
        return getattr(self.module, self.step)(*arguments, **keywords)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors_of(self.result(tensors))


def tensors_of(value: Any) -> tuple[Tensor, ...]:
    """The tensors of a result, in the order of `names_of`."""
    return tuple(leaf for leaf in tree_leaves(_plain(value)) if isinstance(leaf, Tensor))


def _arguments(batch: Any, step: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    batch = opened(batch)
    if step != FORWARD:
        return (batch, 0), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def _input_names(
    module: nn.Module, step: str, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[str, ...]:
    """Names of the tensors: the parameters' or a batch's keys and, of several in one argument, their places in it."""
    parameters = list(inspect.signature(getattr(module, step)).parameters.values())
    named = [(_parameter_name(parameters, k), value) for k, value in enumerate(arguments)]
    if step != FORWARD and isinstance(arguments[0], Mapping):
        named[0] = ("", arguments[0])
    found = [name for part, value in [*named, *keywords.items()] for name in names_of(value, part)]
    return _unique(found)


def _parameter_name(parameters: Sequence[inspect.Parameter], k: int) -> str:
    variadic = [p for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL]
    plain = [p for p in parameters if p.kind in (inspect.Parameter.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if k < len(plain):
        return plain[k].name
    return f"{variadic[0].name}_{k - len(plain)}" if variadic else f"input_{k}"


def names_of(value: Any, name: str = "") -> list[str]:
    """A name for each tensor in a value."""
    value = _plain(value)
    if isinstance(value, Tensor):
        return [name or OUTPUT]
    if isinstance(value, Mapping):
        parts: list[tuple[str, Any]] = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, (tuple, list)):
        parts = [(f"{name or OUTPUT}_{k}", part) for k, part in enumerate(value)]
        return [found for own, part in parts for found in names_of(part, own)]
    else:
        return []
    prefix = f"{name}_" if name else ""
    return [found for own, part in parts for found in names_of(part, f"{prefix}{own}")]


def _plain(value: Any) -> Any:
    """A result of a class of its own, as transformers' are, as a dictionary; caches as their tensors."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if is_pair(value) or is_cache(value):
        value = opened(value)
    if isinstance(value, Pair):
        return {"self": _plain(value.own), "cross": _plain(value.cross)}
    if isinstance(value, Layers):
        return {f"{k}": {"key": key, "value": kept} for k, (key, kept) in enumerate(value.tensors)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [_plain(part) for part in value] if isinstance(value, (tuple, list)) else value


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    counts: dict[str, int] = {}
    found = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        found.append(name if counts[name] == 1 else f"{name}_{counts[name] - 1}")
    return tuple(found)


def _require_count(what: str, names: Sequence[str], count: int) -> None:
    if len(names) != count or len(set(names)) != count:
        raise ExportError(f"{what}={list(names)}, and the call has {count} tensors. Give each a name of its own.")
