"""Fuses the output layer and cross entropy into an operator that computes a chunk of rows at a time.

In:  `linear(hidden, weight, bias)`, then reshapes, slices of rows and casts that have no other users, then
     `cross_entropy_loss` over the classes, with reduction "mean" or "sum"
Out: the same reshapes and slices of `hidden`, then `lit_ort.linear_cross_entropy(hidden, weight, bias, labels, ...)`
Saves the memory of the logits and their gradient, of which only one chunk exists at a time, and the computation of rows
with an ignored label.

Source: Liger Kernel (Hsu et al. 2024) for computing the gradients in the forward, chunk by chunk.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_fx import arguments_of, first_argument
from lit_ort._compat.torch_ops import OpOverload
from lit_ort._compat.torch_sizes import hint_of
from lit_ort.fusions.fusion_graph import FusionGraph
from lit_ort.runtime.report import PassReport

aten = torch.ops.aten
NAME = "linear_cross_entropy"
# For fewer elements of the logits, the overhead of the operator is larger than its gain.
SMALLEST_LOGITS = 2**18

_MEAN, _SUM = 1, 2
_RESHAPES = frozenset(
    {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int}
    | {aten.squeeze.dim, aten.unsqueeze.default}
)
_COPIES = frozenset({aten.contiguous.default, aten.clone.default, aten.to.dtype, aten._to_copy.default})


def fuse_linear_cross_entropy(graph: FusionGraph) -> PassReport:
    """Fuses output layers with their losses in a captured graph, in place."""
    fired, declined = 0, []
    for node in list(graph.graph.nodes):
        if node.target is not aten.cross_entropy_loss.default:
            continue
        loss = _Loss.of(node)
        chain = _chain(loss.scores)
        reason = loss.obstacle() or (chain if isinstance(chain, str) else _against_joining(graph, loss, chain))
        if reason is not None:
            declined.append(f"{node.name}: {reason}")
            continue
        assert not isinstance(chain, str)
        _replace(graph, loss, chain)
        fired += 1
    return PassReport(NAME, fired, tuple(declined))


@dataclasses.dataclass(frozen=True)
class _Loss:
    """The arguments of one call of cross entropy; `scores` are the logits."""

    node: fx.Node
    scores: fx.Node
    labels: fx.Node
    class_weight: fx.Node | None
    reduction: int
    ignore_index: Any
    label_smoothing: float

    @classmethod
    def of(cls, node: fx.Node) -> _Loss:
        defaults = {"weight": None, "reduction": _MEAN, "ignore_index": -100, "label_smoothing": 0.0}
        scores, labels, *settings = arguments_of(node)
        values: dict[str, Any] = {**defaults, **dict(zip(defaults, settings, strict=False)), **node.kwargs}
        return cls(node, scores, labels, *values.values())

    def obstacle(self) -> str | None:
        """Why the loss is not fused, or None."""
        scores, labels = self.scores.meta["val"], self.labels.meta["val"]
        if self.reduction not in (_MEAN, _SUM):
            return "reduction='none' returns a loss for each row"
        if self.label_smoothing != 0:
            return f"label_smoothing is {self.label_smoothing}, not 0"
        if not isinstance(self.ignore_index, int):
            return "ignore_index changes with sizes"
        if labels.is_floating_point():
            return f"the labels are {labels.dtype}, not class indices"
        if scores.dtype == torch.float16:
            return "the logits are torch.float16, whose gradients a loss scale has to keep from becoming 0"
        if scores.dim() not in (2, 3):
            return f"the logits have {scores.dim()} dimensions, not 2 or 3"
        return None


@dataclasses.dataclass(frozen=True)
class _Chain:
    """The linear layer and the nodes between it and the loss, in order."""

    linear: fx.Node
    steps: tuple[fx.Node, ...]
    transposed: bool


def _chain(scores: fx.Node) -> _Chain | str:
    """The chain that computes the logits, or why there is none that can be fused."""
    steps: list[fx.Node] = []
    node, transposed = scores, False
    while True:
        if len(node.users) != 1:
            return f"{node.name} is also used elsewhere"
        if node.target is aten.linear.default:
            break
        if node.target is aten.transpose.int and not steps and _swaps_classes(node):
            transposed = True
        elif not _keeps_classes(node):
            return f"{node.target} is not allowed between a linear layer and the loss"
        else:
            steps.append(node)
        node = first_argument(node)
    if (scores.meta["val"].dim() == 3) != transposed:
        return "the classes are not the output features of the linear layer"
    steps.reverse()
    shapes = (step.meta["val"].shape for step in _ordering_steps(steps))
    if any(isinstance(size, torch.SymInt) for shape in shapes for size in shape):
        return "rows are sliced, and their number is dynamic"
    elements = math.prod(map(hint_of, node.meta["val"].shape))
    if elements < SMALLEST_LOGITS:
        return f"the logits have {elements} elements, fewer than {SMALLEST_LOGITS}"
    return _Chain(node, tuple(steps), transposed)


def _against_joining(graph: FusionGraph, loss: _Loss, chain: _Chain) -> str | None:
    nodes = [chain.linear, *chain.steps, loss.scores, loss.node]
    if graph.may_join(nodes, chain.linear.all_input_nodes):
        return None
    return "the linear layer is in another grad mode than the loss, or a value is written between them"


def _swaps_classes(node: fx.Node) -> bool:
    return node.meta["val"].dim() == 3 and {d % 3 for d in arguments_of(node)[1:]} == {1, 2}


def _keeps_classes(node: fx.Node) -> bool:
    """Whether the last dimension of a node's result is that of its input, unchanged."""
    if not isinstance(node.target, OpOverload) or not node.all_input_nodes:
        return False
    before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
    if before.dim() == 0 or after.dim() == 0 or before.shape[-1] != after.shape[-1]:
        return False
    if node.target in _RESHAPES:
        return True
    if node.target in _COPIES:
        return after.is_floating_point()
    if node.target is aten.slice.Tensor:
        dimension = arguments_of(node)[1] if len(node.args) > 1 else 0
        return dimension % before.dim() < before.dim() - 1
    return False


