"""Outputs of a graph as views of what its session returns, and gradients of results as gradients of outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from lit_ort.errors import SessionError
from lit_ort.runtime.program import Output, Signature
from lit_ort.runtime.sizes import Shapes, value_of, values_of

Tensors = Sequence[torch.Tensor]


def output_value(output: Output, results: Tensors, tensors: Tensors, numbers: Sequence[Any]) -> Any:
    """One output of a graph.

    Args:
        output: how it is obtained.
        results: what the session returned.
        tensors, numbers: the inputs of the graph.
    """
    if output.source == "number":
        return numbers[output.index]
    if output.source == "constant":
        return output.value.clone() if isinstance(output.value, torch.Tensor) else output.value
    base = results[output.index] if output.source == "result" else tensors[output.index]
    if output.view is None and output.dtype in (None, base.dtype):
        return base.detach() if output.detached else base
    with nullcontext() if torch.is_grad_enabled() != output.untracked else torch.set_grad_enabled(not output.untracked):
        value = _viewed(base, output, [tensor.shape for tensor in tensors])
        value = value.detach() if output.detached else value
        return value if output.dtype in (None, value.dtype) else value.to(output.dtype)


def tracked_output(output: Output, results: Tensors, tensors: Tensors) -> torch.Tensor:
    """An output with the dtype of its result, as autograd sees it before the graph's code detaches or converts it."""
    base = results[output.index] if output.source == "result" else tensors[output.index]
    return _viewed(base, output, [tensor.shape for tensor in tensors])


def sharing(outputs: Sequence[Output], inner: Sequence[int]) -> tuple[int, ...]:
    """The positions of the outputs that are tracked views of one result, if one of these is inner."""
    groups: dict[int, list[int]] = {}
    for k, output in enumerate(outputs):
        if output.source == "result" and not output.detached and not output.untracked:
            groups.setdefault(output.index, []).append(k)
    return tuple(k for group in groups.values() if len(group) > 1 and not set(inner).isdisjoint(group) for k in group)


def output_gradients(
    signature: Signature,
    gradients: Mapping[int, torch.Tensor],
    shapes: Shapes,
    own: Mapping[int, torch.Tensor] | None = None,
) -> dict[int, torch.Tensor]:
    """Gradients of outputs that are equivalent to gradients of results.

    Several outputs can be views of one result. An element that more than one of them contains gets an equal part of its
    gradient in each, unless it is known which gradient arrived at each.

    Args:
        signature: of the graph whose results they are.
        gradients: the gradient of each result, by position.
        shapes: of the graph's tensor inputs.
        own: the gradients that arrived at outputs that share a result.

    Returns:
        the gradients by position among the outputs of the graph.

    Raises:
        SessionError: a result is not among the outputs.
    """
    placed: dict[int, torch.Tensor] = {}
    for result, gradient in gradients.items():
        tracked = [
            (k, output)
            for k, output in enumerate(signature.outputs)
            if (output.source, output.index, output.detached) == ("result", result, False)
        ]
        if not tracked:
            raise lost_gradient(signature, result)
        known = {k: own[k] for k, _ in tracked if own and k in own}
        if known:
            placed |= known
            continue
        if len(tracked) == 1 and tracked[0][1].view is None:
            placed[tracked[0][0]] = gradient
            continue
        with torch.enable_grad():
            base = torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device, requires_grad=True)
            views = [_viewed(base.view_as(base), output, shapes) for _, output in tracked]
        (count,) = torch.autograd.grad(views, base, [torch.ones_like(view) for view in views])
        share = (gradient / count.real.clamp(min=1)).contiguous()
        placed |= {k: _viewed(share, output, shapes) for k, output in tracked}
    return placed


def lost_gradient(signature: Signature, result: int) -> SessionError:
    """The error for a gradient that arrives for a result whose gradient the graph can't pass on."""
    kind, index = signature.keys[result]
    return SessionError(
        f"a gradient arrived for {kind} {index} of a graph that has no place for it. This is a defect of lit_ort",
        remedy="Please report it. torch.compiler.disable on the function keeps it in eager.",
    )


def _viewed(base: torch.Tensor, output: Output, shapes: Shapes) -> torch.Tensor:
    view = output.view
    if view is None:
        return base
    offset = base.storage_offset() + value_of(view.offset, shapes)
    return base.as_strided(values_of(view.size, shapes), values_of(view.stride, shapes), offset)
