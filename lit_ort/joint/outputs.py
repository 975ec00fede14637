"""Outputs of a graph in terms of what sessions return: results, inputs, and views of them.

Sessions return contiguous tensors. If a result has another memory layout in eager, the session computes it permuted to
that layout, and a view restores its shape. The gradient of the result arrives in the same layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_aot import OF_BACKWARD, Description
from lit_ort._compat.torch_fx import output_of, returned_by
from lit_ort._compat.torch_sizes import hint_of, inverse_order, memory_order
from lit_ort.capture.symbolic_terms import SymbolSources, term_of, terms_of
from lit_ort.errors import CaptureError
from lit_ort.joint.trace import JointGraph, tangents_of
from lit_ort.runtime.program import Mutation, Output, View

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Returned:
    """A joint graph that returns only what sessions have to compute, and the outputs of the captured graph.

    Args:
        joint: the joint graph; its outputs are the results that are not aliases, then the gradients.
        outputs: how each output of the captured graph is obtained.
        mutations: the inputs that the graph changes in place.
    """

    joint: JointGraph
    outputs: tuple[Output, ...]
    mutations: tuple[Mutation, ...]


def normalize_outputs(
    joint: JointGraph, inputs: Sequence[torch.Tensor], captured: Sequence[Any], sources: SymbolSources
) -> Returned:
    """Removes aliases from the outputs of a joint graph, and makes the remaining results contiguous.

    Args:
        joint: the joint graph.
        inputs: examples of the graph's tensor inputs.
        captured: examples of the outputs of the captured graph, with the strides that they have in eager. In the joint
            graph, a view of an input that is changed in place can have other strides.
        sources: the input and dimension of each symbolic size.

    Raises:
        CaptureError: an output is not a view of a result that a session can return.
    """
    joint = dataclasses.replace(joint, aliases=_of_computed_values(joint))
    graph = joint.module.graph
    returned = returned_by(graph)
    count = len(joint.results)
    aliases = [result.kind == "output" and result.index in joint.aliases for result in joint.results]
    computed = [k for k, is_alias in enumerate(aliases) if not is_alias]
    new_positions = {before: after for after, before in enumerate(computed)}
    nodes = returned[:count]
    examples = [node.meta["val"] if isinstance(node, fx.Node) else None for node in nodes]
    layouts = [_layout(r, v, captured) for r, v in zip(joint.results, examples, strict=True)]
    outputs = _outputs(joint, layouts, new_positions, inputs, captured, sources)
    tangents = tangents_of(joint.module)
    start = next(node for node in graph.nodes if node.op != "placeholder")
    for position in computed:
        order = None if joint.results[position].kind == "mutation" else _permutation(layouts[position])
        if order is not None:
            nodes[position] = _permuted(graph, nodes[position], order, start)
            for tangent, result in zip(tangents, joint.tangents, strict=True):
                if result == position:
                    _permute_tangent(graph, tangent, order)
    # Read again, since a gradient can be a tangent that is now permuted.
    output_of(graph).args = ((*(nodes[k] for k in computed), *returned_by(graph)[count:]),)
    without_aliases = dataclasses.replace(
        joint,
        results=tuple(joint.results[k] for k in computed),
        tangents=tuple(new_positions[k] for k in joint.tangents),
    )
    return Returned(without_aliases, outputs, _mutations(without_aliases))


def _of_computed_values(joint: JointGraph) -> dict[int, tuple[str, int]]:
    """The aliases of a joint graph; an alias of another alias is one of that one's base."""
    aliases: dict[int, tuple[str, int]] = {}
    for position, (kind, index) in joint.aliases.items():
        while (
            kind == "result" and joint.results[index].kind == "output" and joint.results[index].index in joint.aliases
        ):
            kind, index = joint.aliases[joint.results[index].index]
            kind = "input" if kind == "same" else kind
        aliases[position] = kind, index
    return aliases


def _outputs(
    joint: JointGraph,
    examples: Sequence[Any],
    new_positions: dict[int, int],
    inputs: Sequence[torch.Tensor],
    captured: Sequence[Any],
    sources: SymbolSources,
) -> tuple[Output, ...]:
    outputs: dict[int, Output] = {}
    for position, result in enumerate(joint.results):
        if result.kind != "output" or result.index >= len(captured):
            continue
        alias, example = joint.aliases.get(result.index), examples[position]
        if alias is None:
            value = example
            if not isinstance(value, torch.Tensor):
                raise CaptureError(
                    f"the graph returns a {type(value).__name__} that it computes, but sessions return tensors only",
                    remedy="Return a tensor, or compute the number outside of the compiled step.",
                )
            is_plain = _permutation(value) is None and not _has_unusual_strides(value)
            view = None if is_plain else _view(value, value.storage_offset(), sources)
            outputs[result.index] = Output("result", new_positions[position], view=view)
        elif alias[0] == "same":
            outputs[result.index] = Output("input", alias[1])
        elif alias[0] == "input":
            _require_fixed_order(inputs[alias[1]])
            view = _view_of(captured[result.index], inputs[alias[1]], sources)
            outputs[result.index] = Output("input", alias[1], view=view)
        else:
            view = _view_of(example, examples[alias[1]], sources)
            outputs[result.index] = Output("result", new_positions[alias[1]], view=view)
    return tuple(outputs[k] for k in range(len(captured)))


