"""Layers of which each rank has a part: linear layers by columns and rows, attention by heads, words by vocabulary.

A module says in `tensor_plan` which of its layers become which; `shard` replaces them, names of parameters stay.

Source: Shoeybi et al., Megatron-LM, 2019 (arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_ort._compat.torch_distributed import refuse_fast_path
from lit_ort.distributed.collectives import largest_over_ranks, same_on_ranks, sum_over_ranks
from lit_ort.errors import UnsupportedError


@dataclass(frozen=True)
class Shard:
    """Which part a rank has. group: the name of the process group."""

    group: str
    rank: int
    size: int


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut: along a dimension, which holds so many equal pieces that are each sharded."""

    dimension: int
    pieces: int = 1

    def part(self, whole: Tensor, rank: int, size: int) -> Tensor:
        pieces = whole.chunk(self.pieces, self.dimension)
        return torch.cat([piece.tensor_split(size, self.dimension)[rank] for piece in pieces], self.dimension)

    def whole(self, parts: list[Tensor]) -> Tensor:
        """Of the parts of all ranks."""
        cut = [part.chunk(self.pieces, self.dimension) for part in parts]
        return torch.cat([torch.cat(pieces, self.dimension) for pieces in zip(*cut, strict=True)], self.dimension)


def cut_of(parameter: Tensor) -> Cut | None:
    """How a parameter is cut; None for one that every rank has whole."""
    return getattr(parameter, "lit_ort_cut", None)


def _part(whole: Tensor, cut: Cut, shard: Shard) -> nn.Parameter:
    parameter = nn.Parameter(cut.part(whole.detach(), shard.rank, shard.size).clone(), whole.requires_grad)
    parameter.lit_ort_cut = cut  # pyright: ignore[reportAttributeAccessIssue] - for `cut_of`
    return parameter


class ColumnLinear(nn.Module):
    """Each rank computes some of the outputs. Replaces `nn.Linear` and transformers' `Conv1D`.

    pieces: of which the outputs consist, such as 3 for queries, keys and values; each is sharded.
    """

    def __init__(self, layer: nn.Module, shard: Shard, pieces: int = 1) -> None:
        super().__init__()
        self._shard = shard
        self._transposed = not isinstance(layer, nn.Linear)
        weight, bias = _weights_of(layer)
        self.weight = _part(weight, Cut(1 if self._transposed else 0, pieces), shard)
        self.bias = None if bias is None else _part(bias, Cut(0, pieces), shard)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.T if self._transposed else self.weight
        return F.linear(same_on_ranks(x, self._shard.group), weight, self.bias)


class RowLinear(nn.Module):
    """Each rank has some of the inputs; the results are summed up. Replaces the same."""

    def __init__(self, layer: nn.Module, shard: Shard) -> None:
        super().__init__()
        self._shard = shard
        self._transposed = not isinstance(layer, nn.Linear)
        weight, bias = _weights_of(layer)
        # In the order of the layer's own, by which an optimizer numbers them.
        self.weight = _part(weight, Cut(0 if self._transposed else 1), shard)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.T if self._transposed else self.weight
        result = sum_over_ranks(F.linear(x, weight), self._shard.group)
        return result if self.bias is None else result + self.bias


class HeadAttention(nn.Module):
    """Each rank computes some of the heads. Replaces the self-attention of an `nn.TransformerEncoderLayer`."""

    def __init__(self, layer: nn.MultiheadAttention, shard: Shard) -> None:
        super().__init__()
        refuse_fast_path(self)
        _require_divisible("attention heads", layer.num_heads, shard.size)
        self._shard = shard
        self.batch_first = layer.batch_first
        self.head_width = layer.head_dim
        self.dropout = layer.dropout
        self.in_proj_weight = _part(layer.in_proj_weight, Cut(0, 3), shard)
        bias = layer.in_proj_bias
        self.in_proj_bias = None if bias is None else _part(bias, Cut(0, 3), shard)
        self.out_proj = RowLinear(layer.out_proj, shard)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        if key is not query or value is not query or key_padding_mask is not None or need_weights:
            raise UnsupportedError(
                "attention by heads is built for self-attention without padding masks and without weights as a result. "
                "Leave this attention out of tensor_plan."
            )
        x = query if self.batch_first else query.transpose(0, 1)
        projected = F.linear(same_on_ranks(x, self._shard.group), self.in_proj_weight, self.in_proj_bias)
        heads = (part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in projected.chunk(3, -1))
        dropout = self.dropout if self.training else 0.0
        # The mask that comes with is_causal says the same.
        mask = None if is_causal else attn_mask
        result = F.scaled_dot_product_attention(*heads, attn_mask=mask, dropout_p=dropout, is_causal=is_causal)
        result = self.out_proj(result.transpose(1, 2).flatten(2))
        return (result if self.batch_first else result.transpose(0, 1)), None


class VocabularyEmbedding(nn.Module):
    """Each rank has the rows of some words."""

    def __init__(self, layer: nn.Embedding, shard: Shard) -> None:
        super().__init__()
        if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse or layer.padding_idx is not None:
            raise UnsupportedError(
                "an embedding with padding_idx, max_norm, scale_grad_by_freq or sparse can't be sharded by words. "
                "Leave it out of tensor_plan."
            )
        self._shard = shard
        self._first = _first_of(layer.num_embeddings, shard)
        self.weight = _part(layer.weight, Cut(0), shard)

    def forward(self, words: Tensor) -> Tensor:
        local = words - self._first
        count = self.weight.shape[0]
        own = (local >= 0) & (local < count)
        embedded = F.embedding(local.clamp(0, count - 1), self.weight)
        return sum_over_ranks(embedded * own.unsqueeze(-1).to(embedded.dtype), self._shard.group)


