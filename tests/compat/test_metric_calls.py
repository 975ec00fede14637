"""Steps that call metrics: values and states of eager, and one graph where the step drops or logs the results."""

from __future__ import annotations

import copy
import functools
import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MetricCollection, classification
from torchmetrics.functional.classification import multiclass_accuracy

from lit_ort._compat.patching import replaced_entry
from lit_ort.backend.tracing_settings import LogRecorder, dynamo_settings
from tests.compare import backend, mostly
from tests.compat.canary import canary

CLASSES = 4
# Statements of a step between its logits `o` and its loss; `y` are the labels.
ONE_GRAPH = {
    "labels that the trace has read": "b = (o, y); functional.cross_entropy(*b); self.accuracy(b[0], b[1])",
    "call": "self.accuracy(o, y)",
    "update": "self.accuracy.update(o, y)",
    "by keyword": "self.accuracy(preds=o, target=y)",
    "collection": "self.both(o, y)",
    "update of a collection": "self.both.update(o, y)",
    "in a list": "self.several[0](o, y)",
    "mean": "self.mean(o.detach().mean()); self.mean.update(3.0); self.mean.update(o.sum(), weight=2.0)",
    "several": "self.accuracy(o, y); self.mean.update(o.sum()); self.accuracy(o, y)",
    "without gradients": "with torch.no_grad(): self.accuracy(o.argmax(1), y)",
    "in a function": "update(self.accuracy, o, y)",
    "behind a write": "self.seen.append(len(y)); self.accuracy(o, y); self.seen.append(2)",
    "values that change": "p = o.detach() * 1\n        self.accuracy(p, y)\n        p.zero_()",
    "values that change before": "p = o.detach() * 1\n        p.zero_()\n        self.accuracy(p, y)",
    "views that change": "p = o.detach() * 1\n        self.accuracy(p[:, :], y)\n        p[:, 1].fill_(9.0)",
    "labels that change": "self.accuracy(o, y)\n        y = y.clone()\n        self.accuracy(o, y)\n        y.zero_()",
    "one's own": "self.own(o, y)",
    "reset": "self.mean.update(o.sum())\n        self.mean.reset()",
    "logged": "self.log('a', self.accuracy(o, y))",
    "logged later": "a = self.accuracy(o, y)\n        self.log('l', o.sum())\n        self.log('a', a, prog_bar=True)",
    "logged twice": "a = self.accuracy(o, y)\n        self.log('a', a)\n        self.log(name='b', value=a)",
    "logged calls of one line": "for m in (self.accuracy, self.several[0]): self.log(type(m).__name__, m(o, y))",
    "logged by a function": "log(self, 'a', self.accuracy(o, y))",
    "logged with its value unused": "a = b = self.accuracy(o, y)\n        self.log('a', a)\n        del b",
    "logged function": "self.log('a', multiclass_accuracy(o, y, num_classes=4))",
    "logged collection": "self.log_dict(self.both(o, y), prog_bar=True)",
    "logged compute": "m = self.mean\n        m.update(o.sum())\n        self.log('m', m.compute())\n        m.reset()",
    "metric to be computed": "self.accuracy(o, y)\n        self.log('a', self.accuracy)",
    "collection to be computed": "self.both(o, y)\n        self.log_dict(self.both, prog_bar=True)",
    "updated collection to be computed": "self.both.update(o, y)\n        self.log_dict(self.both, prog_bar=True)",
    "logged dict": "self.log_dict({'a': self.accuracy(o, y), 'l': o.sum()})",
    "loss": "return self.own(o, y)",
    "logged loss": "loss = self.own(o, y)\n        self.log('loss', loss)\n        return loss",
    "method of a loss": "return self.own(o, y).mean() * 2",
    "attribute of a loss": "loss = self.own(o, y)\n        return loss * loss.shape.numel()",
    "sum of losses": "self.accuracy(o, y)\n        return self.own(o, y) + functional.cross_entropy(o, y)",
}
# The result or the state is used, or the exception of a metric.
MORE_GRAPHS = {
    "result": "o = o + self.accuracy(o, y)",
    "state": "self.mean.update(o.sum())\n        o = o * self.mean.weight",
    "compute": "self.mean.update(o.sum())\n        o = o * self.mean.compute()",
    "logged and used": "a = self.accuracy(o, y)\n        self.log('a', a)\n        o = o + a",
    "logged and kept": "a = self.accuracy(o, y)\n        self.log('a', a)\n        self.seen.append(a)",
    "logged percentage": "self.log('a', self.accuracy(o, y) * 100)",
    "logged item": "self.log('a', self.both(o, y)['f1'])",
    "logged and compared": "a = self.accuracy(o, y)\n        if a is None: o = o * 2\n        self.log('a', a)",
    "logged with positions": "self.log_dict(self.both(o, y), True)",
    "collection with positions": "self.both(o, y)\n        self.log_dict(self.both, True)",
    "a collection of one's own": "d = self.both(o, y)\n        self.log_dict({**d, 'l': o.sum()})",
    "caught": "try: self.accuracy(o, y)\n        except ValueError: pass",
}