def _view_of(value: torch.Tensor, base: torch.Tensor, sources: SymbolSources) -> View:
    """Return an alias as a view of its base.

    Raises:
        CaptureError: the alias interprets the memory differently, such as the real part of a complex tensor.
    """
    if value.dtype != base.dtype or value.is_conj() != base.is_conj() or value.is_neg() != base.is_neg():
        raise CaptureError(
            f"the graph returns a {value.dtype} view of a {base.dtype} tensor that is an input or another output, but "
            "a view of such a tensor must have its dtype, without a lazy conjugation or negation",
            remedy="Return a copy of the view, with clone() or resolve_conj().",
        )
    return _view(value, base.storage_offset(), sources)


def _require_fixed_order(value: torch.Tensor) -> None:
    """Refuses views of an input with a dynamic size that is not dense, whose strides can differ from call to call.

    Raises:
        CaptureError: the input has gaps, or elements that share memory, and a dynamic size.
    """
    if any(isinstance(size, torch.SymInt) for size in value.shape) and memory_order(value) is None:
        raise CaptureError(
            "an output is a view of an input that is not dense in memory and has a dynamic size",
            remedy="Each size is compiled separately.",
        )


def _view(value: torch.Tensor, base_offset: Any, sources: SymbolSources) -> View:
    offset = term_of(value.storage_offset() - base_offset, sources)
    return View(terms_of(value.shape, sources), terms_of(value.stride(), sources), offset)


def _layout(result: Description, value: Any, captured: Sequence[Any]) -> Any:
    """The example of a result with eager's strides.

    AOTAutograd decomposes operators such as `pixel_shuffle` into others, whose results have other strides.
    """
    eager = captured[result.index] if result.kind == "output" and result.index < len(captured) else None
    is_alike = isinstance(eager, torch.Tensor) and isinstance(value, torch.Tensor) and eager.dim() == value.dim()
    return eager if is_alike else value


def _permutation(value: Any) -> list[int] | None:
    """The dimensions of a value in their order in memory; None for a contiguous value.

    Raises:
        CaptureError: elements of the value have gaps between them or share memory.
    """
    if not isinstance(value, torch.Tensor) or value.is_contiguous():
        return None
    order = memory_order(value)
    if order is None:
        raise CaptureError(
            f"the graph returns a value whose strides {tuple(map(hint_of, value.stride()))} for the shape "
            f"{tuple(map(hint_of, value.shape))} have gaps or overlap, but it is not a view of a value of the graph",
            remedy="Return a copy of it, with clone().",
        )
    return order


def _has_unusual_strides(value: torch.Tensor) -> bool:
    """Whether dimensions of size 1 have other strides than in a new contiguous tensor, as those of channels last do."""
    stride: Any = 1
    for size, own in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if isinstance(size, int) and size == 1 and hint_of(own) != stride:
            return True
        stride *= hint_of(size)
    return False


def _permuted(graph: fx.Graph, node: fx.Node, order: list[int], before: fx.Node) -> fx.Node:
    # Directly after the node: torch's partitioners assign all nodes before the forward's last node to the forward.
    with graph.inserting_before(before) if node.op == "placeholder" else graph.inserting_after(node):
        permuted = graph.call_function(aten.permute.default, (node, order))
    permuted.meta = {**node.meta, "val": node.meta["val"].permute(order)}
    return permuted


def _permute_tangent(graph: fx.Graph, tangent: fx.Node, order: list[int]) -> None:
    """Changes a tangent to the memory layout of its result."""
    value = tangent.meta["val"]
    first = next((node for node in graph.nodes if node in tangent.users), None)
    if first is None:
        tangent.meta["val"] = value.permute(order).contiguous()
        return
    with graph.inserting_before(first):
        restored = graph.call_function(aten.permute.default, (tangent, inverse_order(order)))
    restored.meta = {**OF_BACKWARD, "val": value}
    tangent.replace_all_uses_with(restored, delete_user_cb=lambda user: user is not restored)
    tangent.meta["val"] = value.permute(order).contiguous()


def _mutations(joint: JointGraph) -> tuple[Mutation, ...]:
    return tuple(
        Mutation(result.index, k, joint.modes[result.index])
        for k, result in enumerate(joint.results)
        if result.kind == "mutation"
    )
