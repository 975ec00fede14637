"""Leaves out gradients that nothing reads.

In:  operators that compute several gradients, of which some are unused
Out: the same, told which are wanted
Saves the time of the others, such as the weight's gradient of a frozen output layer, or all of them in evaluation.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

import lit_ort.ops  # noqa: F401 - registers the operators that the table names

# For each operator the position of the list that tells which gradients are wanted, and the result of the first of them.
_WANTED = {torch.ops.lit_ort.linear_cross_entropy.default: (8, 1)}


def trim_unused_gradients(module: fx.GraphModule) -> int:
    """Rewrites a graph in place; returns how many gradients are left out."""
    module.graph.eliminate_dead_code()
    fired = 0
    for node in module.graph.nodes:
        place = _WANTED.get(node.target)
        if place is None:
            continue
        position, first = place
        used = {user.args[1] for user in node.users if user.target is operator.getitem}
        wanted = list(node.args[position])
        trimmed = [flag and first + k in used for k, flag in enumerate(wanted)]
        if trimmed != wanted:
            node.args = (*node.args[:position], trimmed, *node.args[position + 1 :])
            fired += sum(wanted) - sum(trimmed)
    return fired
