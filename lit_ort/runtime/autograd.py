"""Sessions as autograd functions: what a compiled graph calls at every step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from lit_ort._compat.tensor_hooks import take_node_hooks
from lit_ort._compat.torch import apply_of, batch_of, is_view, keeps_graph, untraced, versions_of
from lit_ort.errors import SessionError
from lit_ort.runtime.gradient_watches import Watches, watches_of
from lit_ort.runtime.parameter_updates import Updates, is_consumed
from lit_ort.runtime.program import FORWARD, FUSED, Program, Signature
from lit_ort.runtime.random import RandomNumbers
from lit_ort.runtime.session import RunInputs, Session, SessionOptions
from lit_ort.runtime.views import lost_gradient

Tensors = Sequence[torch.Tensor]
Gradients = Sequence[torch.Tensor | None]
Entries = tuple[torch.Tensor | None, ...]

# A copy of a result of up to this size takes as long as any small operator.
_SMALL_BYTES = 2**16
NOT_REPEATABLE = "it has dropout or changes its inputs, so that eager can't repeat it"
_SECOND_BACKWARD = (
    "backward() was called a second time for one forward, but its gradients and saved tensors are already freed",
    "Pass retain_graph=True to the first backward(), or run the forward again.",
)


class Call(Protocol):
    """Runs a graph's sessions and returns the results; draws new random numbers unless they are given."""

    def __call__(self, tensors: Tensors, random: RandomNumbers | None = None) -> list[torch.Tensor]: ...


class Run(NamedTuple):
    """What a forward read, so that another form can run it again.

    Args:
        tensors: its inputs; copies of those that the graph changes in place.
        versions: the version counters of these tensors at that time.
        random: its random numbers.
    """

    tensors: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]
    random: RandomNumbers

    @classmethod
    def of(cls, tensors: Tensors, random: RandomNumbers, changed: Container[int]) -> Run:
        kept = tuple([tensor.clone() if k in changed else tensor for k, tensor in enumerate(tensors)])
        return cls(kept, versions_of(kept), random)

    def changed(self, positions: Iterable[int]) -> list[int]:
        """The inputs among these that were changed in place since."""
        now = versions_of(self.tensors)
        return [k for k in positions if now[k] != self.versions[k]]

    def require_unchanged(self, positions: Iterable[int]) -> None:
        """Checks that inputs still have the values that the forward read.

        Raises:
            RuntimeError: as in eager, for an input that was changed in place.
        """
        for k in self.changed(positions):
            tensor = self.tensors[k]
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: input "
                f"{k}, a {tensor.type()} of shape {list(tensor.shape)}. Change it after backward(), or clone it before."
            )


class OtherForms(Protocol):
    """Other forms of the same graph, for gradients that its sessions don't compute."""

    def gradients(
        self, signature: Signature, run: Run, arrived: Mapping[int, torch.Tensor], needed: Sequence[bool], again: bool
    ) -> Entries:
        """The gradients of the inputs, from a form that takes the gradients of these results."""
        ...

    def gradients_in_eager(
        self,
        signature: Signature,
        run: Run,
        arrived: Mapping[int, torch.Tensor],
        needed: Sequence[bool],
        watches: Watches,
    ) -> Entries:
        """The gradients of the inputs, from the graph in eager; tracked by autograd in grad mode."""
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


def _shapes(tensors: Tensors) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors]


def _for_callers(results: Tensors, written: Container[int]) -> list[torch.Tensor]:
    """The results, with small ones in memory of torch, which `resize_` and operators with `out=` can resize.

    Large ones keep the memory that sessions reuse, and so do those whose values are `written` to inputs. None is a
    view: autograd refuses in-place changes of views that were made in an autograd function or without gradients.
    """
    return [
        result.clone()
        if result.nbytes <= _SMALL_BYTES and k not in written and not result.untyped_storage().resizable()
        else result.data
        if is_view(result)
        else result
        for k, result in enumerate(results)
    ]


def _written(signature: Signature) -> frozenset[int]:
    """The results whose values are written to inputs."""
    return frozenset(mutation.result for mutation in signature.mutations)


