"""Omits the computation of unused gradients.

In:  operators that compute several gradients, some of which are unused
Out: the same operators, with flags for the gradients that are used
Saves the time of the other gradients: the weight's gradient for a frozen output layer, or all of them in evaluation.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

import lit_ort.ops  # noqa: F401 - registers the operators that the table names

# For each operator, the position of the argument with the flags, and the position of the first gradient in the results.
_FLAGS = {torch.ops.lit_ort.linear_cross_entropy.default: (8, 1)}


def trim_unused_gradients(module: fx.GraphModule) -> int:
    """Updates the flags of operators in a graph, in place. Returns the number of gradients that are omitted."""
    module.graph.eliminate_dead_code()
    fired = 0
    for node in module.graph.nodes:
        positions = _FLAGS.get(node.target)
        if positions is None:
            continue
        position, first = positions
        used = {user.args[1] for user in node.users if user.target is operator.getitem}
        flags = list(node.args[position])
        trimmed = [flag and first + k in used for k, flag in enumerate(flags)]
        if trimmed != flags:
            node.args = (*node.args[:position], trimmed, *node.args[position + 1 :])
            fired += sum(flags) - sum(trimmed)
    return fired
