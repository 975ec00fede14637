"""Collectives as torch operators, so that they don't cause graph breaks.

All ranks run the same graph, so that they call the collectives in the same order.

Source: Shoeybi et al., Megatron-LM, 2019 (arXiv:1909.08053), whose f is `same_on_ranks` and whose g `sum_over_ranks`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lit_ort._compat.torch_distributed import group_named


def _reduced(x: Tensor, group: str, operation: Any) -> Tensor:
    result = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, operation, group=group_named(group))
    return result


@torch.library.custom_op("lit_ort::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: Tensor, group: str) -> Tensor:
    """The sum of the ranks' parts of a value; the gradient of each part is the gradient of the sum.

    group: the name of a process group.
    """
    return _reduced(x, group, dist.ReduceOp.SUM)


@torch.library.custom_op("lit_ort::same_on_ranks", mutates_args=())
def same_on_ranks(x: Tensor, group: str) -> Tensor:
    """A value that is equal on all ranks; its gradient is the sum of the ranks' gradients."""
    return x.clone()


@torch.library.custom_op("lit_ort::largest_over_ranks", mutates_args=())
def largest_over_ranks(x: Tensor, group: str) -> Tensor:
    """The elementwise maximum over the ranks; has no gradient."""
    return _reduced(x, group, dist.ReduceOp.MAX)


def _like(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


for operator in (sum_over_ranks, same_on_ranks, largest_over_ranks):
    operator.register_fake(_like)
sum_over_ranks.register_autograd(lambda ctx, gradient: (gradient, None))
same_on_ranks.register_autograd(
    lambda ctx, gradient: (sum_over_ranks(gradient, ctx.group), None), setup_context=_save_group
)