def _forward_call(session: Session, signature: Signature) -> Call:
    written = _written(signature)

    def call(tensors: Tensors, random: RandomNumbers | None = None) -> list[torch.Tensor]:
        random = RandomNumbers(signature.seeded) if random is None else random
        return _for_callers(session.run(RunInputs(tensors, _shapes(tensors), random)), written)

    return call


def _fused_call(session: Session, signature: Signature, forms: OtherForms, updates: Updates | None) -> Call:
    """One run computes the results and every gradient, for a loss gradient of one; backward only returns them."""
    loss, results = signature.loss, signature.results
    assert loss is not None, "a fused program has a loss"
    changed, written = {mutation.input for mutation in signature.mutations}, _written(signature)
    several = _has_several_parts(signature)
    keeps_run = several or _is_repeatable(signature)
    count = sum(position is not None for position in signature.gradients)
    in_eager = functools.partial(_gradients_in_eager, signature, forms)

    class FusedStep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, random: RandomNumbers, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ctx.input_count, ctx.differentiated = len(tensors), frozenset()
            ctx.in_eager, ctx.results = in_eager, results
            ctx.run = Run.of(tensors, random, changed) if keeps_run else None
            outputs = session.run(RunInputs(tensors, _shapes(tensors), random))
            ctx.gradients = outputs[results:]
            outputs = _for_callers(outputs[:results], written)
            # Autograd detects in-place changes of these before the backward.
            ctx.save_for_backward(*[tensors[k] for k in signature.saved_inputs])
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*_not_differentiable(outputs, signature))
            return tuple(outputs)

        @staticmethod
        @untraced
        def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the base takes *args
            ctx: Any, *output_gradients: torch.Tensor | None
        ) -> Entries:
            return None, *_for_each_row(functools.partial(gradients_of, ctx), output_gradients)

    _take_node_hooks(FusedStep, signature)

    def gradients_of(ctx: Any, keep: bool, output_gradients: Gradients) -> Entries:
        arrived = {k: gradient for k, gradient in enumerate(output_gradients) if gradient is not None}
        if not arrived:
            return (None,) * ctx.input_count
        needed = ctx.needs_input_grad[1:]
        _require_first(arrived, ctx.differentiated)
        watches = watches_of(ctx)
        if torch.is_grad_enabled() or watches.set_on:
            if updates is not None and watches.set_on:
                raise eager_only("the optimizer in the graph has used its gradients", watches)
            entries = in_eager(ctx.run, arrived, needed, watches)
        elif arrived.keys() != {loss}:
            entries = forms.gradients(signature, ctx.run, arrived, needed, again=bool(ctx.differentiated))
        else:
            if ctx.differentiated:
                # An earlier backward has freed the saved tensors.
                ctx.run.require_unchanged(signature.saved_inputs)
            else:
                _ = ctx.saved_tensors  # raises if one has changed
            gradients = [gradient.clone() for gradient in ctx.gradients] if keep else ctx.gradients
            gradients = _for_autograd(gradients, arrived[loss], updates)
            entries = _place(gradients, ctx.input_count, signature.gradients)
        if not keep:
            ctx.differentiated |= arrived.keys()
            if loss in arrived:
                ctx.gradients = None
            if not several:
                ctx.run = None
        return entries

    apply, without_gradient = apply_of(FusedStep), _without_gradient(signature)

    def call(tensors: Tensors, random: RandomNumbers | None = None) -> list[torch.Tensor]:
        random = RandomNumbers(signature.seeded) if random is None else random
        if updates is not None:
            # The optimizer steps in a run only if no gradients are left.
            session.before_run()
        with _enabled_gradients(), nullcontext() if updates is None else updates.run(session, tensors, count):
            return list(apply(random, *_cut_off(tensors, without_gradient)))

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
        forms: other forms of the graph.
    """

    def __init__(self, program: Program, options: SessionOptions, forms: OtherForms) -> None:
        assert program.backward is not None, "a split program has a backward"
        self._signature = program.signature
        self._forms = forms
        self._forward = Session(program.forward, options)
        self._backward = Session(program.backward, options)
        self._tangents = [source.index for _, source in program.backward.inputs if source.kind == "tangent"]
        self._apply = apply_of(self._as_function())
        self._without_gradient = _without_gradient(self._signature)

    def call(self, tensors: Tensors, random: RandomNumbers | None = None) -> list[torch.Tensor]:
        """Runs the forward and returns the results, tracked by autograd."""
        with _enabled_gradients():
            random = RandomNumbers(self._signature.seeded) if random is None else random
            return list(self._apply(random, *_cut_off(tensors, self._without_gradient)))

    def _gradients(self, inputs: RunInputs, types: Sequence[_Type], arrived: Mapping[int, torch.Tensor]) -> Entries:
        """The gradients of the inputs: None, as in eager, for an input that no arrived gradient reaches."""
        signature = self._signature
        for k in arrived.keys() - set(signature.tangents):
            raise lost_gradient(signature, k)
        tangents = {k: arrived[k] if k in arrived else types[k].zeros() for k in self._tangents}
        outputs = self._backward.run(dataclasses.replace(inputs, tangents=tangents))
        unreached = {
            k for k, results in enumerate(signature.reached_from) if results and arrived.keys().isdisjoint(results)
        }
        positions = [None if position in unreached else position for position in signature.gradients]
        return _place(outputs, len(inputs.shapes), positions)

    def _as_function(self) -> type[torch.autograd.Function]:
        signature, runner, forms = self._signature, self, self._forms
        changed, written = {mutation.input for mutation in signature.mutations}, _written(signature)
        several = _has_several_parts(signature)
        keeps_run = several or _is_repeatable(signature)
        in_eager = functools.partial(_gradients_in_eager, signature, forms)

        class SplitStep(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, random: RandomNumbers, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
                ctx.random, ctx.run = random, Run.of(tensors, random, changed) if keeps_run else None
                # The backward reads what the forward read, such as statistics before their update.
                copies = {k: tensors[k].clone() for k in signature.saved_inputs if k in changed}
                outputs = runner._forward.run(RunInputs(tensors, _shapes(tensors), random))
                results = _for_callers(outputs[: signature.results], written)
                ctx.saved = outputs[signature.results :]
                ctx.copies = copies
                # Autograd detects in-place changes of these before the backward.
                ctx.save_for_backward(*(tensors[k] for k in signature.saved_inputs if k not in changed))
                ctx.shapes, ctx.types, ctx.differentiated = _shapes(tensors), _types(results), frozenset()
                ctx.in_eager, ctx.results = in_eager, len(results)
                ctx.set_materialize_grads(False)
                ctx.mark_non_differentiable(*_not_differentiable(results, signature))
                return tuple(results)

            @staticmethod
            @untraced
            def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the base takes *args
                ctx: Any, *output_gradients: torch.Tensor | None
            ) -> Entries:
                return None, *_for_each_row(functools.partial(gradients_of, ctx), output_gradients)

        def gradients_of(ctx: Any, keep: bool, output_gradients: Gradients) -> Entries:
            arrived = {k: gradient for k, gradient in enumerate(output_gradients) if gradient is not None}
            if not arrived:
                return (None,) * len(ctx.shapes)
            needed = ctx.needs_input_grad[1:]
            _require_first(arrived, ctx.differentiated)
            watches = watches_of(ctx)
            if torch.is_grad_enabled() or watches.set_on:
                if not keep:
                    ctx.differentiated |= arrived.keys()
                return in_eager(ctx.run, arrived, needed, watches)
            saved = ctx.saved
            if saved is None:
                ctx.differentiated |= arrived.keys()
                return forms.gradients(signature, ctx.run, arrived, needed, again=True)
            unchanged = (k for k in signature.saved_inputs if k not in changed)
            saved_inputs = {**dict(zip(unchanged, ctx.saved_tensors, strict=True)), **ctx.copies}
            if not keep:
                ctx.saved = None
                ctx.differentiated |= arrived.keys()
                if not several:
                    ctx.run = None
            inputs = RunInputs(saved_inputs, ctx.shapes, ctx.random, saved)
            del saved
            return runner._gradients(inputs, ctx.types, arrived)

        _take_node_hooks(SplitStep, signature)
        return SplitStep


def _take_node_hooks(function: type[torch.autograd.Function], signature: Signature) -> None:
    """Lets hooks on `grad_fn` see the gradient of the only output that has one, and refuses all others."""
    tracked = [o.index for o in signature.outputs if o.source == "result" and signature.differentiable[o.index]]

    def refuse() -> NoReturn:
        raise SessionError(
            "a hook is set on the grad_fn of a result of a graph in ONNX Runtime, whose operators have no nodes in "
            "autograd's graph",
            remedy="Set it on the tensor, with register_hook(), or exclude the function with torch.compiler.disable.",
        )

    take_node_hooks(function, tracked[0] if len(tracked) == 1 else None, refuse)


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


def _without_gradient(signature: Signature) -> list[int]:
    """The inputs to which no gradient of a result leads; none if a result has a gradient that sessions don't take."""
    taken = {signature.loss, *signature.tangents}
    if any(differentiable and k not in taken for k, differentiable in enumerate(signature.differentiable)):
        return []
    return [k for k, position in enumerate(signature.gradients) if position is None]