def _replace(graph: FusionGraph, loss: _Loss, chain: _Chain) -> None:
    hidden, weight, *rest = arguments_of(chain.linear)
    bias = rest[0] if rest else chain.linear.kwargs.get("bias")
    width = hidden.meta["val"].shape[-1]
    with graph.graph.inserting_before(loss.node):
        for step in _ordering_steps(chain.steps):
            hidden = _on_hidden(graph, step, hidden, width)
        hidden = _call(graph, aten.reshape.default, hidden, [-1, width])
        labels = _call(graph, aten.reshape.default, loss.labels, [-1])
    low = graph.low_precision(chain.linear)
    settings = (loss.class_weight, loss.ignore_index, loss.reduction == _MEAN, low, [True, True, bias is not None])
    arguments = (hidden, weight, bias, labels, *settings)
    graph.replace(loss.node, torch.ops.lit_ort.linear_cross_entropy.default, arguments, element=0)


def _ordering_steps(steps: Sequence[fx.Node]) -> Sequence[fx.Node]:
    """The steps up to the last slice. The steps after it don't change the order of rows."""
    slices = [k for k, step in enumerate(steps) if step.target is aten.slice.Tensor]
    return steps[: slices[-1] + 1] if slices else ()


def _on_hidden(graph: FusionGraph, step: fx.Node, hidden: fx.Node, width: Any) -> fx.Node:
    """Applies a step to the rows of `hidden` instead of the rows of the logits."""
    if step.target in _RESHAPES:
        return _call(graph, aten.reshape.default, hidden, [*step.meta["val"].shape[:-1], width])
    if step.target is aten.slice.Tensor:
        return _call(graph, aten.slice.Tensor, hidden, *step.args[1:])
    return hidden


def _call(graph: FusionGraph, target: Any, value: fx.Node, *args: Any) -> fx.Node:
    node = graph.graph.call_function(target, (value, *args))
    node.meta = {**value.meta}
    return node
