"""What a pass is: a name, a rewrite of one model in place, and a report of where it fired and why it declined."""

from __future__ import annotations

import abc

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.rewriter import pattern

from lit_ort.compiler.marks import copy_marks
from lit_ort.inspect import PassReport

MICROSOFT = "com.microsoft"


class GraphPass(abc.ABC):
    """One transformation. Instances hold no state of a run, so one instance serves every model and thread."""

    name: str
    # A required pass makes a graph valid rather than fast, and can't be disabled.
    required: bool = False

    @abc.abstractmethod
    def apply(self, model: ir.Model) -> PassReport:
        """Rewrites `model` in place."""


class NodePass(GraphPass):
    """A pass that replaces one node at a time."""

    def apply(self, model: ir.Model) -> PassReport:
        fired, declined = 0, []
        for node in list(model.graph):
            if not self.concerns(model, node):
                continue
            reason = self.unproven(node)
            if reason is None:
                self.replace(model.graph, node)
                fired += 1
            else:
                declined.append(f"{node.name}: {reason}")
        return PassReport(self.name, fired, tuple(declined))

    @abc.abstractmethod
    def concerns(self, model: ir.Model, node: ir.Node) -> bool:
        """Whether a node has the shape that the pass is for."""

    @abc.abstractmethod
    def unproven(self, node: ir.Node) -> str | None:
        """Why such a node stays, or None."""

    @abc.abstractmethod
    def replace(self, graph: ir.Graph, node: ir.Node) -> None:
        """Writes other nodes in its place."""


class RewritePass(GraphPass):
    """A pass made of onnxscript rewrite rules; what a rule's `check` fails on becomes a decline."""

    # Tried one after the other, the longest pattern first.
    rules: tuple[type[pattern.RewriteRuleClassBase], ...]

    def apply(self, model: ir.Model) -> PassReport:
        fired = sum(rule.rule().apply_to_model(model) for rule in self.rules)
        tracer = _DeclineTracer()
        for rule in self.rules:
            rule.rule().apply_to_model(model, tracer=tracer)
        if fired:
            common.RemoveUnusedNodesPass()(model)
            common.ShapeInferencePass()(model)
        return PassReport(self.name, fired, tuple(tracer.declined))


class _DeclineTracer(pattern.MatchingTracer):
    """Collects the reason of every match whose condition failed."""

    def __init__(self) -> None:
        super().__init__()
        self.declined: list[str] = []

    def log(self, rule, container, node, match_result, status) -> None:  # type: ignore[no-untyped-def, override]
        if status == pattern.MatchStatus.CONDITION_FAILED:
            self.declined.append(f"{node.name}: {match_result.reason}")


def put_in_place(graph: ir.Graph, old: ir.Node, new: ir.Node, *before: ir.Node) -> None:
    """Replaces a node by `new`, after what `new` reads; its first outputs are those of `new`."""
    values = old.outputs[: len(new.outputs)]
    nodes = [*before, new]
    copy_marks(old, *nodes)
    ir.convenience.replace_nodes_and_values(graph, old, [old], nodes, values, new.outputs[: len(values)])
