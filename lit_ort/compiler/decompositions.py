"""Operators taken apart in torch before ONNX, because their ONNX form would be missing or silently different."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram

from lit_ort.compiler.attention import attention
from lit_ort.compiler.stop_gradient import stop_gradient
from lit_ort.compiler.torch_calls import Target, as_call, better_called, changes_in_place, targets_of
from lit_ort.errors import CaptureError

aten = torch.ops.aten


def padded_embedding(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Rows of a table, without a gradient for the padding row; the exporter's own translation gives it one.

    Args:
        weight: float[rows, width]. indices: int[...].
        padding_idx: the row that gets no gradient; -1 for none.

    Raises:
        CaptureError: gradients scaled by frequency, or sparse ones.

    Source: semantics of torch.nn.functional.embedding.
    """
    for name, value in (("scale_grad_by_freq", scale_grad_by_freq), ("sparse", sparse)):
        if value:
            raise CaptureError(
                f"an embedding has {name}=True, and sessions give plain dense gradients",
                remedy=f"Leave {name} out, or this graph runs in eager (fallback='warn').",
                operator="aten.embedding",
            )
    rows = weight.index_select(0, indices.flatten()).reshape(*indices.shape, weight.size(1))
    if padding_idx < 0:
        return rows
    return torch.where((indices == padding_idx).unsqueeze(-1), stop_gradient(rows), rows)


def smoothed_cross_entropy(
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Cross entropy with label smoothing or class probabilities, written with log_softmax.

    Args:
        scores: float[batch, classes, ...]. target: int64[batch, ...] or float[batch, classes, ...].
        reduction: 0 none, 1 mean, 2 sum (ATen's numbering).

    Source: Szegedy et al. 2016; semantics of torch.nn.functional.cross_entropy.
    """
    dimension = 1 if scores.dim() > 1 else 0
    classes = scores.size(dimension)
    shape = [1] * scores.dim()
    shape[dimension] = classes
    class_weight = None if weight is None else weight.reshape(shape)
    log_probability = torch.log_softmax(scores, dimension)
    weighted = log_probability if class_weight is None else log_probability * class_weight
    if target.is_floating_point():
        soft = target if label_smoothing == 0 else target * (1 - label_smoothing) + label_smoothing / classes
        loss = -(weighted * soft).sum(dimension)
        # For class probabilities ATen divides the mean by the batch, weights or not.
        batch = 1 if scores.dim() == 1 else loss.numel()
        return loss if reduction == 0 else loss.sum() if reduction == 2 else loss.sum() / batch
    valid = target != ignore_index
    index = torch.where(valid, target, torch.zeros_like(target)).unsqueeze(dimension)
    zero = torch.zeros((), dtype=scores.dtype)
    picked = weighted.gather(dimension, index).squeeze(dimension)
    spread = weighted.sum(dimension)
    loss = torch.where(valid, picked * (label_smoothing - 1) - spread * (label_smoothing / classes), zero)
    if reduction == 0:
        return loss
    if reduction == 2:
        return loss.sum()
    share = torch.ones_like(loss) if weight is None else weight[index.squeeze(dimension)]
    return loss.sum() / torch.where(valid, share, zero).sum()


def _argument(node: torch.fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _always(node: torch.fx.Node) -> bool:
    return True


def _embedding_is_special(node: torch.fx.Node) -> bool:
    pads = _argument(node, 2, "padding_idx", -1) >= 0
    return pads or _argument(node, 3, "scale_grad_by_freq", False) or _argument(node, 4, "sparse", False)


def _cross_entropy_is_soft(node: torch.fx.Node) -> bool:
    target = node.args[1]
    assert isinstance(target, torch.fx.Node)
    scores = node.args[0]
    assert isinstance(scores, torch.fx.Node)
    return (
        _argument(node, 5, "label_smoothing", 0.0) > 0
        or target.meta["val"].is_floating_point()
        or scores.meta["val"].dim() == 1
    )


# operator -> (when it has to go, what takes its place)
DECOMPOSITIONS: dict[Any, tuple[Callable[[torch.fx.Node], bool], Callable[..., torch.Tensor]]] = {
    aten.scaled_dot_product_attention.default: (_always, attention),
    aten.embedding.default: (_embedding_is_special, padded_embedding),
    aten.cross_entropy_loss.default: (_cross_entropy_is_soft, smoothed_cross_entropy),
}


MOST_ROUNDS = 3


def decompose(program: ExportedProgram, calls: frozenset[Target] = frozenset()) -> ExportedProgram:
    """Applies the table to the operators that are present and need it, and makes calls of torch's own of others.

    Args:
        calls: which others, beside those that are better off so.
    """
    # What stands in place of an operator may itself have to go; and only a program without changes in place tells which
    # inputs change.
    for _ in range(MOST_ROUNDS):
        table = _table(program, calls)
        if not table and not changes_in_place(program):
            break
        program = program.run_decompositions(table)
    return program


def _table(program: ExportedProgram, calls: frozenset[Target]) -> dict[Any, Any]:
    table: dict[Any, Any] = {}
    for node in program.graph.nodes:
        needed, replacement = DECOMPOSITIONS.get(node.target, (None, None))
        if needed is not None and needed(node):
            table[node.target] = replacement
    called = (better_called(program) | (calls & targets_of(program))) - table.keys()
    return table | {target: as_call(target) for target in called}
