"""How much a phase computes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from lit_ort._compat.torch_ops import OpOverload
from lit_ort._compat.torch_sizes import hint_of
from lit_ort.ops.region_operator import REGION

# Below so many FLOP the threads of a session, which sleep between its runs, are awake too late. Two threads against one
# on an Intel Xeon (family 6, model 207), MLPs with 23 MFLOP 0.63 and 0.50 ms a step, with 67 MFLOP 0.78 and 0.88 ms.
_LEAST_FOR_THREADS = 4e7
# A region takes as long for an element as a matmul for so many FLOP.
_FLOP_OF_ELEMENT = 50


def flop_of(node: fx.Node) -> float:
    """The FLOP of a matmul, a convolution or an attention; 0 for any other operator."""
    if not isinstance(node.target, OpOverload):
        return 0.0
    count = flop_registry.get(node.target.overloadpacket)
    if count is None:
        return 0.0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))
    return float(hint_of(count(*args, **kwargs, out_val=node.meta["val"])) or 0)


def is_for_one_thread(graph: fx.Graph) -> bool:
    """Whether a phase of matmuls and regions takes less time on one thread, at the sizes that it was traced with."""
    regions = (node for node in graph.nodes if node.target is REGION)
    elements = sum(_elements([*node.all_input_nodes, node]) for node in regions)
    return sum(map(flop_of, graph.nodes)) + _FLOP_OF_ELEMENT * elements < _LEAST_FOR_THREADS


def _elements(nodes: Iterable[fx.Node]) -> int:
    """The elements of the largest value."""
    values = (node.meta.get("val") for node in nodes)
    tensors = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return max(hint_of(math.prod(one.shape)) or 0 for one in tensors if isinstance(one, torch.Tensor))