class VocabularyCrossEntropy(nn.Module):
    """The mean cross entropy of logits of which each rank has those of some words. Replaces `nn.CrossEntropyLoss`.

    `words` is set by `shard` from the output layer of the plan.
    """

    def __init__(self, layer: nn.CrossEntropyLoss, shard: Shard) -> None:
        super().__init__()
        if layer.weight is not None or layer.label_smoothing or layer.reduction != "mean":
            raise UnsupportedError(
                "the loss by words is the plain mean: no weights, label smoothing or other reduction. Leave the loss "
                "and the output layer out of tensor_plan."
            )
        self._shard = shard
        self._ignored = layer.ignore_index
        self.words: int | None = None

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits: float32[rows, words of this rank]; targets: int64[rows]."""
        assert self.words is not None
        group, count = self._shard.group, logits.shape[-1]
        largest = largest_over_ranks(logits.detach().amax(-1), group)
        shifted = logits - largest.unsqueeze(-1)
        total = sum_over_ranks(shifted.exp().sum(-1), group)
        local = targets - _first_of(self.words, self._shard)
        own = (local >= 0) & (local < count)
        picked = shifted.gather(-1, local.clamp(0, count - 1).unsqueeze(-1)).squeeze(-1)
        target = sum_over_ranks(picked * own.to(picked.dtype), group)
        counted = (targets != self._ignored).to(picked.dtype)
        return ((total.log() - target) * counted).sum() / counted.sum()


def _gpt2_attention(layer: Any, shard: Shard) -> nn.Module:
    """Transformers' GPT-2 attention with some of its heads: its products are replaced, it stays."""
    _require_divisible("attention heads", layer.num_heads, shard.size)
    layer.c_attn = ColumnLinear(layer.c_attn, shard, 3)
    layer.c_proj = RowLinear(layer.c_proj, shard)
    layer.num_heads //= shard.size
    layer.split_size //= shard.size
    return layer


# What a plan may call a layer.
STYLES: dict[str, Callable[[Any, Shard], nn.Module]] = {
    "column": ColumnLinear,
    "row": RowLinear,
    "attention": HeadAttention,
    "gpt2_attention": _gpt2_attention,
    "embedding": VocabularyEmbedding,
    "output": ColumnLinear,
    "cross_entropy": VocabularyCrossEntropy,
}


def shard(module: nn.Module, plan: Mapping[str, str], part: Shard) -> None:
    """Replaces the layers of a plan by a rank's parts of them. Tied parameters stay tied.

    Args:
        module: whole, the same one on every rank.
        plan: from patterns of module names (`layers.*.linear1`) to one of `STYLES`.

    Raises:
        UnsupportedError: a pattern that no layer has, a style that there is not, or sizes that don't divide.
    """
    tied = _tied_names(module)
    words: int | None = None
    for pattern, style in plan.items():
        if style not in STYLES:
            raise UnsupportedError(f"tensor_plan has {style!r} for {pattern!r}, and there are {', '.join(STYLES)}.")
        names = [name for name, _ in module.named_modules() if fnmatchcase(name, pattern)]
        if not names:
            raise UnsupportedError(
                f"tensor_plan has {pattern!r}, and {type(module).__name__} has no such layer. Its names are those of "
                "named_modules(), * stands for any part of one."
            )
        for name in names:
            layer: Any = module.get_submodule(name)
            words = layer.weight.shape[0] if style == "output" else words
            _require_divisible_layer(name, style, layer, part.size)
            module.set_submodule(name, STYLES[style](layer, part))
    for first, others in tied.items():
        for name in others:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, module.get_parameter(first))
    for layer in module.modules():
        if isinstance(layer, VocabularyCrossEntropy):
            layer.words = words


def _tied_names(module: nn.Module) -> dict[str, list[str]]:
    """Further names of each parameter that has several, by its first one."""
    first: dict[nn.Parameter, str] = {}
    others: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in first:
            others.setdefault(first[parameter], []).append(name)
        else:
            first[parameter] = name
    return others


def _require_divisible_layer(name: str, style: str, layer: Any, size: int) -> None:
    if style in ("column", "row"):
        weight, _ = _weights_of(layer)
        outputs_first = isinstance(layer, nn.Linear)
        dimension = 0 if (style == "column") == outputs_first else 1
        _require_divisible(f"{'outputs' if style == 'column' else 'inputs'} of {name}", weight.shape[dimension], size)


def _require_divisible(what: str, count: int, size: int) -> None:
    if count % size:
        raise UnsupportedError(
            f"{count} {what} don't divide into equal parts for {size} processes. Choose a number of processes that "
            "divides them, or other figures of the model."
        )


def _weights_of(layer: Any) -> tuple[nn.Parameter, nn.Parameter | None]:
    return layer.weight, layer.bias


def _first_of(count: int, shard: Shard) -> int:
    """The first of a rank's words, where earlier ranks have one more if they don't divide."""
    each, more = divmod(count, shard.size)
    return shard.rank * each + min(shard.rank, more)


def is_sharded(module: nn.Module) -> bool:
    """Whether this process has a part of some parameters only."""
    return next(cuts(module), None) is not None


def cuts(module: nn.Module) -> Iterator[tuple[str, Cut]]:
    """The names of parameters that are cut, and how."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        cut = cut_of(parameter)
        if cut is not None:
            yield name, cut
