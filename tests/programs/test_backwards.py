"""backward() can start at any results of a graph, in any order: gradients are eager's, or an error says why not."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lit_ort.errors import LitOrtWarning
from tests.compare import backend

# Results of a step that computes `hidden` and `other`, as functions of both and of the results before.
RESULTS: dict[str, Callable[[Tensor, Tensor, list[Tensor]], Tensor]] = {
    "mean": lambda hidden, other, before: hidden.square().mean(),
    "sum": lambda hidden, other, before: hidden.sum() + other.exp().mean(),
    "per row": lambda hidden, other, before: hidden.sum() / hidden.shape[0],
    "other's mean": lambda hidden, other, before: other.cos().mean(),
    "hidden": lambda hidden, other, before: hidden,
    "other": lambda hidden, other, before: other,
    "view": lambda hidden, other, before: hidden.view(-1),
    "rows": lambda hidden, other, before: hidden[:2],
    "column": lambda hidden, other, before: hidden[:, 1],
    "transposed": lambda hidden, other, before: other.t(),
    "expanded": lambda hidden, other, before: other.sum(1, keepdim=True).expand(-1, 3),
    "detached": lambda hidden, other, before: hidden.detach(),
    "logged": lambda hidden, other, before: before[-1].detach() if before else other.detach().sum(),
    "parts": lambda hidden, other, before: hidden.chunk(2, 0)[1],
    "unbound": lambda hidden, other, before: other.unbind(1)[len(before) % 3],
    "again": lambda hidden, other, before: before[-1] if before else other,
    "of the last": lambda hidden, other, before: before[-1].sum() * 2 if before else hidden.amax(),
    "rounded": lambda hidden, other, before: hidden.round(),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Results of a step, and the backwards of one call.

    Args:
        results: names in `RESULTS`.
        backwards: for each backward, the positions of the results where it starts.
        retained: whether the graph is kept between them.
    """

    results: tuple[str, ...]
    backwards: tuple[tuple[int, ...], ...]
    retained: bool


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    results = draw(st.lists(st.sampled_from(sorted(RESULTS)), min_size=1, max_size=5))
    position = st.integers(0, len(results) - 1)
    groups = st.lists(position, min_size=1, max_size=2, unique=True).map(tuple)
    backwards = draw(st.lists(groups, min_size=1, max_size=2))
    return Plan(tuple(results), tuple(backwards), draw(st.booleans()))


class Net(nn.Module):
    def __init__(self, results: Sequence[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)
        self.results = tuple(results)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden, other = self.first(x).tanh(), self.second(x)
        values: list[Tensor] = []
        for name in self.results:
            values.append(RESULTS[name](hidden, other, values))
        return tuple(values)


def gradients_of(net: Net, call: Callable[..., tuple[Tensor, ...]], plan: Plan) -> list[Tensor | None] | str:
    """The gradients after two calls with their backwards; the error's type if eager or the graph raises."""
    net.zero_grad()
    # The second size makes the graph one for all sizes.
    for rows in (3, 3, 4, 5):
        x = torch.linspace(-1, 1, rows * 4).view(rows, 4).requires_grad_()
        values = call(x)
        for number, group in enumerate(plan.backwards):
            roots = [values[k] for k in group if values[k].requires_grad]
            if not roots:
                continue
            weights = [torch.linspace(0.5, 1, root.numel()).view(root.shape) for root in roots]
            last = number == len(plan.backwards) - 1
            try:
                torch.autograd.backward(roots, weights, retain_graph=plan.retained and not last)
            except (RuntimeError, ValueError) as error:
                return type(error).__name__
    return [x.grad, *(parameter.grad for parameter in net.parameters())]


def check(plan: Plan) -> None:
    torch._dynamo.reset()
    net = Net(plan.results)
    twin = copy.deepcopy(net)
    expected = gradients_of(twin, twin, plan)
    if isinstance(expected, str):
        # Eager has freed what a second backward needs; a session can run again.
        return
    with warnings.catch_warnings():
        # Parts that are differentiated at different times run in eager, with this line.
        warnings.filterwarnings("ignore", ".*differentiated at different times", LitOrtWarning)
        engine = backend(fallback="warn")
        actual = gradients_of(net, torch.compile(net, backend=engine), plan)
    assert not isinstance(actual, str), actual
    for own, reference in zip(actual, expected, strict=True):
        assert (own is None) == (reference is None), plan
        if own is not None and reference is not None:
            torch.testing.assert_close(own, reference, rtol=1e-4, atol=1e-5)


def run(first: int, count: int) -> None:
    @seed(first)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(plans())
    def compare(plan: Plan) -> None:
        check(plan)

    compare()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(("sum", "mean", "logged"), ((1,),), False), id="another scalar, logged too"),
        pytest.param(Plan(("hidden", "per row", "mean"), ((2,), (0,)), True), id="of any size", marks=pytest.mark.slow),
        pytest.param(Plan(("hidden", "mean", "view", "logged"), ((0,),), False), id="views and detached views"),
        pytest.param(Plan(("mean", "hidden"), ((1,), (0,)), True), id="kept for the loss", marks=pytest.mark.slow),
        pytest.param(Plan(("mean", "other's mean"), ((0,), (1,)), False), id="two parts", marks=pytest.mark.slow),
        pytest.param(Plan(("column", "other's mean"), ((0,), (1,)), False), id="two parts, the loss last"),
    ],
)
def test_backward_at_some_results(plan: Plan) -> None:
    check(plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "count"), [(0, 8), *(pytest.param(first, 40, marks=pytest.mark.sweep) for first in range(8))]
)
def test_backward_at_any_results(first: int, count: int) -> None:
    run(first, count)
