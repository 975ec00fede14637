"""Normalisations with running statistics, as an exported program can follow them.

torch's own change the statistics unseen, and any decomposition takes them apart into operators without a gradient here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from lit_ort.compiler.torch_calls import as_call

Statistics = torch.Tensor | None
aten = torch.ops.aten


def settle_statistics(graph: fx.Graph, differentiable: bool) -> None:
    """Writes batch and instance normalisations so that their statistics change in plain sight.

    Args:
        differentiable: whether the graph has gradients; without them, fixed statistics are left to ONNX Runtime.
    """
    replacements: dict[Any, Callable[..., torch.Tensor]] = {
        functional.batch_norm: batch_norm,
        functional.instance_norm: instance_norm,
    }
    for node in graph.nodes:
        made = replacements.get(node.target) if node.op == "call_function" else None
        if made is not None and (differentiable or _uses_the_batch(node)):
            node.target = made


def batch_norm(
    input: torch.Tensor,
    running_mean: Statistics,
    running_var: Statistics,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`torch.nn.functional.batch_norm` as a call of torch's own operator.

    Args:
        input: float[batch, channels, ...]. running_mean, running_var, weight, bias: float[channels].

    Source: Ioffe and Szegedy 2015; torch's running variance is unbiased, that of the normalisation is not.
    """
    if training and running_mean is not None and running_var is not None:
        variance, mean = torch.var_mean(input, [0, *range(2, input.dim())])
        _move(running_mean, mean, momentum)
        _move(running_var, variance, momentum)
        running_mean = running_var = None
    call = as_call(aten.batch_norm.default)
    return call(input, weight, bias, running_mean, running_var, training, momentum, eps, False)


def instance_norm(
    input: torch.Tensor,
    running_mean: Statistics = None,
    running_var: Statistics = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """The same for `torch.nn.functional.instance_norm`; the statistics are means over the batch.

    Source: Ulyanov et al. 2016.
    """
    if use_input_stats and running_mean is not None and running_var is not None:
        variance, mean = torch.var_mean(input, list(range(2, input.dim())))
        _move(running_mean, mean.mean(0), momentum)
        _move(running_var, variance.mean(0), momentum)
        running_mean = running_var = None
    call = as_call(aten.instance_norm.default)
    return call(input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, False)


def _move(statistic: torch.Tensor, towards: torch.Tensor, momentum: float) -> None:
    statistic.mul_(1 - momentum).add_(towards, alpha=momentum)


def _uses_the_batch(node: fx.Node) -> bool:
    return bool(node.args[5] if len(node.args) > 5 else node.kwargs.get("training", node.kwargs.get("use_input_stats")))
