"""Tensor parallelism: linear layers sharded by columns or rows, attention by heads, embeddings by vocabulary.

A module's `tensor_plan` maps its layers to sharding styles; `shard` replaces the layers and keeps the parameter names.

Source: Shoeybi et al., Megatron-LM, 2019 (arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lit_ort._compat.torch_distributed import refuse_fast_path
from lit_ort.distributed.collectives import largest_over_ranks, same_on_ranks, sum_over_ranks
from lit_ort.errors import UnsupportedError

# The part by which equal norms of gradients can differ by rounding.
_DIFFERENT = 1e-2


@dataclass(frozen=True)
class Shard:
    """The shard of a rank. group: the name of the process group."""

    group: str
    rank: int
    size: int


@dataclass(frozen=True)
class Cut:
    """How a parameter is sharded: along `dimension`, which consists of `pieces` equal pieces that are sharded each."""

    dimension: int
    pieces: int = 1

    def part(self, whole: Tensor, rank: int, size: int) -> Tensor:
        pieces = whole.chunk(self.pieces, self.dimension)
        return torch.cat([piece.tensor_split(size, self.dimension)[rank] for piece in pieces], self.dimension)

    def whole(self, parts: list[Tensor]) -> Tensor:
        """Concatenates the parts of all ranks."""
        chunks = [part.chunk(self.pieces, self.dimension) for part in parts]
        return torch.cat([torch.cat(pieces, self.dimension) for pieces in zip(*chunks, strict=True)], self.dimension)


def cut_of(parameter: Tensor) -> Cut | None:
    """How a parameter is sharded; None for a replicated one."""
    return getattr(parameter, "lit_ort_cut", None)


def _part(whole: Tensor, cut: Cut, shard: Shard) -> nn.Parameter:
    parameter = nn.Parameter(cut.part(whole.detach(), shard.rank, shard.size).clone(), whole.requires_grad)
    parameter.lit_ort_cut = cut  # pyright: ignore[reportAttributeAccessIssue] - read by `cut_of`
    return parameter


class ColumnLinear(nn.Module):
    """Computes a part of the outputs on each rank. Replaces `nn.Linear` and transformers' `Conv1D`.

    Args:
        layer: the layer to replace.
        shard: the rank's shard.
        pieces: the number of equal pieces of the outputs, such as 3 for queries, keys and values; each is sharded.
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
    """Has a part of the inputs on each rank and sums the results. Replaces `nn.Linear` and transformers' `Conv1D`."""

    def __init__(self, layer: nn.Module, shard: Shard) -> None:
        super().__init__()
        self._shard = shard
        self._transposed = not isinstance(layer, nn.Linear)
        weight, bias = _weights_of(layer)
        # In the order of the original layer's parameters, since an optimizer's state is numbered in this order.
        self.weight = _part(weight, Cut(0 if self._transposed else 1), shard)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.T if self._transposed else self.weight
        result = sum_over_ranks(F.linear(x, weight), self._shard.group)
        return result if self.bias is None else result + self.bias


class HeadAttention(nn.Module):
    """Computes a part of the heads on each rank. Replaces the self-attention of an `nn.TransformerEncoderLayer`."""

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
                "attention is called with a padding mask, with need_weights, or with different query, key and value, "
                "but tensor_plan supports only self-attention without them. Remove this attention from tensor_plan."
            )
        x = query if self.batch_first else query.transpose(0, 1)
        projected = F.linear(same_on_ranks(x, self._shard.group), self.in_proj_weight, self.in_proj_bias)
        heads = (part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in projected.chunk(3, -1))
        dropout = self.dropout if self.training else 0.0
        # With is_causal, the mask is the causal one. True excludes a key here, and admits it in torch's function.
        mask = None if is_causal else attn_mask
        mask = ~mask if mask is not None and mask.dtype == torch.bool else mask
        result = F.scaled_dot_product_attention(*heads, attn_mask=mask, dropout_p=dropout, is_causal=is_causal)
        result = self.out_proj(result.transpose(1, 2).flatten(2))
        return (result if self.batch_first else result.transpose(0, 1)), None