def _cut_off(tensors: Tensors, positions: Sequence[int]) -> Tensors:
    """The inputs of a graph, those at these positions without what they are computed from.

    A backward visits all that a node's inputs are computed from, also if it has no gradient for them, and raises where
    an earlier backward has freed the saved tensors.
    """
    tracked = [k for k in positions if tensors[k].requires_grad]
    if not tracked:
        return tensors
    cut = list(tensors)
    for k in tracked:
        cut[k] = tensors[k].detach()
    return cut


def _is_repeatable(signature: Signature) -> bool:
    """Whether eager, run again on the same inputs, computes what the session computed."""
    return not signature.seeded and not signature.mutations


def _has_several_parts(signature: Signature) -> bool:
    """Whether gradients of different results can arrive at different times."""
    return sum(signature.differentiable) > 1


def _enabled_gradients() -> AbstractContextManager[Any]:
    """Grad mode for results that require a gradient, which a graph can return under `no_grad` too."""
    tracks = torch.is_grad_enabled() or torch.is_inference_mode_enabled()
    return nullcontext() if tracks else torch.enable_grad()


def _require_first(arrived: Mapping[int, torch.Tensor], differentiated: frozenset[int]) -> None:
    if not differentiated.isdisjoint(arrived):
        raise SessionError(_SECOND_BACKWARD[0], remedy=_SECOND_BACKWARD[1])


