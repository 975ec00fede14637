"""A training step by hand: what `strategy="ort"` does with a step, one stage after the other, each printed.

    python examples/a_step_by_hand.py

docs/architecture.md describes the stages; `lit_ort/backend/build.py` runs them for any step, with numbers, several
graphs, mutated inputs and changing sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx.printer
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from lit_ort.capture.capture import capture
from lit_ort.capture.numbers import separate_numbers
from lit_ort.fusions import fusion_pipeline
from lit_ort.fusions.fusion_graph import FusionGraph
from lit_ort.joint.outputs import normalize_outputs
from lit_ort.joint.phases import one_phase
from lit_ort.joint.trace import trace
from lit_ort.lower.lower import lower
from lit_ort.ops.region_operator import REGION
from lit_ort.passes import pass_pipeline
from lit_ort.regions.placed_region import from_json
from lit_ort.runtime.engines.choice import engine_of
from lit_ort.runtime.session import RunInputs, Session, SessionOptions

CPU = torch.device("cpu")


def step(x: Tensor, target: Tensor, weight: Tensor, bias: Tensor, head: Tensor) -> Tensor:
    """Two layers and a loss."""
    return F.mse_loss(F.gelu(F.linear(x, weight, bias)) @ head, target)


def dynamos_graph(function: Callable[..., Tensor], arguments: Sequence[Tensor]) -> tuple[fx.GraphModule, list[Tensor]]:
    """What Dynamo hands to a backend: the Python code as a graph of torch functions, and its inputs."""
    found: list[tuple[fx.GraphModule, list[Tensor]]] = []

    def keep(graph_module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        found.append((graph_module, inputs))
        return graph_module.forward

    torch.compile(function, backend=keep)(*arguments)
    return found[0]


def line_of(node: fx.Node) -> str:
    """A node as one line, a region without its data."""
    if node.target is not REGION:
        return str(node.format_node())
    return f"{node.name} = region({node.args[0]}): {from_json(str(node.args[1])).region.summary}"


def show(title: str, text: object) -> None:
    print(f"\n{title}\n{'-' * len(title)}\n{text}")


def main() -> None:
    torch.manual_seed(0)
    shapes = ((16, 32), (16, 8), (64, 32), (64,), (64, 8))
    arguments = [torch.randn(shape) for shape in shapes]
    weights = [argument.requires_grad_() for argument in arguments[2:]]
    graph_module, inputs = dynamos_graph(step, arguments)
    show("1. Dynamo's graph", graph_module.graph)

    captured = capture(separate_numbers(graph_module), inputs, (), any_sizes=False)
    show("2. Captured: torch functions are ATen operators", captured.module.graph)

    fused = FusionGraph(captured)
    for report in fusion_pipeline.apply(fused, disabled=()):
        print(f"fusion {report.name}: {report.fired}")
    show("3. Fused: patterns are single operators", fused.module.graph)

    joint = trace(fused.module, fused.examples)
    returned = normalize_outputs(joint, fused.examples.tensors, [torch.empty(())], {})
    show("4. Joint: AOTAutograd adds the backward", returned.joint.module.graph)

    phase = one_phase(returned.joint, loss=0, budget=None, recomputes=False)
    for report in pass_pipeline.apply(phase.module, (), CPU):
        print(f"pass {report.name}: {report.fired}")
    show("5. Optimized: what is between the matmuls is in regions", "\n".join(map(line_of, phase.module.graph.nodes)))
    last = [node for node in phase.module.graph.nodes if node.target is REGION][-1]
    region = from_json(str(last.args[1])).region
    show(f"6. {last.name}: what is computed for each element of one iteration space", "\n".join(map(str, region.nodes)))

    engine = engine_of("auto")
    lowered = lower(phase, {}, "step", engine.keeps_order, CPU, engine.native)
    show("7. Lowered: an ONNX model", onnx.printer.to_text(lowered.model))

    session = Session(lowered.phase, SessionOptions(engine, threads=torch.get_num_threads()))
    with torch.no_grad():
        loss, *gradients = session.run(RunInputs(inputs, [tensor.shape for tensor in inputs]))
    expected = step(*arguments)
    show("8. Run in one session", f"loss {loss.item():.6f}, in eager {expected.item():.6f}")
    for gradient, in_eager in zip(gradients, torch.autograd.grad(expected, weights), strict=True):
        print(f"relative error of a gradient: {((gradient - in_eager).norm() / in_eager.norm()).item():.1e}")


if __name__ == "__main__":
    main()
