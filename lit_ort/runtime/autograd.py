"""Sessions as autograd functions: what a compiled graph calls at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._C import _autograd  # pyright: ignore[reportAttributeAccessIssue] - not in the stubs

from lit_ort.errors import SessionError
from lit_ort.runtime.session import Session, SplitSession
from lit_ort.runtime.updates import Updates, is_taken

Tensors = Sequence[torch.Tensor]
Call = Callable[[Tensors], "list[torch.Tensor]"]

_SECOND_BACKWARD = (
    "backward() was called a second time on one forward, whose gradients were handed out and are gone",
    "Pass retain_graph=True to the first backward(), or run the forward again.",
)


def forward_call(session: Session) -> Call:
    """Results without gradients."""
    return session.run


def fused_call(
    session: Session,
    wanted: Sequence[int],
    positions: Sequence[int | None],
    differentiable: int,
    updates: Updates | None = None,
) -> Call:
    """One run gives the results and every gradient; backward only hands the gradients out.

    Args:
        session: its outputs are the results, then the gradients.
        wanted: positions of the inputs that want gradients.
        positions: for each of them the position among the session's gradients, or None.
        differentiable: position of the loss among the results.
        updates: the optimizer that may take gradients in the run.
    """
    count = sum(position is not None for position in positions)
    results = len(session.output_names) - count

    class FusedStep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outputs = session.run(tensors)
            ctx.gradients = outputs[results:]
            ctx.inputs = len(tensors)
            del outputs[results:]
            ctx.mark_non_differentiable(*(o for k, o in enumerate(outputs) if k != differentiable))
            return tuple(outputs)

        @staticmethod
        @torch.compiler.disable
        def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the base takes *args
            ctx: Any, *output_gradients: torch.Tensor
        ) -> tuple[torch.Tensor | None, ...]:
            _refuse_double_backward()
            gradients, ctx.gradients = ctx.gradients, None
            if gradients is None:
                raise SessionError(_SECOND_BACKWARD[0], remedy=_SECOND_BACKWARD[1])
            if _keeps_graph():
                ctx.gradients = gradients
                gradients = [gradient.clone() for gradient in gradients]
            scale = output_gradients[differentiable]
            if updates is not None:
                updates.hand_out(gradients, scale.item())
            if scale.item() != 1.0:
                for gradient in gradients:
                    gradient.mul_(scale)
            if updates is not None:
                gradients = [None if is_taken(gradient) else gradient for gradient in gradients]
            return _place(gradients, ctx.inputs, wanted, positions)

    def call(tensors: Tensors) -> list[torch.Tensor]:
        with nullcontext() if updates is None else updates.run(session, tensors, count):
            return list(FusedStep.apply(*tensors))

    return call


def split_call(
    session: SplitSession,
    wanted: Sequence[int],
    positions: Sequence[int | None],
    differentiable: Sequence[bool],
    yielded: Sequence[int],
) -> Call:
    """Forward runs to the yield, backward from there on, with a state of its own for every forward.

    Args:
        session: the two-phase session.
        wanted, positions: as in `fused_call`.
        differentiable: for each result whether autograd gives a gradient for it.
        yielded: the results for which the model takes a gradient; zeros where autograd has none.
    """

    class SplitStep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outputs, ctx.state = session.forward(tensors)
            ctx.inputs = len(tensors)
            ctx.shapes = [output.shape for output in outputs]
            ctx.mark_non_differentiable(*(o for o, wants in zip(outputs, differentiable, strict=True) if not wants))
            ctx.set_materialize_grads(False)
            return tuple(outputs)

        @staticmethod
        @torch.compiler.disable
        def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the base takes *args
            ctx: Any, *output_gradients: torch.Tensor | None
        ) -> tuple[torch.Tensor | None, ...]:
            _refuse_double_backward()
            state, ctx.state = ctx.state, None
            if state is None:
                raise SessionError(
                    "backward() was called a second time on one forward of a graph with several outputs",
                    remedy="Run the forward again; retain_graph=True works for graphs with one scalar loss only.",
                )
            given = [output_gradients[k] for k in yielded]
            filled = [torch.zeros(ctx.shapes[k]) if g is None else g for k, g in zip(yielded, given, strict=True)]
            return _place(session.backward(filled, state), ctx.inputs, wanted, positions)

    return lambda tensors: list(SplitStep.apply(*tensors))


def _refuse_double_backward() -> None:
    """Autograd leaves grad mode on in backward when the gradients shall be differentiated again."""
    if torch.is_grad_enabled():
        raise SessionError(
            "backward() was called with create_graph=True, and sessions give gradients that can't be differentiated",
            remedy="Run this module in eager: leave it out of torch.compile, or use strategy='auto'.",
        )


def _keeps_graph() -> bool:
    return _autograd._get_current_graph_task_keep_graph()


def _place(
    gradients: list[Any], inputs: int, wanted: Sequence[int], positions: Sequence[int | None]
) -> tuple[torch.Tensor | None, ...]:
    """One entry for each input. `gradients` is emptied: AccumulateGrad keeps a buffer only if nobody else holds it."""
    placed: list[torch.Tensor | None] = [None] * inputs
    for k, position in zip(wanted, positions, strict=True):
        if position is not None:
            placed[k] = gradients[position]
    gradients.clear()
    return tuple(placed)
