"""The definition of a step of this folder, and its comparison with eager."""

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
    """A module with two linear layers, the parts of a case, and its step.

    Args:
        step: a function of the module and a batch.
        parts: further parameters and modules; plain tensors become buffers.
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


def backward_of_first(output: Any) -> None:
    """Runs the backward of a step whose loss is its only or first result."""
    loss = tree_leaves(output)[0]
    if loss.requires_grad:
        loss.backward()


@dataclasses.dataclass(frozen=True)
class Case:
    """A step as users write them.

    Args:
        module: the module; its forward is the step.
        batches: the arguments of consecutive calls.
        backward: runs the backward of the step's output.
        falls_back: a pattern of the reason why a graph runs in eager; None if all graphs must run in sessions.
        raises: a pattern of eager's error for the last batch; None if there is none.
    """

    module: nn.Module
    batches: Sequence[tuple[Any, ...]]
    backward: Callable[[Any], None] = backward_of_first
    falls_back: str | None = None
    raises: str | None = None


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    """Adds a case to those that `test_steps` compares with eager."""
    assert make.__name__ not in CASES
    CASES[make.__name__] = make
    return make


def values_of(step: Callable[..., Any], module: nn.Module, case: Case) -> list[Values]:
    """Everything that a caller can observe of each call: results, gradients, and the values of batch, parameters and
    buffers afterwards.
    """
    calls = []
    for batch in copy.deepcopy(case.batches):
        module.zero_grad()
        output = step(*batch)
        case.backward(output)
        results, inputs = tree_leaves(output), [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        values: Values = {f"result {k}": copy_of(value) for k, value in enumerate(results)}
        values["requires_grad of results"] = [isinstance(r, Tensor) and r.requires_grad for r in results]
        values["memory"] = memory([*results, *inputs, *module.parameters(), *module.buffers()])
        values.update({f"batch {k}": copy_of(value) for k, value in enumerate(inputs)})
        values.update({f"gradient of batch {k}": copy_of(v.grad) for k, v in enumerate(inputs) if v.is_leaf})
        values.update({f"gradient of {name}": copy_of(p.grad) for name, p in module.named_parameters()})
        values.update({name: copy_of(value) for name, value in module.state_dict().items()})
        calls.append(values)
    return calls


def copy_of(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().to_dense().clone() if value.layout != torch.strided else value.detach().clone()


def memory(values: Sequence[Any]) -> list[int | None]:
    """For each tensor, the index of the first tensor that shares its memory; None for other values."""
    first: dict[int, int] = {}
    return [
        first.setdefault(value.untyped_storage().data_ptr(), k)
        if isinstance(value, Tensor) and value.layout == torch.strided and value.numel()
        else None
        for k, value in enumerate(values)
    ]


def assert_alike(actual: Sequence[Values], expected: Sequence[Values]) -> None:
    """Raises AssertionError for the first value that differs by more than rounding."""
    for call, (values, references) in enumerate(zip(actual, expected, strict=True)):
        assert values.keys() == references.keys(), values.keys() ^ references.keys()
        for name, reference in references.items():
            label = f"{name} of call {call}"
            if not isinstance(reference, Tensor):
                assert values[name] == reference, f"{label}: {values[name]}, but {reference} in eager"
                continue
            assert isinstance(values[name], Tensor), f"{label}: {values[name]}, but a tensor in eager"
            rtol, atol = (1e-4, 1e-6) if reference.dtype in EXACT else (2e-2, 1e-2)
            torch.testing.assert_close(
                values[name],
                reference,
                rtol=rtol,
                atol=atol,
                equal_nan=True,
                msg=lambda text, label=label: f"{label}: {text}",
            )


EXACT = frozenset(
    {torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
)
