"""Private interfaces of AOTAutograd: its stages, what it says of inputs and outputs, its partitioners and marks."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import fx
from torch.fx.node import has_side_effect

from lit_ort._compat.interpolation import whole_interpolations
from lit_ort._compat.torch_ops import OpOverload

# What marks a node as one of the backward, for the partitioners.
OF_BACKWARD: Mapping[str, Any] = MappingProxyType({"partitioner_tag": "is_backward"})


@dataclasses.dataclass(frozen=True)
class JointTrace:
    """What AOTAutograd makes of a graph.

    Args:
        graph_module: forward and backward, or the forward alone, without writes in place.
        differentiable: whether it has a backward.
        metadata: what AOTAutograd found out about inputs and outputs.
    """

    graph_module: fx.GraphModule
    differentiable: bool
    metadata: Any


def joint_trace(graph_module: fx.GraphModule, examples: Sequence[Any], mode: Any) -> JointTrace:
    """Traces forward and backward of a graph into one, without its compilation.

    AOTAutograd's public entry compiles at once; its two stages are what torch's own export of joint graphs uses.
    """
    from torch._functorch import aot_autograd
    from torch._functorch import config as functorch_config
    from torch._functorch._aot_autograd.graph_compile import aot_stage1_graph_capture
    from torch._guards import TracingContext, tracing

    with contextlib.ExitStack() as stack:
        stack.enter_context(whole_interpolations())
        stack.enter_context(tracing(TracingContext(mode)))
        # As in eager, where a backward runs outside of the autocast around its forward.
        stack.enter_context(functorch_config.patch(backward_pass_autocast="off"))
        # Torch's trace prints where an operator of the backward came from; the error that follows is reported.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Error detected in", UserWarning)
        prepared = aot_autograd.prepare_aot_module_simplified(
            graph_module, examples, None, None, False, False, flatten=False
        )
        call, _, _, _, inputs, descriptions, config, fake_mode, environment, *_ = prepared
        state = aot_autograd.create_aot_state(stack, call, inputs, descriptions, config, fake_mode, environment)
        captured = aot_stage1_graph_capture(state, call)
    return JointTrace(captured.graph_module, state.needs_autograd, state.fw_metadata)


@dataclasses.dataclass(frozen=True)
class Described:
    """What a placeholder or an output of a joint graph is.

    Args:
        kind: `input`, `constant` (of the module), `tangent`, `output`, `mutation` (an input's new value), `gradient`
            (of an input), `base` (what several outputs are views of) or `token` (of an effect's place in the order).
        index: of the input or output; for a tangent of an input's new value, that input.
        of_mutation: whether a tangent is that of an input's new value.
        of_base: whether a tangent is that of a base.
        name: of the attribute that a constant is.
    """

    kind: str
    index: int
    of_mutation: bool = False
    of_base: bool = False
    name: str = ""


def _tokens() -> tuple[type, ...]:
    """What keeps operators with effects in their order, which a graph's order does already."""
    from torch._functorch._aot_autograd import descriptors as d

    forward = (d.ForwardTokenAOTInput, d.ForwardTokenAOTOutput)
    return (*forward, d.BackwardTokenAOTInput, d.BackwardTokenAOTOutput)


def effect_of(node: fx.Node) -> tuple[OpOverload, tuple[Any, ...]] | None:
    """The operator with effects, and its arguments, that a node calls; None for a node that orders no effects."""
    from torch._higher_order_ops.effects import with_effects

    if node.target is not with_effects or not isinstance(node.args[1], OpOverload):
        return None
    return node.args[1], tuple(node.args[2:])


def keep_effect(operator: OpOverload) -> None:
    """Keeps an operator in graphs though nothing reads a result of it."""
    has_side_effect(operator)


def described(descriptor: Any) -> Described | None:
    """The plain form of one of AOTAutograd's descriptors; None for what has none, such as a merged input."""
    from torch._functorch._aot_autograd import descriptors as d

    if isinstance(descriptor, _tokens()):
        return Described("token", -1)
    if isinstance(descriptor, d.PlainAOTInput):
        return Described("input", descriptor.idx)
    if isinstance(descriptor, (d.BufferAOTInput, d.ParamAOTInput)):
        return Described("constant", -1, name=descriptor.target)
    if isinstance(descriptor, d.PlainAOTOutput):
        return Described("output", descriptor.idx)
    if isinstance(descriptor, d.InputMutationAOTOutput):
        inner = described(descriptor.mutated_input)
        return None if inner is None else Described("mutation", inner.index)
    if isinstance(descriptor, d.IntermediateBaseAOTOutput):
        inner = described(descriptor.base_of)
        return None if inner is None else Described("base", inner.index)
    if isinstance(descriptor, d.GradAOTOutput):
        inner = described(descriptor.grad_of)
        return None if inner is None or inner.kind != "input" else Described("gradient", inner.index)
    if isinstance(descriptor, d.TangentAOTInput):
        inner = described(descriptor.output)
        if inner is None:
            return None
        return Described("tangent", inner.index, inner.kind == "mutation", inner.kind == "base")
    return None


def descriptor_of(node: fx.Node) -> Any:
    """AOTAutograd's descriptor of a placeholder, or its descriptors of what the output node returns."""
    return node.meta["desc"]


@dataclasses.dataclass(frozen=True)
class Write:
    """What AOTAutograd found out about an input that the graph changes.

    Args:
        reshapes: whether its shape or its memory changes, not only values.
        hidden: whether autograd doesn't know of the change; it refuses writes into a leaf that needs a gradient, so
            what has passed eager was hidden from it.
        under_no_grad: whether it happens where gradients are off.
        requires_grad: whether the input needs a gradient.
    """

    reshapes: bool
    hidden: bool
    under_no_grad: bool
    requires_grad: bool


def writes_of(metadata: Any) -> dict[int, Write]:
    """The inputs that a graph changes, by position."""
    found: dict[int, Write] = {}
    for position, info in enumerate(metadata.input_info):
        reshapes = info.mutates_metadata or info.mutates_storage_metadata or info.mutation_inductor_storage_resize
        if reshapes or info.mutates_data:
            hidden = info.mutations_hidden_from_autograd or (info.requires_grad and info.is_leaf)
            unseen = info.mutations_under_no_grad_or_inference_mode
            found[position] = Write(reshapes, hidden, unseen, info.requires_grad)
    return found


def aliases_of(metadata: Any) -> dict[int, tuple[str, int]]:
    """The outputs in memory of something else: of which `input`, `base` or `output`, or the `same` as which input."""
    found: dict[int, tuple[str, int]] = {}
    for position, info in enumerate(metadata.output_info):
        of = _ALIASES.get(info.output_type.name)
        if of is not None:
            found[position] = (of, info.base_idx)
    return found


_ALIASES = {
    "is_input": "same",
    "alias_of_input": "input",
    "alias_of_intermediate": "base",
    "alias_of_intermediate_save_as_output": "base",
    "alias_of_intermediate_base_is_user_output": "output",
}


def partition(module: fx.GraphModule, results: int, budget: float | None) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cuts a joint graph into forward and backward.

    Args:
        results: how many outputs are the forward's.
        budget: the share of activation memory to keep, by the min-cut partitioner; None saves what eager would, but for
            what is marked to be computed again.
    """
    from torch._functorch import config, partitioners

    if budget is None:
        return partitioners.default_partition(module, (), num_fwd_outputs=results)
    with config.patch(activation_memory_budget=budget):
        return partitioners.min_cut_rematerialization_partition(module, (), num_fwd_outputs=results)


def mark_recomputed(node: fx.Node, region: int) -> None:
    """Tells torch's partitioners to compute a node again in the backward, as part of a checkpoint."""
    from torch.utils.checkpoint import CheckpointPolicy

    node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    node.meta["ac_graph_id"] = region


def must_recompute(node: fx.Node) -> bool:
    """Whether a node of a joint graph is marked so."""
    from torch._functorch.partitioners import must_recompute as is_marked

    return is_marked(node)


def keep_saved(node: fx.Node, region: int) -> None:
    """Tells torch's partitioners to save a node of a checkpoint for the backward."""
    from torch.utils.checkpoint import CheckpointPolicy

    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    node.meta["ac_graph_id"] = region


def is_marked(node: fx.Node) -> bool:
    """Whether a node is marked, to be saved or to be computed again."""
    return "recompute" in node.meta


def region_of(node: fx.Node) -> int | None:
    """The number of the checkpoint that a marked node belongs to."""
    return node.meta.get("ac_graph_id")