def _for_each_row(gradients_of: Callable[[bool, Gradients], Entries], output_gradients: Gradients) -> Entries:
    """Gradients of the inputs; under `is_grads_batched=True`, of each row of the batch.

    Args:
        gradients_of: computes them; its first argument is whether the graph is kept for another backward.
        output_gradients: the gradients of the results.
    """
    batch, keep = batch_of(output_gradients), keeps_graph()
    if batch is None:
        return gradients_of(keep, output_gradients)
    last = len(batch.rows) - 1
    return batch.stacked([gradients_of(keep or k < last, row) for k, row in enumerate(batch.rows)])


def _gradients_in_eager(
    signature: Signature,
    forms: OtherForms,
    run: Run | None,
    arrived: Mapping[int, torch.Tensor],
    needed: Sequence[bool],
    watches: Watches,
) -> Entries:
    """Gradients that can be differentiated again, or that hooks change, computed by running the graph in eager.

    Raises:
        SessionError: eager can't repeat the session's run, or is not allowed to run the graph.
    """
    if not _is_repeatable(signature):
        raise eager_only(NOT_REPEATABLE, watches)
    if run is None:
        raise SessionError(_SECOND_BACKWARD[0], remedy=_SECOND_BACKWARD[1])
    return forms.gradients_in_eager(signature, run, arrived, needed, watches)


def eager_only(reason: str, watches: Watches) -> SessionError:
    """The error for a gradient that only eager could compute."""
    called = "backward() was called with create_graph=True on"
    if watches.set_on:
        called = f"a hook or retain_grad() is set on result {min(watches.set_on)}, from which others are computed, of"
    return SessionError(
        f"{called} a graph in ONNX Runtime, and {reason}",
        remedy="Exclude this function from the graphs with torch.compiler.disable, or use strategy='auto'.",
    )


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
