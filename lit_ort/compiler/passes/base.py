"""What a pass is: a name, a rewrite of one model in place, and a report of where it fired and why it declined."""

from __future__ import annotations

import abc

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.rewriter import pattern

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


def shape_of(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape of a value where every dimension is known, else None."""
    if value is None or value.shape is None or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(int(size) for size in value.shape)  # type: ignore[arg-type]