class VocabularyEmbedding(nn.Module):
    """Has a part of the vocabulary's rows on each rank. Replaces `nn.Embedding`."""

    def __init__(self, layer: nn.Embedding, shard: Shard) -> None:
        super().__init__()
        if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse or layer.padding_idx is not None:
            raise UnsupportedError(
                "an embedding with padding_idx, max_norm, scale_grad_by_freq or sparse can't be sharded by vocabulary. "
                "Remove it from tensor_plan."
            )
        self._shard = shard
        self._words = layer.num_embeddings
        self._first = _first_of(layer.num_embeddings, shard)
        self.weight = _part(layer.weight, Cut(0), shard)

    def forward(self, words: Tensor) -> Tensor:
        local = words - self._first
        is_local = (local >= 0) & (local < self.weight.shape[0])
        embedded = F.embedding(_places(words, local, is_local, _in(words, self._words)), self.weight)
        return sum_over_ranks(embedded * is_local.unsqueeze(-1).to(embedded.dtype), self._shard.group)


def _in(words: Tensor, count: int) -> Tensor:
    return (words >= 0) & (words < count)


def _places(words: Tensor, local: Tensor, is_local: Tensor, is_valid: Tensor) -> Tensor:
    """The rows of a rank's part: the first one for a word of another rank, none for what is no word, as in eager."""
    return torch.where(is_local, local, torch.where(is_valid, 0, words))


class VocabularyCrossEntropy(nn.Module):
    """The mean cross entropy of logits that are sharded by vocabulary. Replaces `nn.CrossEntropyLoss`.

    Attributes:
        words: the size of the vocabulary; `shard` sets it from the plan's output layer.
    """

    def __init__(self, layer: nn.CrossEntropyLoss, shard: Shard) -> None:
        super().__init__()
        if layer.weight is not None or layer.label_smoothing or layer.reduction != "mean":
            raise UnsupportedError(
                "the loss has weights, label smoothing or a reduction other than 'mean', but tensor_plan supports "
                "only the plain mean. Remove the loss and the output layer from tensor_plan."
            )
        self._shard = shard
        self._ignored = layer.ignore_index
        self.words: int | None = None

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss, float32[] for 16-bit logits, otherwise of their dtype.

        Args:
            logits: float[rows, words of this rank].
            targets: int64[rows].
        """
        assert self.words is not None
        # In float32 under autocast too, as torch's operator.
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        group, count = self._shard.group, logits.shape[-1]
        largest = largest_over_ranks(logits.detach().amax(-1), group)
        shifted = logits - largest.unsqueeze(-1)
        total = sum_over_ranks(shifted.exp().sum(-1), group)
        local = targets - _first_of(self.words, self._shard)
        is_local = (local >= 0) & (local < count)
        is_valid = _in(targets, self.words) | (targets == self._ignored)
        local_logits = shifted.gather(-1, _places(targets, local, is_local, is_valid).unsqueeze(-1)).squeeze(-1)
        target_logits = sum_over_ranks(local_logits * is_local.to(local_logits.dtype), group)
        weights = (targets != self._ignored).to(local_logits.dtype)
        return ((total.log() - target_logits) * weights).sum() / weights.sum()


def _gpt2_attention(layer: Any, shard: Shard) -> nn.Module:
    """Shards transformers' GPT-2 attention by heads, in place: its linear layers are replaced."""
    _require_divisible("attention heads", layer.num_heads, shard.size)
    layer.c_attn = ColumnLinear(layer.c_attn, shard, 3)
    layer.c_proj = RowLinear(layer.c_proj, shard)
    layer.num_heads //= shard.size
    layer.split_size //= shard.size
    return layer


# The sharding styles of a plan, by name.
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
    """Replaces the layers of a plan by the shards of a rank. Tied parameters stay tied.

    Args:
        module: the complete module, the same on every rank.
        plan: maps patterns of module names (`layers.*.linear1`) to one of `STYLES`.
        part: the rank's shard.

    Raises:
        UnsupportedError: a pattern matches no layer, a style is unknown, or a size is not divisible.
    """
    tied = _tied_names(module)
    words: int | None = None
    for pattern, style in plan.items():
        if style not in STYLES:
            raise UnsupportedError(
                f"tensor_plan has the style {style!r} for {pattern!r}, which is not one of {', '.join(STYLES)}. Use "
                "one of them."
            )
        names = [name for name, _ in module.named_modules() if fnmatchcase(name, pattern)]
        if not names:
            raise UnsupportedError(
                f"tensor_plan has the pattern {pattern!r}, but {type(module).__name__} has no matching layer. Use "
                "names from named_modules(); * matches any part of a name."
            )
        for name in names:
            layer: Any = module.get_submodule(name)
            words = layer.weight.shape[0] if style == "output" else words
            _require_divisible_layer(name, style, layer, part.size)
            module.set_submodule(name, STYLES[style](layer, part))
    for first, others in tied.items():
        _require_same_cut(module, (first, *others))
        for name in others:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, module.get_parameter(first))
    for layer in module.modules():
        if isinstance(layer, VocabularyCrossEntropy):
            layer.words = words
    _require_pair(plan)


