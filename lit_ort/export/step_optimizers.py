"""Optimizers as functions of named tensors, in the order of operations of torch's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lit_ort.errors import ExportError

Tensors = dict[str, Tensor]
# State of the optimizer is named after its kind and its parameter.
OPTIMIZER = "optimizer"
STEP = f"{OPTIMIZER}.step"


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer.

    Args:
        eager: torch's class.
        settings: its settings, except for the learning rate.
        slots: the names of the tensors that it keeps for each parameter.
        counts: whether it counts steps.
        update: computes a parameter's new value and slots from its value, gradient, slots, the learning rate, the
            number of the step and the settings.
    """

    eager: type[torch.optim.Optimizer]
    settings: Mapping[str, Any]
    slots: tuple[str, ...]
    counts: bool
    update: Callable[..., tuple[Tensor, ...]]

    def state_of(self, parameters: Mapping[str, Tensor]) -> Tensors:
        """The state before the first step."""
        state = {
            f"{OPTIMIZER}.{slot}.{name}": torch.zeros_like(value, requires_grad=False)
            for slot in self.slots
            for name, value in parameters.items()
        }
        return {**state, **({STEP: torch.zeros(())} if self.counts else {})}

    def updated(self, values: Mapping[str, Tensor], gradients: Mapping[str, Tensor], rate: Tensor) -> Tensors:
        """The new parameters and the new state.

        Args:
            values: parameters and state, by name.
            gradients: the gradient of each parameter that has one.
            rate: the learning rate.
        """
        found: Tensors = {STEP: values[STEP] + 1} if self.counts else {}
        for name, gradient in gradients.items():
            keys = [f"{OPTIMIZER}.{slot}.{name}" for slot in self.slots]
            state = [values[key] for key in keys]
            results = self.update(values[name], gradient, *state, rate, found.get(STEP), **self.settings)
            found.update(zip((name, *keys), results, strict=True))
        return found


def _adam(
    value: Tensor,
    gradient: Tensor,
    average: Tensor,
    square: Tensor,
    rate: Tensor,
    step: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool = False,
) -> tuple[Tensor, ...]:
    if decoupled:
        value = value * (1 - rate * weight_decay)
    elif weight_decay:
        gradient = gradient + weight_decay * value
    first, second = betas
    average = average * first + gradient * (1 - first)
    square = square * second + gradient * gradient * (1 - second)
    scale = rate / (1 - first**step)
    root = square.sqrt() / (1 - second**step).sqrt() + eps
    return value - scale * (average / root), average, square


def _adamw(*args: Tensor, **settings: Any) -> tuple[Tensor, ...]:
    return _adam(*args, **settings, decoupled=True)


def _sgd(
    value: Tensor, gradient: Tensor, *rest: Tensor, momentum: float, weight_decay: float, nesterov: bool
) -> tuple[Tensor, ...]:
    *state, rate, _ = rest
    if weight_decay:
        gradient = gradient + weight_decay * value
    if not momentum:
        return (value - rate * gradient, *state)
    velocity = state[0] * momentum + gradient
    return value - rate * (gradient + momentum * velocity if nesterov else velocity), velocity


_ADAM = Optimizer(
    torch.optim.Adam,
    MappingProxyType({"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
    ("exp_avg", "exp_avg_sq"),
    True,
    _adam,
)
OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType(
    {
        "adamw": dataclasses.replace(
            _ADAM,
            eager=torch.optim.AdamW,
            settings=MappingProxyType({**_ADAM.settings, "weight_decay": 1e-2}),
            update=_adamw,
        ),
        "adam": _ADAM,
        "sgd": Optimizer(
            torch.optim.SGD,
            MappingProxyType({"momentum": 0.0, "weight_decay": 0.0, "nesterov": False}),
            ("momentum_buffer",),
            False,
            _sgd,
        ),
    }
)


def optimizer_of(name: str, settings: Mapping[str, Any]) -> Optimizer:
    """An optimizer with settings of its own.

    Raises:
        ExportError: there is no such optimizer or setting, or torch's refuses a value.
    """
    if name not in OPTIMIZERS:
        raise ExportError(f"optimizer={name!r} is unknown. Use one of {', '.join(OPTIMIZERS)}.")
    optimizer = OPTIMIZERS[name]
    for setting in settings:
        if setting not in optimizer.settings:
            raise ExportError(
                f"optimizer_settings has {setting!r}, which {name} doesn't have. Use {', '.join(optimizer.settings)}; "
                "the learning rate is an input of each step."
            )
    merged = {**optimizer.settings, **settings}
    try:
        optimizer.eager([torch.zeros(1)], **merged)
    except (ValueError, TypeError) as error:
        raise ExportError(f"optimizer_settings={dict(settings)}: {error}. Use values of torch's {name}.") from error
    slots = () if name == "sgd" and not merged["momentum"] else optimizer.slots
    return dataclasses.replace(optimizer, settings=MappingProxyType(merged), slots=slots)


def state_names(parameters: Iterable[str]) -> set[str]:
    """The names that the state of any optimizer can have."""
    slots = {slot for optimizer in OPTIMIZERS.values() for slot in optimizer.slots}
    return {STEP, *(f"{OPTIMIZER}.{slot}.{name}" for name in parameters for slot in slots)}


def clipped(gradients: Mapping[str, Tensor], norm: float) -> Tensors:
    """Gradients scaled so that their common norm is at most `norm`, as by `clip_grad_norm_`."""
    total = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    scale = (norm / (total + 1e-6)).clamp(max=1.0)
    return {name: gradient * scale for name, gradient in gradients.items()}
