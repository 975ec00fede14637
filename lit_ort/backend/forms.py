"""Other forms of a compiled graph, for gradients that its session doesn't compute."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx
from torch.utils.hooks import RemovableHandle

from lit_ort._compat.torch_fx import ancestors_of, inputs_of, returned_by
from lit_ort.capture.derivatives import inner_results
from lit_ort.runtime.autograd import NOT_REPEATABLE, Call, Entries, Run, eager_only
from lit_ort.runtime.gradient_watches import Watch, Watches
from lit_ort.runtime.latest import Latest
from lit_ort.runtime.program import EAGER, FUSED, SPLIT, Form, Signature
from lit_ort.runtime.views import output_gradients, tracked_output

Tensors = Sequence[torch.Tensor]
Gradients = Mapping[int, torch.Tensor]

# Each has its own sessions, for given sizes.
_MOST_FORMS = 8
_DOUBLE_BACKWARD = (
    "its gradient is differentiated again (create_graph=True), which a session's gradient can't be. From now on it "
    "runs in eager; the rest of the step stays in ONNX Runtime."
)
_WATCHED = (
    "the gradient of a result from which it computes others is read by a hook, retain_grad() or torch.autograd.grad, "
    "and a session doesn't return it. From now on it runs in eager; the rest of the step stays in ONNX Runtime."
)
_SEVERAL_BACKWARDS = (
    "two of its results are differentiated at different times, so that a session would run forward and backward "
    "twice. From now on it runs in eager; the rest of the step stays in ONNX Runtime."
)


class BoundForm(Protocol):
    """A form of a graph that can run."""

    @property
    def signature(self) -> Signature: ...
    @property
    def call(self) -> Call: ...


class Forms:
    """The other forms of one compiled graph.

    Args:
        graph: the captured graph.
        can_be_fused: whether the graph may be compiled with another loss.
        bind: compiles a form for given inputs.
        run_in_eager: runs the graph in eager, tracked by autograd, and returns its outputs.
        fall_back: reports that the graph runs in eager, with the reason and its inputs; None if that is not allowed.

    Attributes:
        wanted: the form that the gradients of a run called for, for later runs; None as long as this one is right.
        inner: the positions of the outputs with a gradient from which other outputs with one are computed, those that
            are computed last first.
    """

    def __init__(
        self,
        graph: fx.Graph,
        can_be_fused: bool,
        bind: Callable[[Form, Tensors], BoundForm],
        run_in_eager: Callable[[Tensors], Sequence[Any]],
        fall_back: Callable[[str, Tensors], None] | None,
    ) -> None:
        self._graph, self._can_be_fused = graph, can_be_fused
        self._bind, self._run_in_eager, self._fall_back = bind, run_in_eager, fall_back
        self._bound: Latest[tuple[Form, tuple[torch.Size, ...]], BoundForm] = Latest(_MOST_FORMS)
        self.wanted: Form | None = None
        inner = inner_results(graph)
        order = {node: place for place, node in enumerate(graph.nodes)}
        positions = [k for k, node in enumerate(returned_by(graph)) if node in inner]
        self.inner = tuple(sorted(positions, key=lambda k: order[returned_by(graph)[k]], reverse=True))

    def gradients(
        self, signature: Signature, run: Run, arrived: Gradients, needed: Sequence[bool], again: bool
    ) -> Entries:
        """The gradients of the inputs of a run, for gradients that its form doesn't take.

        Another form runs the forward again with the same random numbers, and later runs use that form from the start.

        Args:
            signature: of the form that ran.
            run: its inputs.
            arrived: the gradients by position among its results.
            needed: whether each input's gradient is needed.
            again: whether gradients of other results have been computed before.

        Raises:
            RuntimeError: an input that these results depend on has been changed in place.
            SessionError: a gradient can't be passed on.
        """
        mutated = [k for k in arrived if signature.keys[k][0] == "mutation"]
        shapes = [tensor.shape for tensor in run.tensors]
        tangents = output_gradients(signature, {k: g for k, g in arrived.items() if k not in mutated}, shapes)
        run.require_unchanged(range(len(shapes)) if mutated else self._inputs_of(tangents, len(shapes)))
        form = self._form_for(tangents, bool(mutated))
        self.wanted = form
        if again and self._fall_back is not None:
            self.wanted = Form(EAGER)
            self._fall_back(_SEVERAL_BACKWARDS, run.tensors)
        changed = {mutation.input for mutation in signature.mutations}
        pairs = enumerate(zip(run.tensors, needed, strict=True))
        inputs = [_detached(tensor, is_needed, k in changed) for k, (tensor, is_needed) in pairs]
        traced = [inputs[k] if k in changed else tensor for k, tensor in enumerate(run.tensors)]
        executable = self._executable(form, traced)
        results = executable.call(inputs, run.random)
        other = executable.signature
        with torch.enable_grad():
            roots = [tracked_output(other.outputs[position], results, inputs) for position in tangents]
        roots += [results[other.keys.index(signature.keys[k])] for k in mutated]
        return _gradients_of(inputs, needed, roots, [*tangents.values(), *(arrived[k] for k in mutated)])

    def gradients_in_eager(
        self, signature: Signature, run: Run, arrived: Gradients, needed: Sequence[bool], watches: Watches
    ) -> Entries:
        """The gradients of the inputs of a run, from the graph in eager; tracked by autograd in grad mode.

        Args:
            signature: of the form that ran.
            run: its inputs.
            arrived: the gradients by position among its results.
            needed: whether each input's gradient is needed.
            watches: what is set on its outputs.

        Raises:
            SessionError: an input has been changed in place since the run, or the graph is not allowed to run in eager.
        """
        if self._fall_back is None:
            raise eager_only("fallback='error' doesn't allow it to run in eager", watches)
        if run.changed(range(len(run.tensors))):
            raise eager_only(NOT_REPEATABLE, watches)
        tangents = output_gradients(signature, arrived, [tensor.shape for tensor in run.tensors], watches.own)
        differentiable = torch.is_grad_enabled()
        self.wanted = Form(EAGER)
        self._fall_back(_DOUBLE_BACKWARD if differentiable else _WATCHED, run.tensors)
        inputs = run.tensors
        if not differentiable:
            inputs = [_detached(tensor, tensor.requires_grad, False) for tensor in inputs]
        with run.random.again():
            outputs = self._run_in_eager(inputs)
        roots = [outputs[position] for position in tangents]
        arrived_at = [tangent.to(root.dtype) for tangent, root in zip(tangents.values(), roots, strict=True)]
        handed_over = [
            _hand_over(outputs[k], watches.set_on[k], tangents.get(k), roots, arrived_at, differentiable)
            for k in self.inner
            if k in watches.set_on and self._leads_to(watches.target, k)
        ]
        entries = _gradients_of(inputs, needed, roots, arrived_at, create_graph=differentiable)
        for handle in handed_over:
            handle.remove()
        if differentiable:
            # For backwards through these gradients.
            for k, watch in watches.set_on.items():
                outputs[k].register_hook(functools.partial(watch.receive, retained=None))
        return entries

    def _leads_to(self, target: int | None, position: int) -> bool:
        """Whether the gradient of an output is a part of that of another one, if there is one."""
        returned = returned_by(self._graph)
        return target in (None, position) or returned[target] in ancestors_of([returned[position]])

    def _form_for(self, tangents: Gradients, of_mutations: bool) -> Form:
        """The form that takes gradients of these outputs."""
        position, gradient = next(iter(tangents.items()), (None, None))
        is_loss = len(tangents) == 1 and gradient is not None and gradient.dim() == 0
        return Form(FUSED, position) if is_loss and self._can_be_fused and not of_mutations else Form(SPLIT)

    def _executable(self, form: Form, tensors: Tensors) -> BoundForm:
        key = (form, tuple(tensor.shape for tensor in tensors))
        if key not in self._bound:
            self._bound[key] = self._bind(form, tensors)
        return self._bound[key]

    def _inputs_of(self, outputs: Iterable[int], count: int) -> set[int]:
        """The positions of the tensor inputs, which are the first `count` ones, that outputs are computed from."""
        returned = returned_by(self._graph)
        nodes = [returned[position] for position in outputs]
        reached = ancestors_of(nodes) | set(nodes)
        return {position for position, node in enumerate(inputs_of(self._graph)[:count]) if node in reached}


def _hand_over(
    output: torch.Tensor,
    watch: Watch,
    retained: torch.Tensor | None,
    roots: Tensors,
    tangents: Tensors,
    create_graph: bool,
) -> RemovableHandle:
    """Calls the hooks of an output, in the backward in progress, and sets one that replaces its gradient by theirs."""
    (gradient,) = torch.autograd.grad(
        roots, output, tangents, retain_graph=True, create_graph=create_graph, allow_unused=True
    )
    received = None if gradient is None else watch.receive(gradient, retained)
    return output.register_hook(lambda _: received)


def _gradients_of(
    tensors: Tensors, needed: Sequence[bool], roots: Tensors, tangents: Tensors, create_graph: bool = False
) -> Entries:
    """One entry for each tensor; None where no gradient is needed."""
    leaves = [tensor for tensor, is_needed in zip(tensors, needed, strict=True) if is_needed]
    tangents = [tangent.to(root.dtype) for tangent, root in zip(tangents, roots, strict=True)]
    computed = iter(torch.autograd.grad(roots, leaves, tangents, create_graph=create_graph, allow_unused=True))
    return tuple(next(computed) if is_needed else None for is_needed in needed)


def _detached(tensor: torch.Tensor, is_needed: bool, is_changed: bool) -> torch.Tensor:
    """A leaf for a gradient; not a leaf if the graph writes into it, which autograd doesn't allow."""
    leaf = tensor.detach().requires_grad_(is_needed)
    with torch.enable_grad():
        return leaf.clone() if is_changed else leaf