def _require_pair(plan: Mapping[str, str]) -> None:
    """Logits of some words can only be used by a loss that sums over processes."""
    pair = ("output", "cross_entropy")
    own = [style for style in pair if style in plan.values()]
    if len(own) == 1:
        other = next(style for style in pair if style not in own)
        raise UnsupportedError(
            f"tensor_plan has the style {own[0]!r} without {other!r}, so that a loss of all words would get the logits "
            "of some. Name both layers, or neither."
        )


def require_equal_gradients(parameters: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup) -> None:
    """Requires that whole parameters have the same gradients on all ranks, which run the same batch.

    Raises:
        UnsupportedError: they differ: a parameter is used where each rank has its own values, as between a layer that
            is sharded by columns and one by rows.
    """
    whole = [(name, p.grad) for name, p in parameters if p.grad is not None and cut_of(p) is None]
    if not whole:
        return
    norms = torch.stack([gradient.norm().double() for _, gradient in whole])
    bounds = torch.cat([norms, -norms])
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    largest, smallest = bounds[: len(norms)], -bounds[len(norms) :]
    wrong = (largest - smallest > _DIFFERENT * largest).nonzero().flatten().tolist()
    if wrong:
        raise UnsupportedError(
            f"{whole[wrong[0]][0]} has another gradient on each process: it is used between layers that tensor_plan "
            "shards, where each process has its own values. Remove the layers around it from tensor_plan."
        )


def _tied_names(module: nn.Module) -> dict[str, list[str]]:
    """For each tied parameter, its further names by its first name."""
    first_names: dict[nn.Parameter, str] = {}
    further_names: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in first_names:
            further_names.setdefault(first_names[parameter], []).append(name)
        else:
            first_names[parameter] = name
    return further_names


def _require_same_cut(module: nn.Module, names: Sequence[str]) -> None:
    cuts = {name: cut_of(module.get_parameter(name)) for name in names}
    if len(set(cuts.values())) > 1:
        whole = [name for name, cut in cuts.items() if cut is None]
        raise UnsupportedError(
            f"{' and '.join(names)} are one parameter, but tensor_plan "
            + (f"leaves {whole[0]} whole" if whole else "shards them along different dimensions")
            + ". Name the layers of a tied parameter with styles that shard it alike, or none of them."
        )


def _require_divisible_layer(name: str, style: str, layer: Any, size: int) -> None:
    if style in ("column", "row"):
        weight, _ = _weights_of(layer)
        outputs_first = isinstance(layer, nn.Linear)
        dimension = 0 if (style == "column") == outputs_first else 1
        _require_divisible(f"{'outputs' if style == 'column' else 'inputs'} of {name}", weight.shape[dimension], size)


def _require_divisible(what: str, count: int, size: int) -> None:
    if count % size:
        raise UnsupportedError(
            f"{count} {what} don't divide into equal parts for {size} processes. Use a number of processes that "
            "divides them, or change the model's sizes."
        )


def _weights_of(layer: Any) -> tuple[nn.Parameter, nn.Parameter | None]:
    return layer.weight, layer.bias


def _first_of(count: int, shard: Shard) -> int:
    """The first word of a rank; if the count is not divisible, earlier ranks have one more word."""
    # Dynamo can't trace divmod of a symbolic size.
    quotient, remainder = count // shard.size, count % shard.size
    return shard.rank * quotient + min(shard.rank, remainder)


def is_sharded(module: nn.Module) -> bool:
    """Whether some of the module's parameters are sharded."""
    return next(cuts(module), None) is not None


def cuts(module: nn.Module) -> Iterator[tuple[str, Cut]]:
    """The names of the sharded parameters, and how each is sharded."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        cut = cut_of(parameter)
        if cut is not None:
            yield name, cut
