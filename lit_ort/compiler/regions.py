"""Regions of a graph: parts whose values the backward may compute again instead of keeping them.

A region is a checkpoint of the module's own, or a layer: one of several modules in a list, such as `encoder.layers.3`.
"""

from __future__ import annotations

import json
import re

import onnx_ir as ir

from lit_ort.compiler import marks
from lit_ort.compiler.convert import module_of
from lit_ort.compiler.marks import PREFIX

# The mark of a node, and what a training model says of itself: the names of the forward's results.
REGION, RESULTS = PREFIX + marks.REGION, PREFIX + "results"
_IN_A_LIST = re.compile(r"(?P<layer>.*?\.\d+)(?:\.|$)")


def mark_layers(model: ir.Model) -> int:
    """Makes each layer a region, outside of checkpoints; returns the number of layers."""
    layers = set()
    for node in model.graph:
        found = _IN_A_LIST.match(module_of(node) or "")
        if found:
            layers.add(node.metadata_props.setdefault(REGION, found["layer"]))
    return len(layers)


def close_regions(model: ir.Model) -> None:
    """Takes into a region what only it reads and of which nobody knows where it came from."""
    for node in reversed(model.graph):
        if not node.metadata_props:
            regions = {use.node.metadata_props.get(REGION) for value in node.outputs for use in value.uses()}
            region = regions.pop() if len(regions) == 1 else None
            if region is not None and not any(value.is_graph_output() for value in node.outputs):
                node.metadata_props[REGION] = region


def copy_regions(forward: ir.Model, training: ir.Model) -> None:
    """Marks the nodes of a training model, which has lost what was said of those of its forward."""
    regions = {node.name: node.metadata_props[REGION] for node in forward.graph if REGION in node.metadata_props}
    for node in training.graph:
        if node.name in regions:
            node.metadata_props[REGION] = regions[node.name]
    training.metadata_props[RESULTS] = json.dumps([value.name for value in forward.graph.outputs])


def forward_nodes(training: ir.Model) -> set[ir.Node]:
    """The nodes that the results of a training model depend on."""
    results = set(json.loads(training.metadata_props.get(RESULTS, "[]")))
    needed: set[ir.Value] = {value for node in training.graph for value in node.outputs if value.name in results}
    found = set()
    for node in reversed(training.graph):
        if any(value in needed for value in node.outputs):
            found.add(node)
            needed.update(value for value in node.inputs if value is not None)
    return found