class OwnLoss(torchmetrics.Metric):
    """A metric as libraries of forecasts have them for losses."""

    full_state_update: bool | None = False

    def __init__(self, reduction: str = "sum") -> None:
        super().__init__()
        self.add_state("losses", torch.tensor(0.0), dist_reduce_fx=reduction)
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        losses = self.sum(functional.cross_entropy(outputs, labels, reduction="none"))
        if not torch.isfinite(losses):
            losses = torch.tensor(1e9)
        self.losses = self.losses + losses
        self.count = self.count + labels.numel()

    def sum(self, losses: Tensor) -> Tensor:
        return losses.sum()

    def compute(self) -> Tensor:
        return self.losses / self.count


def log(module: Any, name: str, value: Any) -> None:
    module.log(name, value)


def update(metric: Any, outputs: Tensor, labels: Tensor) -> None:
    metric.update(outputs, labels)


class Module(nn.Module):
    step: Any

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.own = nn.Linear(6, CLASSES), OwnLoss()
        self.accuracy, self.mean = classification.MulticlassAccuracy(CLASSES), torchmetrics.MeanMetric()
        self.several = nn.ModuleList([classification.MulticlassF1Score(CLASSES)])
        self.both = MetricCollection(
            {"accuracy": classification.MulticlassAccuracy(CLASSES), "f1": classification.MulticlassF1Score(CLASSES)}
        )
        self.seen: list[Any] = []
        self.logged: list[tuple[str, dict[str, Any]]] = []
        self.values: list[Tensor] = []

    def log(self, name: str, value: Any, **kwargs: Any) -> None:
        self.logged.append((name, kwargs))
        # Lightning computes a metric at the end of the epoch.
        self.values.append(value.detach() if isinstance(value, Tensor) else torch.tensor(0.0))

    def log_dict(self, values: Any, prog_bar: bool = False) -> None:
        for name, value in values.items(**({"copy_state": False} if isinstance(values, MetricCollection) else {})):
            self.log(name, value, prog_bar=prog_bar)

    def compiled_step(self, engine: Any) -> Any:
        """The compiled step, with calls of log recorded as under a strategy."""
        recorder = LogRecorder(self)
        compiled = torch.compile(self.step, backend=engine)

        def step(x: Tensor, y: Tensor) -> Any:
            with (
                replaced_entry(vars(self), "log", recorder.log),
                replaced_entry(vars(self), "log_dict", recorder.log_dict),
            ):
                output = compiled(x, y)
            recorder.replay(self.log)
            return output

        return step

    def states(self) -> list[Any]:
        """The state of all metrics."""
        metrics = [own for own in self.modules() if isinstance(own, torchmetrics.Metric)]
        return [(metric.metric_state, metric.update_count) for metric in metrics]


def module_of(name: str, statements: str) -> Module:
    source = f"def step(self, x, y):\n        o = self.net(x)\n        {statements}\n"
    source += "        return functional.cross_entropy(o, y)\n"
    file = f"<metrics {name}>"
    # Torch reads the lines of code that it traces.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {"torch": torch, "functional": functional, "update": update, "log": log}
    names["multiclass_accuracy"] = multiclass_accuracy
    exec(compile(source, file, "exec"), names)
    return type("Written", (Module,), {"step": names["step"]})()


