"""AdaSum: gradients of several ranks combined by how far they agree, as a hook of DistributedDataParallel's.

Two gradients a and b become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b: their sum where they are orthogonal, their
mean where they are parallel. Ranks are combined in pairs of pairs, each tensor by itself.

Source: Maleki et al., Scaling Distributed Training with Adaptive Summation, 2020 (arXiv:2006.02924), its algorithm 1:
vectors are halved with each partner and put together again on the way back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lit_ort.errors import UnsupportedError


class AdaSum:
    """State of the hook: the groups of ranks that are combined, smallest first.

    Every rank of the default process group creates it, together.

    Raises:
        UnsupportedError: the number of ranks is no power of two.
    """

    def __init__(self) -> None:
        ranks = dist.get_world_size()
        require_power_of_two(ranks)
        self._groups = [_blocks(2**level, ranks) for level in range(1, ranks.bit_length())]

    def combine(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replaces each tensor by the sum over the ranks, in place. Every rank gives tensors of the same sizes."""
        sizes = [tensor.numel() for tensor in tensors]
        flat = self._combined(torch.cat([tensor.reshape(-1) for tensor in tensors]), sizes, 0)
        for tensor, part in zip(tensors, flat.split(sizes), strict=True):
            tensor.copy_(part.view_as(tensor))

    def _combined(self, mine: torch.Tensor, sizes: list[int], level: int) -> torch.Tensor:
        """The sum over the ranks of a block, from the sums over its two halves.

        Args:
            mine: a part of the sum over the half that this rank is in, float[n]; is overwritten.
            sizes: how many of its elements belong to each tensor.
            level: of the halving.
        """
        if level == len(self._groups):
            return mine
        partner = dist.get_rank() ^ 2**level
        is_first = dist.get_rank() < partner
        middle = mine.numel() // 2
        halves, sizes_of_halves = (mine[:middle], mine[middle:]), _halved(sizes, middle)
        kept, sent = halves if is_first else halves[::-1]
        sizes = sizes_of_halves[0 if is_first else 1]
        theirs = _exchange(sent, torch.empty_like(kept), partner)
        _add_up(kept, theirs, sizes, is_first, self._groups[level])
        part = self._combined(kept, sizes, level + 1)
        other = _exchange(part, torch.empty_like(sent), partner)
        return torch.cat([part, other] if is_first else [other, part])


# DistributedDataParallel compares a hook's annotations with classes, which those of this file are not yet.
def adasum_hook(state: AdaSum, bucket):
    """Combines the gradients of a bucket; results don't depend on how tensors are put into buckets."""
    state.combine(bucket.gradients())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def require_power_of_two(ranks: int) -> None:
    """Raises UnsupportedError where AdaSum can't pair the ranks."""
    if ranks & (ranks - 1):
        raise UnsupportedError(
            f"adasum=True combines ranks in pairs of pairs, and {ranks} is no power of two. Train with "
            f"{2 ** (ranks.bit_length() - 1)} or {2 ** ranks.bit_length()} ranks, or with adasum=False."
        )


def _blocks(size: int, ranks: int) -> dist.ProcessGroup:
    """The group of this rank among blocks of so many neighbours; every rank takes part in making all of them."""
    blocks = [list(range(start, start + size)) for start in range(0, ranks, size)]
    mine, _ = dist.new_subgroups_by_enumeration(blocks)
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def _exchange(sent: torch.Tensor, received: torch.Tensor, partner: int) -> torch.Tensor:
    works = [dist.isend(sent.contiguous(), partner), dist.irecv(received, partner)]
    for work in works:
        assert work is not None
        work.wait()
    return received


def _halved(sizes: Sequence[int], middle: int) -> tuple[list[int], list[int]]:
    """How many elements of each tensor lie before a place and behind it."""
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    before = [min(size, max(0, middle - (end - size))) for size, end in zip(sizes, ends, strict=True)]
    return before, [size - first for size, first in zip(sizes, before, strict=True)]


def _add_up(
    kept: torch.Tensor, theirs: torch.Tensor, sizes: list[int], is_first: bool, group: dist.ProcessGroup
) -> None:
    """Adds to a part what the partner has of it, each tensor scaled, in place.

    The dot products are in float64, over all ranks of the block; a is of its first half, whichever rank asks.
    """
    pairs = list(zip(kept.split(sizes), theirs.split(sizes), strict=True))
    products = torch.tensor([_products(*(pair if is_first else pair[::-1])) for pair in pairs], dtype=torch.float64)
    dist.all_reduce(products, group=group)
    for (own, other), (dot, of_a, of_b) in zip(pairs, products.tolist(), strict=True):
        a, b = 1 - _share(dot, of_a), 1 - _share(dot, of_b)
        own.mul_(a if is_first else b).add_(other, alpha=b if is_first else a)


def _products(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float, float]:
    a, b = a.double(), b.double()
    return float(a @ b), float(a @ a), float(b @ b)


def _share(dot: float, square: float) -> float:
    """Half of the dot product's share of a squared norm; a gradient of zeros leaves the other as it is."""
    return dot / (2 * square) if square > 0 else 0.0
