"""Makes Dynamo trace `x.requires_grad = True` for a value that the graph computes, without a graph break.

Speech models of transformers do this for gradient checkpointing. It changes nothing for other values, unless the
gradient of x itself is read behind the graph: a graph that returns x, or a view of it, ends at the assignment, as with
Dynamo alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.exc import RequiresGradRestartAnalysis
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._dynamo.variables.builtin import SetAttrBuiltinVariable

from lit_ort._compat.deferred_calls import realized, replace_method

# The attribute of a trace: the nodes of such values.
_LEAVES = "_lit_ort_leaves"


def keep_leaves(is_enabled: Callable[[], bool]) -> None:
    """Puts the hooks into Dynamo, for the rest of the process.

    Args:
        is_enabled: whether the trace at hand has such values.
    """
    replace_method(SetAttrBuiltinVariable, "_call_setattr", functools.partial(_call, is_enabled))
    replace_method(OutputGraph, "_check_requires_grad_intermediate_outputs", _check)


def _call(is_enabled: Callable[[], bool], original: Any, builtin: Any, tx: Any, obj: Any, name: Any, value: Any) -> Any:
    variable = realized(obj)
    if not (is_enabled() and _is_leaf(tx, variable, name, value)):
        return original(builtin, tx, obj, name, value)
    tx.output.__dict__.setdefault(_LEAVES, []).append(variable.as_proxy().node)
    variable.requires_grad = True
    return ConstantVariable.create(None)


def _is_leaf(tx: Any, variable: Any, name: Any, value: Any) -> bool:
    if type(variable) is not TensorVariable or variable.source is not None or variable.requires_grad:
        return False
    constants = [one.as_python_constant() for one in (name, value) if one.is_python_constant()]
    is_nested = tx.output.current_tracer.parent is not None
    return constants == ["requires_grad", True] and not (is_nested or tx.speculation_log.graph_break_on_requires_grad_)


def _check(original: Any, output: Any, results: Any, tx: Any) -> Any:
    leaves = output.__dict__.get(_LEAVES, ())
    derived = set(leaves)
    for node in output.graph.nodes if leaves else ():
        if not derived.isdisjoint(node.all_input_nodes):
            derived.add(node)
    for variable in results:
        if isinstance(variable, TensorVariable):
            node = variable.as_proxy().node
            # Others require a gradient anyway.
            if node in leaves or (node in derived and _would_require_grad(node.meta["example_value"])):
                tx.speculation_log.graph_break_on_requires_grad_ = True
                raise RequiresGradRestartAnalysis(restart_reason="a value that requires a gradient leaves the graph")
    return original(output, results, tx)


def _would_require_grad(example: torch.Tensor) -> bool:
    """Whether only the leaf makes a value require a gradient; detached ones are taken for such too."""
    return (example.is_floating_point() or example.is_complex()) and not example.requires_grad
