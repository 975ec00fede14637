"""Inlines vectorized functions, as `torch.vmap` and `associative_scan` call them, as batched operators.

In:  nodes that add a batch dimension to some values, operators on unbatched values, nodes that remove the dimension
Out: the batched operators, by functorch's batching rules
Saves the fusions of the graph: a graph with functorch's levels can't be fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lit_ort._compat.devices import device_of
from lit_ort._compat.torch import enter_autocast, exit_autocast, set_grad_enabled
from lit_ort._compat.torch_functorch import LOAD_RULES, VMAP_END, VMAP_FUNCTIONS, VMAP_START, operators_of
from lit_ort._compat.torch_fx import copy_nodes, graph_module_of, inputs_of
from lit_ort._compat.torch_ops import of_functorch
from lit_ort.capture.examples import Examples

# Mode changes that are lost when a region is traced to operators.
_MODES = frozenset({set_grad_enabled, enter_autocast, exit_autocast})


def inline_vmaps(module: fx.GraphModule, examples: Examples) -> None:
    """Rewrites a graph of torch functions in place, unless one of its regions changes grad mode or autocast.

    Args:
        module: the graph.
        examples: the fake tensors of its inputs.
    """
    regions = _regions(module.graph)
    if not regions or not all(map(_may_inline, regions)):
        return
    for node in [node for node in module.graph.nodes if node.target is LOAD_RULES]:
        module.graph.erase_node(node)
    regions = _regions(module.graph)
    with examples.mode:
        run = _Values(module, device_of(examples.tensors).type)
        values = run.of(examples.tensors)
        for region in regions:
            with run.autocast[region[0]]:
                _inline(module, region, values)
    module.recompile()


def _regions(graph: fx.Graph) -> list[list[fx.Node]]:
    """The nodes of each outermost level, from its first node to its last."""
    regions: list[list[fx.Node]] = []
    depth = 0
    for node in graph.nodes:
        if node.target is VMAP_START:
            if depth == 0:
                regions.append([])
            depth += 1
        if depth:
            regions[-1].append(node)
        if node.target is VMAP_END:
            depth -= 1
    return regions


def _may_inline(region: Sequence[fx.Node]) -> bool:
    """Whether a region consists of calls that neither change modes nor use functorch except for vmap."""
    calls = [node.target for node in region if node.op == "call_function"]
    only_calls = all(node.op in ("call_function", "call_method") for node in region)
    return only_calls and not any(c in _MODES or (of_functorch(c) and c not in VMAP_FUNCTIONS) for c in calls)


class _Values(fx.Interpreter):
    """Runs a graph and records the value of every node.

    Args:
        module: the graph.
        device: of its inputs.

    Attributes:
        autocast: the state of autocast at the first nodes of regions.
    """

    def __init__(self, module: fx.GraphModule, device: str) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._values: dict[fx.Node, Any] = {}
        self._depth, self._device = 0, device
        self.autocast: dict[fx.Node, torch.autocast] = {}

    def of(self, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
        """The values for these inputs. If an error occurs, open levels are closed."""
        try:
            self.run(*inputs)
        finally:
            for _ in range(self._depth):
                VMAP_END()
        return self._values

    def run_node(self, n: fx.Node) -> Any:
        if n.target is VMAP_START:
            dtype, is_enabled = torch.get_autocast_dtype(self._device), torch.is_autocast_enabled(self._device)
            self.autocast[n] = torch.autocast(self._device, dtype, is_enabled)
        self._values[n] = super().run_node(n)
        self._depth += (n.target is VMAP_START) - (n.target is VMAP_END)
        return self._values[n]


def _inline(module: fx.GraphModule, region: Sequence[fx.Node], values: dict[fx.Node, Any]) -> None:
    inside = set(region)
    arguments = list(dict.fromkeys(a for node in region for a in node.all_input_nodes if a not in inside))
    outputs = [node for node in region if any(user not in inside for user in node.users)]
    subgraph = fx.Graph()
    copies = {node: subgraph.placeholder(node.name) for node in arguments}
    for node in region:
        copies[node] = subgraph.node_copy(node, copies.__getitem__)
    subgraph.output(tuple(copies[node] for node in outputs))
    traced = operators_of(graph_module_of(module, subgraph), [values[node] for node in arguments])
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            name = f"{region[0].name}_{node.target}"
            setattr(module, name, getattr(traced, str(node.target)))
            node.target = name
    placeholders: dict[fx.Node, fx.Node] = dict(zip(inputs_of(traced.graph), arguments, strict=True))
    with module.graph.inserting_before(region[0]):
        results = copy_nodes(traced.graph, module.graph, placeholders)
    for node, result in zip(outputs, results, strict=True):
        node.replace_all_uses_with(result)
        # A later region can use it.
        values[result] = values[node]
    for node in reversed(region):
        module.graph.erase_node(node)
