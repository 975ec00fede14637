"""What a graph's outputs are, once sessions have run: results, inputs handed back, views of either.

Sessions give contiguous values. A result that eager would give in another order of memory is computed in that order,
and a view of it restores its shape; its gradient comes in that order too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_aot import OF_BACKWARD
from lit_ort._compat.torch_fx import inputs_of, output_of, returned_by
from lit_ort._compat.torch_sizes import hint_of
from lit_ort.errors import CaptureError
from lit_ort.joint.trace import JointGraph
from lit_ort.runtime.program import Mutation, Output, View

aten = torch.ops.aten
Terms = Callable[[Sequence[Any]], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Returned:
    """A joint graph that returns what sessions have to compute, and how the graph's outputs come from that.

    Args:
        joint: its outputs are the results that no alias stands for, then the gradients.
        outputs: every output of the captured graph.
        mutations: the inputs that are changed.
    """

    joint: JointGraph
    outputs: tuple[Output, ...]
    mutations: tuple[Mutation, ...]


def settle_outputs(
    joint: JointGraph, inputs: Sequence[torch.Tensor], captured: Sequence[Any], terms: Terms
) -> Returned:
    """Leaves the results to compute as outputs of a joint graph, in contiguous order.

    Args:
        inputs: examples of the graph's tensor inputs.
        captured: examples of the captured graph's outputs, as they lie in memory in eager; a joint graph without writes
            may have other strides for a view of an input that is changed.
        terms: from sizes to plain terms.

    Raises:
        CaptureError: an output that lies in memory in a way that no view of a session's result has.
    """
    graph = joint.module.graph
    returned = returned_by(graph)
    count = len(joint.results)
    aliases = [result.kind == "output" and result.index in joint.aliases for result in joint.results]
    computed = [k for k, is_alias in enumerate(aliases) if not is_alias]
    place = {before: after for after, before in enumerate(computed)}
    nodes = returned[:count]
    examples = [node.meta["val"] if isinstance(node, fx.Node) else None for node in nodes]
    outputs = _outputs(joint, examples, place, inputs, captured, terms)
    tangents = [node for node in inputs_of(graph) if node.meta["described"].kind == "tangent"]
    start = next(node for node in graph.nodes if node.op != "placeholder")
    for position in computed:
        order = _memory_order(examples[position])
        if order is not None and joint.results[position].kind != "mutation":
            nodes[position] = _permuted(graph, nodes[position], order, start)
            for tangent, result in zip(tangents, joint.tangents, strict=True):
                if result == position:
                    _restore(graph, tangent, order)
    output_of(graph).args = ((*(nodes[k] for k in computed), *returned[count:]),)
    settled = dataclasses.replace(
        joint,
        results=tuple(joint.results[k] for k in computed),
        tangents=tuple(place[k] for k in joint.tangents),
    )
    return Returned(settled, outputs, _mutations(settled))


def _outputs(
    joint: JointGraph,
    examples: Sequence[Any],
    place: dict[int, int],
    inputs: Sequence[torch.Tensor],
    captured: Sequence[Any],
    terms: Terms,
) -> tuple[Output, ...]:
    found: dict[int, Output] = {}
    for position, result in enumerate(joint.results):
        if result.kind != "output":
            continue
        alias, example = joint.aliases.get(result.index), examples[position]
        if alias is None:
            value = example
            if not isinstance(value, torch.Tensor):
                raise CaptureError(
                    f"the graph returns a {type(value).__name__} computed from its inputs",
                    remedy="Return a tensor, or compute the number outside of the compiled step.",
                )
            view = None if _memory_order(value) is None else _view(value, value.storage_offset(), terms)
            found[result.index] = Output("result", place[position], view=view)
        elif alias[0] == "same":
            found[result.index] = Output("input", alias[1])
        elif alias[0] == "input":
            _require_fixed_order(inputs[alias[1]])
            view = _view_of(captured[result.index], inputs[alias[1]], terms)
            found[result.index] = Output("input", alias[1], view=view)
        else:
            view = _view_of(example, examples[alias[1]], terms)
            found[result.index] = Output("result", place[alias[1]], view=view)
    return tuple(found[k] for k in sorted(found))


def _view_of(value: torch.Tensor, base: torch.Tensor, terms: Terms) -> View:
    """Where an alias lies in the memory of what it is one of.

    Raises:
        CaptureError: it reads that memory in another way, such as the real part of a complex number.
    """
    if value.dtype != base.dtype or value.is_conj() != base.is_conj() or value.is_neg() != base.is_neg():
        raise CaptureError(
            f"the graph returns a {value.dtype} view of a {base.dtype} tensor that it also returns or is given, and "
            "aliases of sessions' results have their type",
            remedy="Return a copy of it, by clone() or resolve_conj().",
        )
    return _view(value, base.storage_offset(), terms)


def _require_fixed_order(value: torch.Tensor) -> None:
    """A view of an input with gaps and a changing size would need strides of every call."""
    if any(isinstance(size, torch.SymInt) for size in value.shape) and not value.is_contiguous():
        raise CaptureError(
            "an output lies in the memory of an input that has gaps and a changing size",
            remedy="Each size is compiled by itself.",
        )


def _view(value: torch.Tensor, base_offset: Any, terms: Terms) -> View:
    offset = terms([value.storage_offset() - base_offset])[0]
    return View(terms(value.shape), terms(value.stride()), offset)


def _memory_order(value: Any) -> list[int] | None:
    """The dimensions of a value from the outermost in memory to the innermost, where that is not their own order."""
    if not isinstance(value, torch.Tensor) or value.is_contiguous():
        return None
    order = sorted(range(value.dim()), key=lambda k: (-hint_of(value.stride(k)), k))
    return order if value.permute(order).is_contiguous() else None


def _permuted(graph: fx.Graph, node: fx.Node, order: list[int], before: fx.Node) -> fx.Node:
    # Where its value is: torch's partitioners take all ahead of a forward's last node for the forward.
    with graph.inserting_before(before) if node.op == "placeholder" else graph.inserting_after(node):
        permuted = graph.call_function(aten.permute.default, (node, order))
    permuted.meta = {**node.meta, "val": node.meta["val"].permute(order)}
    return permuted


def _restore(graph: fx.Graph, tangent: fx.Node, order: list[int]) -> None:
    """Lets a tangent come in the order of memory of its result."""
    back = [order.index(k) for k in range(len(order))]
    value = tangent.meta["val"]
    first = next((node for node in graph.nodes if node in tangent.users), None)
    if first is None:
        tangent.meta["val"] = value.permute(order).contiguous()
        return
    with graph.inserting_before(first):
        restored = graph.call_function(aten.permute.default, (tangent, back))
    restored.meta = {**OF_BACKWARD, "val": value}
    tangent.replace_all_uses_with(restored, delete_user_cb=lambda user: user is not restored)
    tangent.meta["val"] = value.permute(order).contiguous()


def _mutations(joint: JointGraph) -> tuple[Mutation, ...]:
    return tuple(
        Mutation(result.index, k, joint.modes[result.index])
        for k, result in enumerate(joint.results)
        if result.kind == "mutation"
    )
