"""Sessions as autograd functions: what a compiled graph calls at every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from lit_ort._compat.torch import keeps_graph, version_of
from lit_ort.errors import SessionError
from lit_ort.runtime.program import FORWARD, FUSED, Program, Signature
from lit_ort.runtime.random import draw_seed
from lit_ort.runtime.session import Given, Session, SessionOptions
from lit_ort.runtime.updates import Updates, is_taken

Tensors = Sequence[torch.Tensor]
Gradients = Sequence[torch.Tensor | None]
Call = Callable[[Tensors], "list[torch.Tensor]"]

_SECOND_BACKWARD = (
    "backward() was called a second time on one forward, whose gradients were handed out and are gone",
    "Pass retain_graph=True to the first backward(), or run the forward again.",
)


class OtherForms(Protocol):
    """Other forms of the same graph, for gradients that its sessions don't give."""

    def split(self, tensors: Tensors) -> SplitRunner:
        """The two-session form of a fused graph, for a gradient that is not its loss's."""
        ...

    def eager(self, tensors: Tensors) -> Sequence[Any] | None:
        """The graph's outputs, tracked by autograd; None where it may not run in eager."""
        ...


def bind_program(
    program: Program, options: SessionOptions, *, forms: OtherForms, updates: Updates | None = None
) -> Call:
    """Makes a program's sessions and wraps them for autograd.

    Args:
        forms: other forms of the graph.
        updates: the optimizer that may take gradients in a fused run.
    """
    if program.kind == FORWARD:
        return _forward_call(Session(program.forward, options), program.signature)
    if program.kind == FUSED:
        return _fused_call(Session(program.forward, options), program.signature, forms, updates)
    return SplitRunner(program, options, forms).call


def _seed(signature: Signature) -> int:
    return draw_seed() if signature.draws else 0


def _shapes(tensors: Tensors) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors]


def _forward_call(session: Session, signature: Signature) -> Call:
    def call(tensors: Tensors) -> list[torch.Tensor]:
        return session.run(Given(tensors, _shapes(tensors), _seed(signature)))

    return call


def _fused_call(session: Session, signature: Signature, forms: OtherForms, updates: Updates | None) -> Call:
    """One run gives the results and every gradient, for a loss gradient of one; backward only hands them out."""
    loss, results = signature.loss, signature.results
    assert loss is not None, "a fused program has a loss"
    others = [k for k, wanted in enumerate(signature.differentiable) if wanted and k != loss]
    changed, repeatable = {mutation.input for mutation in signature.mutations}, _is_repeatable(signature)
    count = sum(position is not None for position in signature.gradients)

    class FusedStep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ctx.seed, ctx.inputs = _seed(signature), len(tensors)
            if others:
                ctx.save_for_backward(*(t.clone() if k in changed else t for k, t in enumerate(tensors)))
            ctx.given = _Inputs.of(tensors) if repeatable else None
            outputs = session.run(Given(tensors, _shapes(tensors), ctx.seed))
            ctx.gradients = outputs[results:]
            del outputs[results:]
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*_not_differentiable(outputs, signature))
            return tuple(outputs)

        @staticmethod
        @torch.compiler.disable
        def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the base takes *args
            ctx: Any, *output_gradients: torch.Tensor | None
        ) -> tuple[torch.Tensor | None, ...]:
            # Autograd leaves grad mode on in backward when the gradients shall be differentiated again.
            if torch.is_grad_enabled():
                return _differentiable_gradients(signature, forms, ctx.given, ctx.needs_input_grad, output_gradients)
            given, ctx.given = ctx.given, None
            if all(gradient is None for gradient in output_gradients):
                return (None,) * ctx.inputs
            scale = output_gradients[loss]
            if scale is None or any(output_gradients[k] is not None for k in others):
                ctx.gradients = None
                pairs = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
                inputs = [tensor.detach().requires_grad_(needed) for tensor, needed in pairs]
                inputs = [_not_a_leaf(tensor) if k in changed else tensor for k, tensor in enumerate(inputs)]
                tangents = dict(zip(signature.keys, output_gradients, strict=True))
                return forms.split(inputs).repeat(inputs, ctx.seed, tangents)
            gradients, ctx.gradients = ctx.gradients, None
            if gradients is None:
                raise SessionError(_SECOND_BACKWARD[0], remedy=_SECOND_BACKWARD[1])
            if keeps_graph():
                ctx.gradients, ctx.given = gradients, given
                gradients = [gradient.clone() for gradient in gradients]
            gradients = _handed_out(gradients, scale, updates)
            return _place(gradients, ctx.inputs, signature.gradients)

    def call(tensors: Tensors) -> list[torch.Tensor]:
        with nullcontext() if updates is None else updates.run(session, tensors, count):
            return list(FusedStep.apply(*tensors))

    return call


