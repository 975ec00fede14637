"""Private interfaces of AOTAutograd: its stages, its metadata of inputs and outputs, its partitioners."""

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
from lit_ort._compat.patching import replaced
from lit_ort._compat.recurrent_shapes import layers_of_this_cpu
from lit_ort._compat.torch_fx import lazy_graph_modules
from lit_ort._compat.torch_ops import OpOverload

# Metadata by which the partitioners recognize nodes of the backward.
OF_BACKWARD: Mapping[str, Any] = MappingProxyType({"partitioner_tag": "is_backward"})


def is_of_backward(node: fx.Node) -> bool:
    """Whether a node is part of the backward."""
    return all(node.meta.get(key) == value for key, value in OF_BACKWARD.items())


@dataclasses.dataclass(frozen=True)
class JointTrace:
    """AOTAutograd's trace of a graph.

    Args:
        graph_module: the forward with its backward, or the forward alone; without in-place operators.
        differentiable: whether it has a backward.
        metadata: AOTAutograd's metadata of inputs and outputs.
    """

    graph_module: fx.GraphModule
    differentiable: bool
    metadata: Any


def joint_trace(graph_module: fx.GraphModule, examples: Sequence[Any], mode: Any) -> JointTrace:
    """Traces the forward and backward of a graph into a joint graph, without compiling it.

    AOTAutograd's public entry point also compiles. Torch's own export of joint graphs uses these two stages.
    """
    from torch._functorch import aot_autograd
    from torch._functorch import config as functorch_config
    from torch._functorch._aot_autograd.graph_compile import aot_stage1_graph_capture
    from torch._guards import TracingContext, tracing

    with contextlib.ExitStack() as stack:
        stack.enter_context(whole_interpolations())
        stack.enter_context(layers_of_this_cpu())
        stack.enter_context(lazy_graph_modules())
        stack.enter_context(tracing(TracingContext(mode)))
        # In eager, too, the backward runs outside of the forward's autocast region.
        stack.enter_context(functorch_config.patch(backward_pass_autocast="off"))
        # Torch warns with the origin of an operator of the backward that fails; the error itself is reported.
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
class Description:
    """The meaning of a placeholder or an output of a joint graph.

    Args:
        kind: `input`, `constant` (of the module), `tangent`, `output`, `mutation` (an input's new value), `gradient`
            (of an input), `base` (of which several outputs are views) or `token` (which orders effects).
        index: the position of the input or output; for a tangent of an input's new value, that of the input.
        of_mutation: whether this is the tangent of an input's new value.
        of_base: whether this is the tangent of a base.
        name: the name of a constant's attribute.
    """

    kind: str
    index: int
    of_mutation: bool = False
    of_base: bool = False
    name: str = ""


def _tokens() -> tuple[type, ...]:
    """Descriptors of tokens, by which AOTAutograd orders operators with effects. The order of nodes already does so."""
    from torch._functorch._aot_autograd import descriptors as d

    forward = (d.ForwardTokenAOTInput, d.ForwardTokenAOTOutput)
    return (*forward, d.BackwardTokenAOTInput, d.BackwardTokenAOTOutput)


def effect_of(node: fx.Node) -> tuple[OpOverload, tuple[Any, ...]] | None:
    """The operator with effects that a node calls, and its arguments; None if the node calls no such operator."""
    from torch._higher_order_ops.effects import with_effects

    if node.target is not with_effects or not isinstance(node.args[1], OpOverload):
        return None
    return node.args[1], tuple(node.args[2:])


def keep_effect(operator: OpOverload) -> None:
    """Excludes an operator from dead code elimination."""
    has_side_effect(operator)


def description_of(descriptor: Any) -> Description | None:
    """Convert one of AOTAutograd's descriptors; None for those without a counterpart, such as a merged input."""
    from torch._functorch._aot_autograd import descriptors as d

    if isinstance(descriptor, _tokens()):
        return Description("token", -1)
    if isinstance(descriptor, d.PlainAOTInput):
        return Description("input", descriptor.idx)
    if isinstance(descriptor, (d.BufferAOTInput, d.ParamAOTInput)):
        return Description("constant", -1, name=descriptor.target)
    if isinstance(descriptor, d.PlainAOTOutput):
        return Description("output", descriptor.idx)
    if isinstance(descriptor, d.InputMutationAOTOutput):
        inner = description_of(descriptor.mutated_input)
        return None if inner is None else Description("mutation", inner.index)
    if isinstance(descriptor, d.IntermediateBaseAOTOutput):
        inner = description_of(descriptor.base_of)
        return None if inner is None else Description("base", inner.index)
    if isinstance(descriptor, d.GradAOTOutput):
        inner = description_of(descriptor.grad_of)
        return None if inner is None or inner.kind != "input" else Description("gradient", inner.index)
    if isinstance(descriptor, d.TangentAOTInput):
        inner = description_of(descriptor.output)
        if inner is None:
            return None
        return Description("tangent", inner.index, inner.kind == "mutation", inner.kind == "base")
    return None