# A step with all of these, and steps of their own for those that return and for some of the others.
JOINED = "\n        ".join(statements for statements in ONE_GRAPH.values() if "return" not in statements)
STEPS = {**ONE_GRAPH, **MORE_GRAPHS, "all that go on": JOINED}
ALONE = {"call", "logged", "all that go on", *(name for name in ONE_GRAPH if "return" in ONE_GRAPH[name]), *MORE_GRAPHS}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "name",
    [
        *mostly(pytest.mark.slow, sorted(ALONE), 4),
        *(pytest.param(name, marks=pytest.mark.sweep) for name in sorted(STEPS.keys() - ALONE)),
    ],
)
def test_values_states_and_graphs(name: str) -> None:
    effect = "the graph of a step ends at each metric"
    with canary("call_function of InstructionTranslatorBase or UnspecializedNNModuleVariable", "metric_calls", effect):
        torch.compiler.reset()
        statements, engine = STEPS[name], backend(fallback="warn")
        eager, module = module_of(name, statements), module_of(name, statements)
        step = module.compiled_step(engine)
        for k in range(3):
            x, y = torch.randn(8, 6), (torch.arange(8) + k) % CLASSES
            expected = eager.step(x, y)
            with dynamo_settings("step", strict=False, report=lambda *_: None, compile_log=engine.compile_log):
                actual = step(x, y)
            torch.testing.assert_close(actual, expected)
            expected.backward()
            actual.backward()
            torch.testing.assert_close(module.net.weight.grad, eager.net.weight.grad)
            torch.testing.assert_close(module.states(), eager.states())
            torch.testing.assert_close((module.seen, module.values), (eager.seen, eager.values))
            assert module.logged == eager.logged
        log = engine.compile_log
        assert name in MORE_GRAPHS or (len(log.graphs), len(log.breaks)) == (1, 0)
        # The methods of a metric are no graphs.
        assert len(log.graphs) <= 2


