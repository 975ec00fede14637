"""Steps that branch on values of their inputs: one graph for each outcome, and eager's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn, tensor
from torch._dynamo.exc import Unsupported

from lit_ort.backend.tracing_settings import dynamo_settings
from tests.compare import backend, mostly
from tests.compat.canary import canary


class Module(nn.Module):
    ready: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 4)
        self.register_buffer("ready", tensor(False))

    def doubled_if_short(self, x: Tensor, lengths: Tensor) -> Tensor:
        if (lengths < lengths.max()).any():
            x = x * 2
        return self.net(x).square().mean()

    def two_inputs(self, x: Tensor, lengths: Tensor) -> Tensor:
        if (x[:, 0, 0] > lengths).all():
            x = x - 1
        return self.net(x).sum()

    def boolean(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.net(x).sum() * (2 if bool(lengths.min() == 0) else 1)

    def negated(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.net(x).sum() * (2 if not lengths.min() else 1)

    def longest(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.net(x[:, : int(lengths.max())]).square().mean()

    def mask(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(lengths.max())  # pyright: ignore[reportCallIssue, reportArgumentType]
        mask = mask < lengths[:, None]
        return (self.net(x[:, : lengths.max()]) * mask[..., None]).sum()

    def caught(self, x: Tensor, lengths: Tensor) -> Tensor:
        try:
            distributions.Poisson(torch.ones(1), validate_args=True).log_prob(lengths.float() - 1)
        except ValueError:
            x = x * 3
        return self.net(x).sum()

    def flag(self, x: Tensor, lengths: Tensor) -> Tensor:
        if self.ready:
            x = x * 2
        return self.net(x).sum()

    def nested(self, x: Tensor, lengths: Tensor) -> Tensor:
        if lengths.min() > 0:
            if lengths.sum() > 6:
                x = x + 1
        else:
            x = x * 3
        return self.net(x).sum()


# Lengths of the batches, of which a step has at most two values.
BATCHES = [[3, 3, 3], [3, 0, 3], [3, 3, 3], [2, 1, 3], [3, 0, 2], [3, 3, 1]]
STEPS = [name for name, value in vars(Module).items() if callable(value) and not name.startswith("_")]


def run(name: str, batches: Sequence[Any], module: Module | None = None) -> Any:
    """Compares a step with eager on some lengths; returns the engine."""
    engine = backend(fallback="warn")
    module = module or Module()
    step = getattr(module, name)
    compiled = torch.compile(step, backend=engine)
    x = torch.randn(3, 5, 4)
    for lengths in batches:
        with dynamo_settings("step", strict=False, report=lambda *_: None, compile_log=engine.compile_log):
            actual = compiled(x, tensor(lengths))
        expected = step(x, tensor(lengths))
        torch.testing.assert_close(actual, expected)
        weights = tuple(module.parameters())
        grads = [torch.autograd.grad(loss, weights) for loss in (actual, expected)]
        torch.testing.assert_close(*grads)
    return engine


@pytest.mark.parametrize("name", mostly(pytest.mark.slow, STEPS, 4))
def test_no_graph_break(name: str) -> None:
    with canary("TensorVariable.method_item", "input_values", "a step that reads values of its inputs has more graphs"):
        torch.compiler.reset()
        engine = run(name, BATCHES)
        assert not engine.compile_log.breaks
        assert engine.count <= 3


def test_an_argument_that_was_read_before() -> None:
    """Dynamo's variable of it is realized, and is no tensor's."""
    torch.compiler.reset()

    def step(x: Tensor, **options: Any) -> Tensor:
        names = options["names"]
        x = x * len(names)
        kept = {key: value for key, value in options.items() if key != "other"}
        if kept.get("names"):
            x = x + 1
        return x - 1 if options["names"] and names else x

    engine = backend(fallback="error")
    compiled, x = torch.compile(step, backend=engine), torch.ones(2)
    for names in (["a"], {"a": 1}, ("a",), nn.Linear(2, 2).train().state_dict()):
        torch.testing.assert_close(compiled(x, names=names, other=1), step(x, names=names, other=1))


def test_a_buffer_that_changes() -> None:
    torch.compiler.reset()
    module = Module()
    for ready in (False, True, False):
        module.ready.fill_(ready)
        run("flag", BATCHES[:2], module)


@pytest.mark.filterwarnings("ignore:.*runs in eager PyTorch")
def test_statistics_that_the_step_updates() -> None:
    """Functions that write into arguments other than the first."""
    torch.compiler.reset()

    def step(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
        y = norm(x)
        assert norm.running_mean is not None
        return y * 2 if norm.running_mean.max() > 0.5 else y

    compiled = torch.compile(step, backend=backend(fallback="warn"))
    own, eager = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    for mean in (0.0, 6.0, 0.0, -20.0):
        x = torch.randn(4, 3) + mean
        torch.testing.assert_close(compiled(own, x), step(eager, x))


def test_many_values_end_the_graph() -> None:
    """An integer that keeps changing is a result of a graph, as it is without the mend."""
    torch.compiler.reset()
    engine = run("longest", [[k, 1, 1] for k in (5, 4, 3, 2, 1, 5, 4)])
    assert engine.compile_log.breaks


def test_a_value_that_fills_stays_a_tensor() -> None:
    torch.compiler.reset()
    engine = backend(fallback="error")
    # torch reads the tensor as a number.
    full: Any = torch.full
    compiled = torch.compile(lambda x, k: x + full((2,), k), backend=engine)
    for k in (3, 4, 5):
        assert torch.equal(compiled(torch.ones(2), tensor(k)), torch.ones(2) + k)
    assert engine.count == 1


def changed(x: Tensor, net: Tensor) -> Tensor:
    x.add_(1)
    return x * 2 if x.sum() > 0 else x


def changed_by_view(x: Tensor, net: Tensor) -> Tensor:
    x[0].zero_()
    return x * 2 if x.sum() > 0 else x


def changed_behind_its_version(x: Tensor, net: Tensor) -> Tensor:
    x.data.mul_(-1).add_(0.5)
    return x * 2 if x.sum() > 0 else x


def of_weight(x: Tensor, net: Tensor) -> Tensor:
    return x * 2 if net.sum() > 0 else x


def of_float(x: Tensor, net: Tensor) -> Tensor:
    return x * x.max().item()


def of_draw(x: Tensor, net: Tensor) -> Tensor:
    return x * 2 if (x + torch.rand(3)).sum() > 100 else x


def ambiguous(x: Tensor, net: Tensor) -> Tensor:
    return x * 2 if x > 0 else x


def without_elements(x: Tensor, net: Tensor) -> Tensor:
    return x * 2 if x[:0].max() > 0 else x


@pytest.mark.parametrize(
    "function", [changed, changed_by_view, changed_behind_its_version, of_weight, of_float, of_draw]
)
def test_what_is_no_value_of_inputs(function: Callable[..., Any]) -> None:
    torch.compiler.reset()
    engine = backend(fallback="warn")
    compiled = torch.compile(function, backend=engine)
    weight = torch.ones(3, requires_grad=True)
    for k in (1.0, -5.0, 2.0):
        x, same = torch.full((3,), k), torch.full((3,), k)
        with dynamo_settings("step", strict=False, report=lambda *_: None, compile_log=engine.compile_log):
            torch.testing.assert_close(compiled(x, weight), function(same, weight))
        torch.testing.assert_close(x, same)
    assert engine.compile_log.breaks


@pytest.mark.parametrize("function", [ambiguous, without_elements])
def test_errors_are_eagers(function: Callable[..., Any]) -> None:
    torch.compiler.reset()
    x = torch.ones(3)
    compiled = torch.compile(function, backend=backend(fallback="warn"))
    messages = []
    for run_it in (compiled, function):
        with pytest.raises((RuntimeError, IndexError)) as error:
            run_it(x, x)
        messages.append(str(error.value))
    assert messages[1] in messages[0]


def test_a_later_batch_without_elements() -> None:
    """The guard can't be computed; eager's error is raised."""
    torch.compiler.reset()

    def step(x: Tensor) -> Tensor:
        return x * 2 if x.max() > 0 else x

    compiled = torch.compile(step, backend=backend(fallback="warn"), dynamic=True)
    compiled(torch.ones(3))
    with pytest.raises((RuntimeError, IndexError), match="max"):
        compiled(torch.ones(0))
    torch.testing.assert_close(compiled(-torch.ones(4)), -torch.ones(4))


def test_inductor_is_not_changed() -> None:
    torch.compiler.reset()
    compiled = torch.compile(of_weight, backend="eager", fullgraph=True)
    with pytest.raises(Unsupported):
        compiled(torch.ones(3), torch.ones(3))