def descriptor_of(node: fx.Node) -> Any:
    """AOTAutograd's descriptor of a placeholder, or the descriptors of all outputs for the output node."""
    return node.meta["desc"]


@dataclasses.dataclass(frozen=True)
class Write:
    """AOTAutograd's metadata of an input that the graph changes in place.

    Args:
        reshapes: whether its shape or its storage changes, not only its values.
        hidden: whether the change is hidden from autograd. A change of a leaf that requires grad always is: autograd
            would have raised an error otherwise.
        under_no_grad: whether the change happens under `no_grad`.
        requires_grad: whether the input requires grad.
    """

    reshapes: bool
    hidden: bool
    under_no_grad: bool
    requires_grad: bool


def writes_of(metadata: Any) -> dict[int, Write]:
    """The inputs that a graph changes in place, by position."""
    writes: dict[int, Write] = {}
    for position, info in enumerate(metadata.input_info):
        reshapes = info.mutates_metadata or info.mutates_storage_metadata or info.mutation_inductor_storage_resize
        if reshapes or info.mutates_data:
            hidden = info.mutations_hidden_from_autograd or (info.requires_grad and info.is_leaf)
            under_no_grad = info.mutations_under_no_grad_or_inference_mode
            writes[position] = Write(reshapes, hidden, under_no_grad, info.requires_grad)
    return writes


def grad_mode_after(metadata: Any) -> bool | None:
    """The grad mode that the graph sets for the code after it, or None."""
    return metadata.grad_enabled_mutation


def aliases_of(metadata: Any) -> dict[int, tuple[str, int]]:
    """The outputs that are aliases, by position.

    Each alias is a view of an `input`, `base` or `output`, or the `same` tensor as an input, with its index.
    """
    aliases: dict[int, tuple[str, int]] = {}
    for position, info in enumerate(metadata.output_info):
        kind = _ALIASES.get(info.output_type.name)
        if kind is not None:
            aliases[position] = (kind, info.base_idx)
    return aliases


_ALIASES = {
    "is_input": "same",
    "alias_of_input": "input",
    "alias_of_intermediate": "base",
    "alias_of_intermediate_save_as_output": "base",
    "alias_of_intermediate_base_is_user_output": "output",
}


def partition(module: fx.GraphModule, results: int, budget: float | None) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Partitions a joint graph into forward and backward.

    Args:
        module: the joint graph.
        results: the number of outputs of the forward; they are the first ones.
        budget: the fraction of activation memory that the min-cut partitioner may save; None saves the same tensors as
            eager, except for those that are marked for recomputation.
    """
    from torch._functorch import config, partitioners

    # A recomputed operator draws the same numbers again as it is, by its stream.
    with replaced(partitioners, "functionalize_rng_ops", lambda _, forward, backward, *__: (forward, backward)):
        if budget is None:
            return partitioners.default_partition(module, (), num_fwd_outputs=results)
        # Its elimination of common subexpressions merges 0.0 and -0.0.
        with config.patch(activation_memory_budget=budget, cse=False):
            return partitioners.min_cut_rematerialization_partition(module, (), num_fwd_outputs=results)


def mark_recomputed(node: fx.Node, region: int) -> None:
    """Marks a node, as part of a checkpoint, for recomputation in the backward by torch's partitioners."""
    from torch.utils.checkpoint import CheckpointPolicy

    node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    node.meta["ac_graph_id"] = region


def must_recompute(node: fx.Node) -> bool:
    """Whether a node of a joint graph is marked for recomputation."""
    from torch._functorch.partitioners import must_recompute as is_marked

    return is_marked(node)


def keep_saved(node: fx.Node, region: int) -> None:
    """Marks a node of a checkpoint to be saved for the backward by torch's partitioners."""
    from torch.utils.checkpoint import CheckpointPolicy

    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    node.meta["ac_graph_id"] = region


def is_marked(node: fx.Node) -> bool:
    """Whether a node is marked to be saved or recomputed."""
    return "recompute" in node.meta


def region_of(node: fx.Node) -> int | None:
    """The number of the checkpoint that a marked node belongs to."""
    return node.meta.get("ac_graph_id")
