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

    Made by every rank of the default process group together.

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
        owners = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        flat = self._combined(flat, owners, 0, len(sizes))
        for tensor, part in zip(tensors, flat.split(sizes), strict=True):
            tensor.copy_(part.view_as(tensor))

    def _combined(self, mine: torch.Tensor, owners: torch.Tensor, level: int, count: int) -> torch.Tensor:
        """The sum over the ranks of a block, from the sums over its two halves.

        Args:
            mine: a part of the sum over the half that this rank is in, float[n].
            owners: which tensor each element belongs to, int64[n].
            level: of the halving.
            count: of tensors.
        """
        if level == len(self._groups):
            return mine
        distance = 2**level
        partner = dist.get_rank() ^ distance
        middle = mine.numel() // 2
        first = dist.get_rank() < partner
        kept, sent = (slice(middle), slice(middle, None)) if first else (slice(middle, None), slice(middle))
        theirs = _exchange(mine[sent], torch.empty_like(mine[kept]), partner)
        a, b = (mine[kept], theirs) if first else (theirs, mine[kept])
        scales = _scales(a, b, owners[kept], count, self._groups[level])
        part = a * scales[0][owners[kept]] + b * scales[1][owners[kept]]
        part = self._combined(part.to(mine.dtype), owners[kept], level + 1, count)
        other = _exchange(part, torch.empty_like(mine[sent]), partner)
        return torch.cat([part, other] if first else [other, part])


# DistributedDataParallel compares a hook's annotations with classes, which those of this file are not yet.
def adasum_hook(state: AdaSum, bucket):  # type: ignore[no-untyped-def]
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


def _scales(
    a: torch.Tensor, b: torch.Tensor, owners: torch.Tensor, count: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a and b are multiplied with, by tensor, from dot products in float64 over all ranks of the block."""
    a, b = a.double(), b.double()
    products = torch.zeros(3, count, dtype=torch.float64)
    for row, product in zip(products, (a * b, a * a, b * b), strict=True):
        row.index_add_(0, owners, product)
    dist.all_reduce(products, group=group)
    dot, of_a, of_b = products
    return 1 - _share(dot, of_a), 1 - _share(dot, of_b)


def _share(dot: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    """Half of the dot product's share of a squared norm; a gradient of zeros leaves the other as it is."""
    return torch.where(square > 0, dot / (2 * square), torch.zeros_like(dot))
