"""Private interfaces of functorch: the levels of `torch.vmap`, their trace, and scans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue] - not in the stubs
from torch._functorch import predispatch
from torch._higher_order_ops.associative_scan import associative_scan_op, generic_associative_scan

VMAP_START: Callable[..., Any] = predispatch._vmap_increment_nesting
VMAP_END: Callable[..., Any] = predispatch._vmap_decrement_nesting
# Loads functorch's decompositions once.
LOAD_RULES: Callable[..., Any] = predispatch.lazy_load_decompositions
VMAP_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    {VMAP_START, VMAP_END, predispatch._add_batch_dim, predispatch._remove_batch_dim, LOAD_RULES}
)
ASSOCIATIVE_SCAN: Any = associative_scan_op


def associative_scan_by_slices(combine: Callable[..., Any], values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Scans along the first dimension, by O(log n) calls of `combine` on slices.

    Source: Blelloch 1990, Prefix Sums and Their Applications.
    """
    return generic_associative_scan(combine, values, additional_inputs=others)


def is_differentiating() -> bool:
    """Whether a transform of `torch.func` that differentiates is in progress."""
    levels: Any = _functorch
    kinds = (levels.TransformType.Grad, levels.TransformType.Jvp)
    return any(level.key() in kinds for level in levels.get_interpreter_stack() or ())


def operators_of(graph_module: fx.GraphModule, examples: Sequence[Any]) -> fx.GraphModule:
    """Trace a graph with vmap levels to batched operators. The examples can be fake tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx

    LOAD_RULES()
    return make_fx(fx.Interpreter(graph_module).run, tracing_mode="real")(*examples)
