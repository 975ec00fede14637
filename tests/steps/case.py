"""What a step of this folder is, and how it is compared with eager."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Values = dict[str, Any]
CASES: dict[str, Callable[[], Case]] = {}


class Net(nn.Module):
    """Two linear layers, what a case adds, and its step.

    Args:
        step: called with the module and a batch.
        parts: parameters and modules; plain tensors become buffers.
    """

    def __init__(self, step: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.step = step

    def forward(self, *batch: Any) -> Any:
        return self.step(self, *batch)


def of_first(output: Any) -> None:
    """The backward of a step whose loss is its only result, or the first one."""
    loss = tree_leaves(output)[0]
    if loss.requires_grad:
        loss.backward()


@dataclasses.dataclass(frozen=True)
class Case:
    """A step that users write.

    Args:
        module: what is trained.
        batches: arguments of its calls, one after the other.
        backward: from the step's output to gradients.
        falls_back: a pattern of the reason for which a graph of it runs in eager; None where none may.
        raises: a pattern of what eager refuses the last batch with; None where it doesn't.
        zeros: parameters that get a gradient of zeros where eager gives none, as under every backend with AOTAutograd.
    """

    module: nn.Module
    batches: Sequence[tuple[Any, ...]]
    backward: Callable[[Any], None] = of_first
    falls_back: str | None = None
    raises: str | None = None
    zeros: frozenset[str] = frozenset()


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    """Adds a case to those that `test_steps` compares with eager."""
    assert make.__name__ not in CASES
    CASES[make.__name__] = make
    return make


def values_of(step: Callable[..., Any], module: nn.Module, case: Case) -> list[Values]:
    """All that a caller can see of each call: results, gradients, what the batch, parameters and buffers then hold."""
    seen = []
    for batch in copy.deepcopy(case.batches):
        module.zero_grad()
        output = step(*batch)
        case.backward(output)
        results, given = tree_leaves(output), [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        values: Values = {f"result {k}": copy_of(value) for k, value in enumerate(results)}
        values["results that need gradients"] = [isinstance(r, Tensor) and r.requires_grad for r in results]
        values["memory"] = memory([*results, *given, *module.parameters(), *module.buffers()])
        values.update({f"batch {k}": copy_of(value) for k, value in enumerate(given)})
        values.update({f"gradient of batch {k}": copy_of(value.grad) for k, value in enumerate(given) if value.is_leaf})
        values.update({f"gradient of {name}": copy_of(p.grad) for name, p in module.named_parameters()})
        values.update({name: copy_of(value) for name, value in module.state_dict().items()})
        seen.append(values)
    return seen


def copy_of(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().to_dense().clone() if value.layout != torch.strided else value.detach().clone()


def memory(values: Sequence[Any]) -> list[int | None]:
    """For each tensor, the first one that it shares its memory with."""
    first: dict[int, int] = {}
    return [
        first.setdefault(value.untyped_storage().data_ptr(), k)
        if isinstance(value, Tensor) and value.layout == torch.strided and value.numel()
        else None
        for k, value in enumerate(values)
    ]


def with_zeros(expected: Sequence[Values], names: frozenset[str]) -> list[Values]:
    """Values with zeros for the gradients of some parameters."""
    filled = [{f"gradient of {name}": torch.zeros_like(values[name]) for name in names} for values in expected]
    return [{**values, **zeros} for values, zeros in zip(expected, filled, strict=True)]


def assert_alike(found: Sequence[Values], expected: Sequence[Values]) -> None:
    """Raises AssertionError for the first value that differs beyond rounding."""
    for call, (actual, reference) in enumerate(zip(found, expected, strict=True)):
        assert actual.keys() == reference.keys(), actual.keys() ^ reference.keys()
        for name, value in reference.items():
            what = f"{name} of call {call}"
            if not isinstance(value, Tensor):
                assert actual[name] == value, f"{what}: {actual[name]}, and eager {value}"
                continue
            assert isinstance(actual[name], Tensor), f"{what}: {actual[name]}, and eager a tensor"
            rtol, atol = (1e-4, 1e-6) if value.dtype in EXACT else (2e-2, 1e-2)
            torch.testing.assert_close(
                actual[name], value, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text, what=what: f"{what}: {text}"
            )


EXACT = frozenset(
    {torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
)
