"""AdaSum: combines gradients of several ranks depending on their agreement, as a DistributedDataParallel comm hook.

Two gradients a and b become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b: their sum if they are orthogonal, their mean
if they are parallel. Ranks are combined recursively in pairs, and each tensor is combined separately.

Source: Maleki et al., Scaling Distributed Training with Adaptive Summation, 2020 (arXiv:2006.02924), algorithm 1:
vectors are halved with each partner, and the halves are concatenated on the way back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lit_ort.errors import UnsupportedError


class AdaSum:
    """The state of the hook: the groups of ranks that are combined, smallest first.

    All ranks of the default process group must create it at the same time.

    Raises:
        UnsupportedError: the number of ranks is not a power of two.
    """

    def __init__(self) -> None:
        ranks = dist.get_world_size()
        require_power_of_two(ranks)
        self._groups = [_blocks(2**level, ranks) for level in range(1, ranks.bit_length())]

    def combine(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replaces each tensor by the AdaSum over the ranks, in place. All ranks must pass tensors of equal shapes."""
        sizes = [tensor.numel() for tensor in tensors]
        flat = self._combined(torch.cat([tensor.reshape(-1) for tensor in tensors]), sizes, 0)
        for tensor, part in zip(tensors, flat.split(sizes), strict=True):
            tensor.copy_(part.view_as(tensor))

    def _combined(self, mine: torch.Tensor, sizes: list[int], level: int) -> torch.Tensor:
        """The AdaSum over the ranks of a block, from those over its two halves.

        Args:
            mine: a part of the AdaSum over this rank's half of the block, float[n]; is overwritten.
            sizes: the number of elements of `mine` that belong to each tensor.
            level: the level of the recursion.
        """
        if level == len(self._groups):
            return mine
        partner = dist.get_rank() ^ 2**level
        is_first = dist.get_rank() < partner
        middle = mine.numel() // 2
        halves, sizes_of_halves = (mine[:middle], mine[middle:]), _halved(sizes, middle)
        own_half, other_half = halves if is_first else halves[::-1]
        sizes = sizes_of_halves[0 if is_first else 1]
        theirs = _exchange(other_half, torch.empty_like(own_half), partner)
        _add_up(own_half, theirs, sizes, is_first, self._groups[level])
        part = self._combined(own_half, sizes, level + 1)
        other = _exchange(part, torch.empty_like(other_half), partner)
        return torch.cat([part, other] if is_first else [other, part])


# Without annotations: DistributedDataParallel compares a hook's annotations with classes, but in this file they are
# strings.
def adasum_hook(state: AdaSum, bucket):
    """Combines the gradients of a bucket; results don't depend on the assignment of tensors to buckets."""
    state.combine(bucket.gradients())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def require_power_of_two(ranks: int) -> None:
    """Raises UnsupportedError for a number of ranks that AdaSum can't pair."""
    if ranks & (ranks - 1):
        raise UnsupportedError(
            f"adasum=True combines ranks in pairs, but {ranks} is not a power of two. Train with "
            f"{2 ** (ranks.bit_length() - 1)} or {2 ** ranks.bit_length()} ranks, or with adasum=False."
        )


def _blocks(size: int, ranks: int) -> dist.ProcessGroup:
    """The process group of this rank's block of `size` neighboring ranks; all ranks create all groups together."""
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
    """For each tensor, the number of elements before and after the position `middle`."""
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    before = [min(size, max(0, middle - (end - size))) for size, end in zip(sizes, ends, strict=True)]
    return before, [size - first for size, first in zip(sizes, before, strict=True)]


def _add_up(
    mine: torch.Tensor, theirs: torch.Tensor, sizes: list[int], is_first: bool, group: dist.ProcessGroup
) -> None:
    """Combines a part of the gradients with the partner's, in place; each tensor is scaled separately.

    The dot products are computed in float64, over all ranks of the block; a is the gradient of the block's first half
    on every rank.
    """
    pairs = list(zip(mine.split(sizes), theirs.split(sizes), strict=True))
    products = torch.tensor([_products(*(pair if is_first else pair[::-1])) for pair in pairs], dtype=torch.float64)
    dist.all_reduce(products, group=group)
    for (own, other), (dot, square_a, square_b) in zip(pairs, products.tolist(), strict=True):
        a, b = 1 - _share(dot, square_a), 1 - _share(dot, square_b)
        own.mul_(a if is_first else b).add_(other, alpha=b if is_first else a)


def _products(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float, float]:
    a, b = a.double(), b.double()
    return float(a @ b), float(a @ a), float(b @ b)


def _share(dot: float, square: float) -> float:
    """Half of the quotient of dot product and squared norm; zero for a gradient of zeros, so that the sum is the other
    gradient.
    """
    return dot / (2 * square) if square > 0 else 0.0
