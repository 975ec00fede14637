"""A joint graph as one phase or two: results and gradients as in eager, saved tensors and recomputation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lit_ort._compat.torch_fx import is_view, returned_by
from lit_ort.capture.inlined_checkpoints import has_checkpoints
from lit_ort.capture.input_sources import SEED, SOURCE
from lit_ort.fusions import fusion_pipeline
from lit_ort.fusions.fusion_graph import FusionGraph
from lit_ort.joint.phases import inputs_of_backward, one_phase, saved_inputs, two_phases
from lit_ort.joint.trace import trace
from lit_ort.lower.planned_memory import peak_bytes
from tests.joint.traced import Function, captured, count, joint_of, run, tensors

aten = torch.ops.aten


def weight() -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(3)).requires_grad_()


def rows() -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(4))


def loss(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return ((w @ x).tanh().square().mean(),)


def hidden(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return ((w * x).exp(),)


def checkpointed(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    inner = checkpoint(lambda w: (w @ x).tanh().sin(), w, use_reentrant=False)
    return (inner.square().mean(),)


def deep(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """Matmuls and pointwise operators; the backward needs the result of each."""
    for _ in range(6):
        x = (w @ x).tanh().sin().exp().sigmoid()
    return (x.square().mean(),)


def test_one_phase_returns_results_and_gradients() -> None:
    w, x = weight(), rows()
    joint = joint_of(loss, w, x)
    phase = one_phase(joint, 0, None, recomputes=False)
    assert joint.gradients == (0,)
    assert phase.results == 1
    assert [n.meta[SOURCE].kind for n in phase.module.graph.nodes if n.op == "placeholder"] == ["tensor", "tensor"]
    value, gradient = run(phase, tensors(w, x))
    torch.testing.assert_close(value, loss(w, x)[0])
    torch.testing.assert_close(gradient, torch.autograd.grad(loss(w, x)[0], w)[0])


def test_only_the_loss_has_a_gradient_in_one_phase() -> None:
    def hidden_and_loss(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        inner = (w * x).tanh()
        return inner, inner.square().mean()

    w, x = weight(), rows()
    _, _, gradient = run(one_phase(joint_of(hidden_and_loss, w, x), 1, None, recomputes=False), tensors(w, x))
    torch.testing.assert_close(gradient, torch.autograd.grad(hidden_and_loss(w, x)[1], w)[0])


def test_one_phase_without_gradients() -> None:
    w, x = weight().detach(), rows()
    joint = joint_of(loss, w, x)
    assert not joint.differentiable
    (value,) = run(one_phase(joint, None, None, recomputes=False), tensors(w, x))
    torch.testing.assert_close(value, loss(w, x)[0])


@pytest.mark.parametrize("budget", [None, 0.0, 1.0])
@pytest.mark.parametrize("function", [loss, hidden, deep])
def test_two_phases_pass_saved_tensors(function: Function, budget: float | None) -> None:
    w, x = weight(), rows()
    joint = joint_of(function, w, x)
    forward, backward = two_phases(joint, budget)
    value, *saved = run(forward, tensors(w, x))
    expected = function(w, x)[0]
    torch.testing.assert_close(value, expected)
    tangent = torch.linspace(0.5, 1.5, expected.numel()).reshape(expected.shape)
    values = {**tensors(w, x), ("tangent", 0): tangent, **{("saved", k): v for k, v in enumerate(saved)}}
    (gradient,) = run(backward, values)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, w, tangent)[0])


def test_inputs_that_the_backward_reads_are_not_saved_twice() -> None:
    """The gradient of exp(w * x) is tangent * result * x."""
    forward, backward = two_phases(joint_of(hidden, weight(), rows()), None)
    assert saved_inputs(backward) == {1}
    sources = [n.meta[SOURCE] for n in backward.module.graph.nodes if n.op == "placeholder"]
    assert sorted(source.kind for source in sources) == ["saved", "tangent", "tensor"]
    assert len(run(forward, tensors(weight(), rows()))) == 2


def dropped(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return (F.dropout(w @ x, 0.5, True).exp(),)


def test_the_seed_is_an_input_of_every_phase_that_draws_from_it() -> None:
    fused = FusionGraph(captured(dropped, weight(), rows()))
    fusion_pipeline.apply(fused, ())
    joint = trace(fused.module, fused.examples)
    forward, backward = two_phases(joint, None)
    whole = one_phase(joint, 0, None, recomputes=False)
    for phase in (forward, backward, whole):
        inputs = [n for n in phase.module.graph.nodes if n.op == "placeholder"]
        assert [n.meta["val"].dtype for n in inputs if n.meta[SOURCE] == SEED] == [torch.int64]
    assert inputs_of_backward(joint) == saved_inputs(backward) == {1}


def transposed(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    factor = w.exp().t()
    return ((x.t() @ factor).unsqueeze(0).exp(),)


def test_the_bases_of_views_are_saved() -> None:
    w, x = torch.randn(3, 5), torch.randn(5, 4)
    w.requires_grad_()
    forward, backward = two_phases(joint_of(transposed, w, x), None)
    views = [node.name for node in returned_by(forward.module.graph)[1:] if is_view(node)]
    assert not views
    # The other factor of the matmul is an input, which the backward transposes.
    assert saved_inputs(backward) == {1}
    value, *saved = run(forward, tensors(w, x))
    tangent = torch.linspace(0.5, 1.5, value.numel()).reshape(value.shape)
    values = {**tensors(w, x), ("tangent", 0): tangent, **{("saved", k): v for k, v in enumerate(saved)}}
    (gradient,) = run(backward, values)
    torch.testing.assert_close(gradient, torch.autograd.grad(transposed(w, x)[0], w, tangent)[0])


def test_a_backward_that_reads_no_input() -> None:
    _, backward = two_phases(joint_of(lambda w: (w.exp(),), weight()), None)
    assert saved_inputs(backward) == set()


def test_checkpoints_are_recomputed_in_one_phase() -> None:
    w, x = weight(), rows()
    joint = joint_of(checkpointed, w, x)
    assert has_checkpoints(joint.module)
    saving, recomputing = (one_phase(joint, 0, None, recomputes=recomputes) for recomputes in (False, True))
    assert (count(saving, aten.tanh.default), count(recomputing, aten.tanh.default)) == (1, 2)
    for phase in (saving, recomputing):
        value, gradient = run(phase, tensors(w, x))
        torch.testing.assert_close(value, checkpointed(w, x)[0])
        torch.testing.assert_close(gradient, torch.autograd.grad(checkpointed(w, x)[0], w)[0])


def test_recomputed_nodes_come_after_the_forward() -> None:
    w, x = weight(), rows()
    phase = one_phase(joint_of(checkpointed, w, x), 0, None, recomputes=True)
    nodes = list(phase.module.graph.nodes)
    output = nodes[-1].args[0]
    assert isinstance(output, (tuple, list))
    last = [k for k, node in enumerate(nodes) if node.target is aten.tanh.default][-1]
    assert last > nodes.index(output[0])


def test_a_budget_saves_memory_and_has_the_same_gradients() -> None:
    w, x = weight(), rows()
    joint = joint_of(deep, w, x)
    saving, recomputing = (one_phase(joint, 0, budget, recomputes=False) for budget in (None, 0.5))
    assert count(recomputing, aten.sin.default) > count(saving, aten.sin.default) == 6
    assert peak_bytes(recomputing.module.graph) < peak_bytes(saving.module.graph)
    for phase in (saving, recomputing):
        torch.testing.assert_close(run(phase, tensors(w, x))[1], torch.autograd.grad(deep(w, x)[0], w)[0])