class Dtypes(torchmetrics.Metric):
    """Keeps the dtypes in which matmuls of its updates are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def update(self, x: Tensor) -> None:
        self.dtypes.append((x @ x.mT).dtype)

    def compute(self) -> int:
        return len(self.dtypes)


def test_a_metric_has_the_autocast_of_its_call() -> None:
    torch.compiler.reset()
    net, metric = nn.Linear(6, CLASSES), Dtypes()

    def step(x: Tensor) -> Tensor:
        output = net(x)
        metric.update(output.detach().float())
        with torch.autocast("cpu", enabled=False):
            metric.update(output.detach().float())
        return output.float().square().mean()

    engine = backend(fallback="warn")
    compiled = torch.compile(step, backend=engine)
    for run in (step, compiled):
        metric.dtypes.clear()
        with (
            torch.autocast("cpu", torch.bfloat16),
            dynamo_settings("step", strict=False, report=lambda *_: None, compile_log=engine.compile_log),
        ):
            run(torch.randn(4, 6)).backward()
        assert metric.dtypes == [torch.bfloat16, torch.float32]


class Asserting(OwnLoss):
    def compute(self) -> Tensor:
        loss = super().compute()
        assert loss < 1e6, "not finite"
        assert torch.isfinite(loss), "not finite"
        return loss


class WithFullUpdates(OwnLoss):
    full_state_update = True


class WithList(OwnLoss):
    """Its state grows, and Dynamo would trace each length."""

    all: Any

    def __init__(self) -> None:
        super().__init__()
        self.add_state("all", [], dist_reduce_fx="cat")

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        super().update(outputs, labels)
        self.all.append(outputs.detach())


def attributes(metric: torchmetrics.Metric) -> dict[str, Any]:
    """What a metric keeps: numbers, tensors, flags."""
    kinds = (Tensor, bool, int, float, type(None), list)
    return {name: value for name, value in vars(metric).items() if isinstance(value, kinds)}


LOSSES: dict[str, Callable[[], torchmetrics.Metric]] = {
    **{f"by {reduction}": functools.partial(OwnLoss, reduction) for reduction in ("sum", "mean", "max", "min")},
    "full updates": WithFullUpdates,
    "list": WithList,
    "squared error": lambda: torchmetrics.MeanSquaredError(),
    "mean metric": lambda: torchmetrics.MeanMetric("disable"),
}


NETS = {"layer": nn.Linear(6, CLASSES), "norm": nn.Sequential(nn.Linear(6, CLASSES), nn.BatchNorm1d(CLASSES))}
OF_NORMS = ("by sum", "squared error", "mean metric")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if (kind == "norm") == (name in OF_NORMS) else pytest.mark.sweep)
        for name in LOSSES
        for kind in NETS
    ],
)
def test_a_loss_is_in_the_graph(name: str, kind: str) -> None:
    torch.compiler.reset()
    engine, metric, twin = backend(fallback="warn"), LOSSES[name](), LOSSES[name]()
    net, other = copy.deepcopy(NETS[kind]), copy.deepcopy(NETS[kind])
    needs_labels = name != "mean metric"

    def step(net: nn.Module, metric: Any, x: Tensor, y: Tensor) -> Tensor:
        labels = y if isinstance(metric, OwnLoss) else functional.one_hot(y, CLASSES).float()
        return metric(net(x), labels) if needs_labels else metric(net(x))

    compiled = torch.compile(step, backend=engine)
    for k in range(7):
        x, y = torch.randn(8, 6), (torch.arange(8) + k) % CLASSES
        if k == 3:
            x[0] = torch.nan
        if k == 5:
            metric.reset()
            twin.reset()
        losses = compiled(net, metric, x, y), step(other, twin, x, y)
        assert losses[0].requires_grad == losses[1].requires_grad
        torch.testing.assert_close(*losses, equal_nan=True)
        torch.testing.assert_close(attributes(metric), attributes(twin), equal_nan=True)
        grads = [
            torch.autograd.grad(loss, tuple(own.parameters()), allow_unused=True) if loss.requires_grad else ()
            for loss, own in zip(losses, (net, other), strict=True)
        ]
        torch.testing.assert_close(*grads, equal_nan=True)
    log = engine.compile_log
    # A graph that writes statistics can't run twice, and ends at the branch.
    is_whole = isinstance(net, nn.Linear) or not isinstance(metric, OwnLoss)
    assert name == "list" or not is_whole or (len(log.graphs), len(log.breaks)) == (1, 0)
    assert len(log.graphs) <= 2


def test_a_failed_assertion_leaves_eagers_state() -> None:
    torch.compiler.reset()
    engine, metric, twin = backend(fallback="warn"), Asserting(), Asserting()
    net = nn.Linear(6, CLASSES)

    def step(metric: Any, x: Tensor, y: Tensor) -> Tensor:
        return metric(net(x), y)

    compiled, y = torch.compile(step, backend=engine), torch.arange(8) % CLASSES
    for k in range(3):
        x = torch.full((8, 6), torch.nan if k == 1 else 1.0)
        results = []
        for run, own in ((compiled, metric), (step, twin)):
            try:
                results.append(run(own, x, y).detach())
            except AssertionError as error:
                results.append(str(error))
        assert type(results[0]) is type(results[1])
        assert isinstance(results[0], str) is (k == 1)
        torch.testing.assert_close(metric.metric_state, twin.metric_state)
        metric.reset()
        twin.reset()


class Names(torchmetrics.Metric):
    """Keeps how many names it has been given."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def update(self, names: list[str]) -> None:
        self.counts.append(len(names))

    def compute(self) -> int:
        return sum(self.counts)


@pytest.mark.filterwarnings("ignore:step runs in eager PyTorch")
def test_a_metric_receives_a_list_as_it_is_at_the_call() -> None:
    torch.compiler.reset()

    def step(metric: Names, x: Tensor) -> Tensor:
        names: list[str] = []
        for k in range(3):
            names.append(f"c{k}")
            metric.update(names)
        return x.sum()

    metric, x = Names(), torch.ones(2, requires_grad=True)
    torch.compile(step, backend=backend(fallback="warn"))(metric, x)
    assert metric.counts == [1, 2, 3]
