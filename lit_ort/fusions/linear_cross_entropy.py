"""Output layer and cross entropy as one operator, a chunk of rows at a time.

In:  `linear(hidden, weight, bias)`, then reshapes, slices of rows and casts that nothing else reads, then
     `cross_entropy_loss` over classes, mean or sum
Out: `lit_ort.linear_cross_entropy(hidden, weight, bias, labels, ...)`, the same reshapes and slices on hidden
Saves the logits and their gradient, of which one chunk exists at a time, and rows whose label is ignored.

Source: taking gradients in the forward, chunk by chunk, is the idea of Liger Kernel (Hsu et al. 2024).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lit_ort._compat.torch_fx import arguments_of, first_argument
from lit_ort._compat.torch_ops import OpOverload
from lit_ort._compat.torch_sizes import hint_of
from lit_ort.fusions.graph import FusionGraph
from lit_ort.runtime.report import PassReport

aten = torch.ops.aten
NAME = "linear_cross_entropy"
# Smaller logits cost less than the operator's own overhead.
SMALLEST_LOGITS = 2**18

_MEAN, _SUM = 1, 2
_RESHAPES = frozenset(
    {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int}
    | {aten.squeeze.dim, aten.unsqueeze.default}
)
_COPIES = frozenset({aten.contiguous.default, aten.clone.default, aten.to.dtype, aten._to_copy.default})


def fuse_linear_cross_entropy(graph: FusionGraph) -> PassReport:
    """Rewrites a captured graph in place."""
    fired, declined = 0, []
    for node in list(graph.graph.nodes):
        if node.target is not aten.cross_entropy_loss.default:
            continue
        loss = _Loss.of(node)
        chain = _chain(loss.scores)
        reason = loss.obstacle() or (chain if isinstance(chain, str) else None)
        if reason is not None:
            declined.append(f"{node.name}: {reason}")
            continue
        assert not isinstance(chain, str)
        _replace(graph, loss, chain)
        fired += 1
    graph.graph.eliminate_dead_code()
    return PassReport(NAME, fired, tuple(declined))


@dataclasses.dataclass(frozen=True)
class _Loss:
    """The arguments of one call of cross entropy."""

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

    @property
    def by_class(self) -> bool:
        """Whether the classes are dimension 1 of more than two."""
        return self.scores.meta["val"].dim() == 3

    def obstacle(self) -> str | None:
        scores, labels = self.scores.meta["val"], self.labels.meta["val"]
        if self.reduction not in (_MEAN, _SUM):
            return "it gives a loss for each row"
        if self.label_smoothing != 0:
            return f"label_smoothing is {self.label_smoothing}"
        if labels.is_floating_point() or scores.dim() not in (2, 3):
            return f"its labels are {labels.dtype} for scores of {scores.dim()} dimensions"
        return None


@dataclasses.dataclass(frozen=True)
class _Chain:
    """What lies between the layer and the loss, from the layer on."""

    linear: fx.Node
    steps: tuple[fx.Node, ...]
    transposed: bool


def _chain(scores: fx.Node) -> _Chain | str:
    """The layer behind the scores and what lies between, or why there is none."""
    steps: list[fx.Node] = []
    node, transposed = scores, False
    while True:
        if len(node.users) != 1:
            return f"{node.name} is read elsewhere too"
        if node.target is aten.linear.default:
            break
        if node.target is aten.transpose.int and not steps and _swaps_classes(node):
            transposed = True
        elif not _keeps_classes(node):
            return f"{node.target} lies between it and a linear layer"
        else:
            steps.append(node)
        node = first_argument(node)
    if (scores.meta["val"].dim() == 3) != transposed:
        return "its classes are not the layer's"
    steps.reverse()
    shapes = (step.meta["val"].shape for step in _ordering_steps(steps))
    if any(isinstance(size, torch.SymInt) for shape in shapes for size in shape):
        return "rows of a changing number are sliced"
    if _elements(node.meta["val"]) < SMALLEST_LOGITS:
        return f"its {_elements(node.meta['val'])} scores are few"
    return _Chain(node, tuple(steps), transposed)


def _swaps_classes(node: fx.Node) -> bool:
    return node.meta["val"].dim() == 3 and {d % 3 for d in arguments_of(node)[1:]} == {1, 2}


def _keeps_classes(node: fx.Node) -> bool:
    """Whether a node leaves each row's classes as they are."""
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


def _elements(value: torch.Tensor) -> int:
    count = 1
    for size in value.shape:
        count *= hint_of(size)
    return count


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
    """The steps up to the last slice: what follows leaves the order of rows as it is."""
    slices = [k for k, step in enumerate(steps) if step.target is aten.slice.Tensor]
    return steps[: slices[-1] + 1] if slices else ()


def _on_hidden(graph: FusionGraph, step: fx.Node, hidden: fx.Node, width: Any) -> fx.Node:
    """What a step does to the rows of the scores, done to those of hidden."""
    if step.target in _RESHAPES:
        return _call(graph, aten.reshape.default, hidden, [*step.meta["val"].shape[:-1], width])
    if step.target is aten.slice.Tensor:
        return _call(graph, aten.slice.Tensor, hidden, *step.args[1:])
    return hidden


def _call(graph: FusionGraph, target: Any, value: fx.Node, *args: Any) -> fx.Node:
    node = graph.graph.call_function(target, (value, *args))
    node.meta = {**value.meta}
    return node
