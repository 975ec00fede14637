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
from lit_ort.runtime.session import RunInputs, Session, SessionOptions
from lit_ort.runtime.updates import Updates, is_consumed

Tensors = Sequence[torch.Tensor]
Gradients = Sequence[torch.Tensor | None]
Call = Callable[[Tensors], "list[torch.Tensor]"]

_SECOND_BACKWARD = (
    "backward() was called a second time for one forward, but its gradients and saved tensors are already freed",
    "Pass retain_graph=True to the first backward(), or run the forward again.",
)


class OtherForms(Protocol):
    """Other forms of the same graph, for gradients that its sessions don't compute."""

    def split(self, tensors: Tensors) -> SplitRunner:
        """The split form of a fused graph, for gradients of results other than the loss."""
        ...

    def eager(self, tensors: Tensors) -> Sequence[Any] | None:
        """The graph's outputs, tracked by autograd; None if the graph is not allowed to run in eager."""
        ...


def bind_program(
    program: Program, options: SessionOptions, *, forms: OtherForms, updates: Updates | None = None
) -> Call:
    """Creates a program's sessions and wraps them for autograd.

    Args:
        program: the compiled graph.
        options: how its sessions run.
        forms: other forms of the graph.
        updates: the optimizer steps that consume gradients inside a fused run, or None.
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
        return session.run(RunInputs(tensors, _shapes(tensors), _seed(signature)))

    return call


def _fused_call(session: Session, signature: Signature, forms: OtherForms, updates: Updates | None) -> Call:
    """One run computes the results and every gradient, for a loss gradient of one; backward only returns them."""
    loss, results = signature.loss, signature.results
    assert loss is not None, "a fused program has a loss"
    others = [k for k, differentiable in enumerate(signature.differentiable) if differentiable and k != loss]
    changed, repeatable = {mutation.input for mutation in signature.mutations}, _is_repeatable(signature)
    count = sum(position is not None for position in signature.gradients)

    class FusedStep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ctx.seed, ctx.input_count = _seed(signature), len(tensors)
            if others:
                ctx.save_for_backward(*(t.clone() if k in changed else t for k, t in enumerate(tensors)))
            ctx.inputs = _Inputs.of(tensors) if repeatable else None
            outputs = session.run(RunInputs(tensors, _shapes(tensors), ctx.seed))
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
            # Autograd enables grad mode in backward if the gradients will be differentiated again.
            if torch.is_grad_enabled():
                return _differentiable_gradients(signature, forms, ctx.inputs, ctx.needs_input_grad, output_gradients)
            run_inputs, ctx.inputs = ctx.inputs, None
            if all(gradient is None for gradient in output_gradients):
                return (None,) * ctx.input_count
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
                ctx.gradients, ctx.inputs = gradients, run_inputs
                gradients = [gradient.clone() for gradient in gradients]
            gradients = _for_autograd(gradients, scale, updates)
            return _place(gradients, ctx.input_count, signature.gradients)

    def call(tensors: Tensors) -> list[torch.Tensor]:
        with nullcontext() if updates is None else updates.run(session, tensors, count):
            return list(FusedStep.apply(*tensors))

    return call


def _for_autograd(gradients: list[Any], scale: torch.Tensor, updates: Updates | None) -> list[Any]:
    """The gradients for a loss gradient of `scale`; None for those that the optimizer consumed during the run."""
    factor = scale.item()
    if updates is not None:
        updates.record(gradients, factor)
    if factor != 1.0:
        for gradient in gradients:
            gradient.mul_(scale)
    return gradients if updates is None else [None if is_consumed(gradient) else gradient for gradient in gradients]


class SplitRunner:
    """Forward and backward as two sessions, with saved tensors between them.

    Args:
        program: of kind `split`.
        options: how its sessions run.
        forms: other forms of the graph; None if this runner is itself one of them.
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
        """Runs the forward and returns the results, tracked by autograd."""
        return list(self._function.apply(*tensors))

    def repeat(
        self, tensors: Tensors, seed: int, tangents: Mapping[tuple[str, int], torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of a forward that another form has run; runs the forward again with the same seed.

        Args:
            tensors: the inputs of the graph.
            seed: the seed of the first run.
            tangents: the gradient of each result, by its key in the signature.
        """
        output_gradients = [tangents.get(key) for key in self._signature.keys]
        outputs = self._forward.run(RunInputs(tensors, _shapes(tensors), seed))
        results, saved = outputs[: self._signature.results], outputs[self._signature.results :]
        del outputs
        saved_inputs = {k: tensors[k] for k in self._signature.saved_inputs}
        inputs = RunInputs(saved_inputs, _shapes(tensors), seed, saved)
        return self._gradients(inputs, _types(results), output_gradients)

    def _gradients(
        self, inputs: RunInputs, types: Sequence[_Type], output_gradients: Gradients
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the inputs; zeros are used for a result without a gradient."""
        tangents = {k: types[k].zeros() if output_gradients[k] is None else output_gradients[k] for k in self._tangents}
        outputs = self._backward.run(dataclasses.replace(inputs, tangents=tangents))
        return _place(outputs, len(inputs.shapes), self._signature.gradients)

    def _as_function(self) -> type[torch.autograd.Function]:
        signature, runner = self._signature, self
        repeatable = _is_repeatable(signature)

        class SplitStep(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
                ctx.seed, ctx.inputs = _seed(signature), _Inputs.of(tensors) if repeatable else None
                outputs = runner._forward.run(RunInputs(tensors, _shapes(tensors), ctx.seed))
                results, ctx.saved = outputs[: signature.results], outputs[signature.results :]
                # Autograd detects in-place changes of these before the backward.
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
                    needed = ctx.needs_input_grad
                    return _differentiable_gradients(signature, runner._forms, ctx.inputs, needed, output_gradients)
                saved = ctx.saved
                if saved is None:
                    raise SessionError(_SECOND_BACKWARD[0], remedy=_SECOND_BACKWARD[1])
                if not keeps_graph():
                    ctx.saved = ctx.inputs = None
                saved_inputs = dict(zip(signature.saved_inputs, ctx.saved_tensors, strict=True))
                inputs = RunInputs(saved_inputs, ctx.shapes, ctx.seed, saved)
                return runner._gradients(inputs, ctx.types, output_gradients)

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
    return [
        output
        for output, differentiable in pairs
        if not differentiable and (output.is_floating_point() or output.is_complex())
    ]


class _Inputs(NamedTuple):
    """The inputs of a run and their autograd version counters at that time."""

    tensors: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Tensors) -> _Inputs:
        return cls(tuple(tensors), _versions(tensors))


def _is_repeatable(signature: Signature) -> bool:
    """Whether eager, run again on the same inputs, computes what the session computed."""
    return not signature.draws and not signature.mutations


def _versions(tensors: Tensors) -> tuple[int, ...]:
    return tuple([0 if tensor.is_inference() else version_of(tensor) for tensor in tensors])


def _differentiable_gradients(
    signature: Signature,
    forms: OtherForms | None,
    inputs: _Inputs | None,
    needed: Sequence[bool],
    output_gradients: Gradients,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients that can be differentiated again, computed by running the graph in eager.

    Raises:
        SessionError: eager can't repeat the session's run, or is not allowed to run the graph.
    """
    if _is_repeatable(signature) and inputs is None:
        raise SessionError(_SECOND_BACKWARD[0], remedy=_SECOND_BACKWARD[1])
    if inputs is None or inputs.versions != _versions(inputs.tensors):
        raise _double_backward("it draws random numbers or changes its inputs, so that eager can't repeat it")
    outputs = None if forms is None else forms.eager(inputs.tensors)
    if outputs is None:
        raise _double_backward("fallback='error' doesn't allow it to run in eager")
    pairs = [
        (outputs[index], gradient)
        for (kind, index), gradient in zip(signature.keys, output_gradients, strict=True)
        if gradient is not None and kind == "output"
    ]
    leaves = [tensor for tensor, is_needed in zip(inputs.tensors, needed, strict=True) if is_needed]
    roots, tangents = zip(*pairs, strict=True)
    gradients = iter(torch.autograd.grad(roots, leaves, tangents, create_graph=True, allow_unused=True))
    return tuple(next(gradients) if is_needed else None for is_needed in needed)


def _double_backward(reason: str) -> SessionError:
    return SessionError(
        f"backward() was called with create_graph=True on a graph in ONNX Runtime, and {reason}",
        remedy="Exclude this function from the graphs with torch.compiler.disable, or use strategy='auto'.",
    )


def _not_a_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is not a leaf, so that autograd allows the graph to write into it."""
    with torch.enable_grad():
        return tensor.clone()


def _place(gradients: list[Any], inputs: int, positions: Sequence[int | None]) -> tuple[torch.Tensor | None, ...]:
    """One entry for each input; `gradients` is emptied, since AccumulateGrad keeps a buffer without a copy only if
    there is no other reference to it.

    Two inputs can share one gradient; the second one receives a copy.
    """
    entries: list[torch.Tensor | None] = [None] * inputs
    used: set[int] = set()
    for k, position in enumerate(positions):
        if position is not None:
            entries[k] = gradients[position].clone() if position in used else gradients[position]
            used.add(position)
    gradients.clear()
    return tuple(entries)