def _handed_out(gradients: list[Any], scale: torch.Tensor, updates: Updates | None) -> list[Any]:
    """Gradients for a loss gradient of `scale`, as autograd takes them."""
    factor = scale.item()
    if updates is not None:
        updates.hand_out(gradients, factor)
    if factor != 1.0:
        for gradient in gradients:
            gradient.mul_(scale)
    return gradients if updates is None else [None if is_taken(gradient) else gradient for gradient in gradients]


class SplitRunner:
    """Forward and backward as two sessions, with what the forward saved between them.

    Args:
        program: of kind `split`.
        options: how its sessions run.
        forms: other forms of the graph; None where this is one itself.
    """

    def __init__(self, program: Program, options: SessionOptions, forms: OtherForms | None = None) -> None:
        assert program.backward is not None, "a split program has a backward"
        self._signature = program.signature
        self._forms = forms
        self._forward = Session(program.forward, options)
        self._backward = Session(program.backward, options)
        self._tangents = [source.index for _, source in program.backward.inputs if source.kind == "tangent"]
        self._function = self._as_function()

    def call(self, tensors: Tensors) -> list[torch.Tensor]:
        """The results, tracked by autograd."""
        return list(self._function.apply(*tensors))

    def repeat(
        self, tensors: Tensors, seed: int, given: Mapping[tuple[str, int], torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of a forward that another form has run, by running it again with the same seed.

        Args:
            given: the gradient of each result, by what it is.
        """
        output_gradients = [given.get(key) for key in self._signature.keys]
        outputs = self._forward.run(Given(tensors, _shapes(tensors), seed))
        results, saved = outputs[: self._signature.results], outputs[self._signature.results :]
        del outputs
        needed = {k: tensors[k] for k in self._signature.saved_inputs}
        return self._gradients(Given(needed, _shapes(tensors), seed, saved), _types(results), output_gradients)

    def _gradients(
        self, given: Given, types: Sequence[_Type], output_gradients: Gradients
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the inputs; a result for which autograd has none counts as zero."""
        tangents = {k: types[k].zeros() if output_gradients[k] is None else output_gradients[k] for k in self._tangents}
        run = dataclasses.replace(given, tangents=tangents)
        return _place(self._backward.run(run), len(given.shapes), self._signature.gradients)

    def _as_function(self) -> type[torch.autograd.Function]:
        signature, runner = self._signature, self
        repeatable = _is_repeatable(signature)

        class SplitStep(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
                ctx.seed, ctx.given = _seed(signature), _Inputs.of(tensors) if repeatable else None
                outputs = runner._forward.run(Given(tensors, _shapes(tensors), ctx.seed))
                results, ctx.saved = outputs[: signature.results], outputs[signature.results :]
                # Autograd notices where one of these is changed in place before the backward.
                ctx.save_for_backward(*(tensors[k] for k in signature.saved_inputs))
                ctx.shapes, ctx.types = _shapes(tensors), _types(results)
                ctx.set_materialize_grads(False)
                ctx.mark_non_differentiable(*_not_differentiable(results, signature))
                return tuple(results)

            @staticmethod
            @torch.compiler.disable
            def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the base takes *args
                ctx: Any, *output_gradients: torch.Tensor | None
            ) -> tuple[torch.Tensor | None, ...]:
                if torch.is_grad_enabled():
                    needs = ctx.needs_input_grad
                    return _differentiable_gradients(signature, runner._forms, ctx.given, needs, output_gradients)
                saved = ctx.saved
                if saved is None:
                    raise SessionError(_SECOND_BACKWARD[0], remedy=_SECOND_BACKWARD[1])
                if not keeps_graph():
                    ctx.saved = ctx.given = None
                needed = dict(zip(signature.saved_inputs, ctx.saved_tensors, strict=True))
                return runner._gradients(Given(needed, ctx.shapes, ctx.seed, saved), ctx.types, output_gradients)

        return SplitStep


class _Type(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


def _types(tensors: Tensors) -> list[_Type]:
    return [_Type(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]


def _not_differentiable(outputs: Tensors, signature: Signature) -> list[torch.Tensor]:
    pairs = zip(outputs, signature.differentiable, strict=True)
    return [output for output, wanted in pairs if not wanted and (output.is_floating_point() or output.is_complex())]


class _Inputs(NamedTuple):
    """The inputs of a run, and how often each had been changed in place by then."""

    tensors: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Tensors) -> _Inputs:
        return cls(tuple(tensors), _versions(tensors))


def _is_repeatable(signature: Signature) -> bool:
    """Whether eager, run on the same inputs, does what a session did."""
    return not signature.draws and not signature.mutations


def _versions(tensors: Tensors) -> tuple[int, ...]:
    return tuple([0 if tensor.is_inference() else version_of(tensor) for tensor in tensors])


def _differentiable_gradients(
    signature: Signature,
    forms: OtherForms | None,
    given: _Inputs | None,
    needed: Sequence[bool],
    output_gradients: Gradients,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients that can be differentiated again, by running the graph in eager.

    Raises:
        SessionError: eager would not do the same as the session did, or may not run.
    """
    if _is_repeatable(signature) and given is None:
        raise SessionError(_SECOND_BACKWARD[0], remedy=_SECOND_BACKWARD[1])
    if given is None or given.versions != _versions(given.tensors):
        raise _double_backward("it draws random numbers or changes its inputs, so that eager can't repeat it")
    outputs = None if forms is None else forms.eager(given.tensors)
    if outputs is None:
        raise _double_backward("fallback='error' keeps it from eager")
    pairs = [
        (outputs[index], gradient)
        for (kind, index), gradient in zip(signature.keys, output_gradients, strict=True)
        if gradient is not None and kind == "output"
    ]
    wanted = [tensor for tensor, is_needed in zip(given.tensors, needed, strict=True) if is_needed]
    roots, tangents = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(roots, wanted, tangents, create_graph=True, allow_unused=True))
    return tuple(next(found) if is_needed else None for is_needed in needed)


def _double_backward(reason: str) -> SessionError:
    return SessionError(
        f"backward() was called with create_graph=True on a graph in ONNX Runtime, and {reason}",
        remedy="Leave this function out of the graphs with torch.compiler.disable, or use strategy='auto'.",
    )


def _not_a_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that autograd lets a trace write into, as it did with the tensor itself."""
    with torch.enable_grad():
        return tensor.clone()


def _place(gradients: list[Any], inputs: int, positions: Sequence[int | None]) -> tuple[torch.Tensor | None, ...]:
    """One entry for each input. `gradients` is emptied: AccumulateGrad keeps a buffer only if nobody else holds it.

    Two inputs may have one gradient, of which each gets its own copy.
    """
    placed: list[torch.Tensor | None] = [None] * inputs
    taken: set[int] = set()
    for k, position in enumerate(positions):
        if position is not None:
            placed[k] = gradients[position].clone() if position in taken else gradients[position]
            taken.add(position)
    gradients.clear()
    return tuple(placed)
