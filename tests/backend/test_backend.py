"""The backend with torch.compile: gradients, shapes, graph breaks, fallbacks, options."""

from __future__ import annotations

import copy
import errno
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import InternalTorchDynamoError

from lit_ort._compat import openmp
from lit_ort.backend.backend import CompiledGraph
from lit_ort.backend.explanation import explain
from lit_ort.errors import CompileError, LitOrtWarning, OptionsError, SessionError
from lit_ort.runtime.latest import MOST_SIZES
from lit_ort.runtime.session import RunInputs, Session
from tests.backend.classifier import Classifier, classes
from tests.compare import REASON, assert_same_step, backend, gradients, relative_error, sparse_gradient
from tests.scripts import run_code


@pytest.mark.slow
def test_the_name_needs_no_import() -> None:
    code = (
        "import torch; m = torch.nn.Linear(3, 1); f = torch.compile(lambda x: m(x).sum(), backend='ort',"
        "options={'fallback': 'error'}); f(torch.ones(2, 3)).backward(); print(m.bias.grad.item())"
    )
    result = run_code([sys.executable, "-c", code])
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "2.0"
    assert result.stderr.strip() == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"falback": "error"}, "Unknown option 'falback'"),
        ({"fallback": "never"}, "fallback='never'"),
        ({"disable_passes": ("dropuot",)}, "'dropuot', which is not a pass"),
        ({"disable_passes": ("canonicalize",)}, "required for every graph"),
        ({"disable_passes": "dropout"}, "is one string"),
        ({"threads": 0}, "threads=0"),
        ({"verify_first_step": 1}, "is not a bool"),
    ],
)
def test_invalid_options_raise(options: dict[str, Any], message: str) -> None:
    function = torch.compile(lambda x: x.sum(), backend="ort", options=options)
    with pytest.raises(OptionsError, match=message):
        function(torch.ones(2, requires_grad=True))


def test_fused_step_agrees_with_eager() -> None:
    engine = assert_same_step(Classifier(), lambda m, x, y: m.loss(x, y), *classes(7))
    assert [graph.kind for graph in engine.compile_log.graphs] == ["fused"]


def test_accumulation_and_scaled_gradients() -> None:
    module = Classifier()
    twin = copy.deepcopy(module)
    loss = torch.compile(Classifier.loss, backend=backend())
    for k in range(3):
        x, y = classes(7)
        (loss(module, x, y) / (k + 1)).backward()
        (twin.loss(x, y) / (k + 1)).backward()
    for name, gradient in gradients(twin).items():
        assert relative_error(gradients(module)[name], gradient) < 1e-5


def test_gradients_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: set[int] = set()
    run = Session.run

    def record(session: Session, inputs: RunInputs) -> list[Tensor]:
        tensors = run(session, inputs)
        addresses.update(tensor.data_ptr() for tensor in tensors)
        return tensors

    monkeypatch.setattr(Session, "run", record)
    module = Classifier()
    torch.compile(Classifier.loss, backend=backend())(module, *classes(7)).backward()
    assert {p.grad.data_ptr() for p in module.parameters() if p.grad is not None} <= addresses
    assert all(p.grad is not None for p in module.parameters())


def test_a_retained_graph_computes_its_gradients_again() -> None:
    module = Classifier()
    loss = torch.compile(Classifier.loss, backend=backend())(module, *classes(7))
    loss.backward(retain_graph=True)
    first = gradients(module)
    loss.backward()
    for name, gradient in gradients(module).items():
        torch.testing.assert_close(gradient, 2 * first[name])
    with pytest.raises(SessionError, match="retain_graph=True"):
        loss.backward()


def test_second_backward_of_a_split_graph_raises() -> None:
    module, x = Classifier(), torch.randn(7, 6)
    output = torch.compile(module, backend=backend())(x)
    output.sum().backward(retain_graph=True)
    output.sum().backward()
    with pytest.raises(SessionError, match="run the forward again"):
        output.sum().backward()


@pytest.mark.parametrize("scalar", [True, False])
def test_double_backward_runs_in_eager_from_then_on(scalar: bool) -> None:
    engine = backend(fallback="warn")
    compiled = torch.compile(lambda x: (x**3).sum() if scalar else x**3, backend=engine)
    for step in range(3):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        with pytest.warns(LitOrtWarning, match="create_graph=True") if step == 0 else nullcontext():
            (gradient,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
            gradient.square().sum().backward()
        assert torch.equal(gradient, 3 * x**2)
        torch.testing.assert_close(x.grad, 36 * x.detach() ** 3)
    assert [graph.kind for graph in engine.compile_log.graphs] == ["fused" if scalar else "split", "eager"]


@pytest.mark.parametrize("scalar", [True, False])
def test_gradients_with_and_without_a_graph_from_one_forward(scalar: bool) -> None:
    # As in a penalty on the gradient of a score that is also part of the loss.
    compiled = torch.compile(lambda x: (x**3).sum() if scalar else x**3, backend=backend(fallback="warn"))
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    score = compiled(x).sum()
    with pytest.warns(LitOrtWarning, match="create_graph=True"):
        (first,) = torch.autograd.grad(score, x, create_graph=True)
    (second,) = torch.autograd.grad(score, x, create_graph=True)
    (score + first.sum() + second.sum()).backward()
    torch.testing.assert_close(x.grad, 3 * x.detach() ** 2 + 12 * x.detach())


def test_a_gradient_that_is_differentiated_again_uses_the_numbers_of_the_forward() -> None:
    """As in a penalty at points drawn between two batches."""

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        points = x * torch.rand(3)
        return points.sum(), (points**3).sum()

    compiled, found = torch.compile(step, backend=backend(fallback="warn")), []
    for run in (step, compiled, compiled):
        torch.manual_seed(0)
        x = torch.ones(3, requires_grad=True)
        _, score = run(x)
        with pytest.warns(LitOrtWarning, match="create_graph=True") if len(found) == 1 else nullcontext():
            (first,) = torch.autograd.grad(score, x, create_graph=True)
        found.append([score, first, *torch.autograd.grad(first.sum(), x), torch.rand(2)])
    for values in found[1:]:
        torch.testing.assert_close(values, found[0])


def test_double_backward_is_rejected_if_eager_would_differ() -> None:
    x = torch.ones(3, requires_grad=True)
    dropped = torch.compile(lambda x: nn.functional.dropout(x**3).sum(), backend=backend(fallback="warn"))
    with pytest.raises(SessionError, match="create_graph=True.*has dropout"):
        torch.autograd.grad(dropped(x), x, create_graph=True)
    strict = torch.compile(lambda x: (x**3).sum(), backend=backend())
    with pytest.raises(SessionError, match="create_graph=True.*fallback='error'"):
        torch.autograd.grad(strict(x), x, create_graph=True)
    changed = torch.compile(lambda x, y: (x * y).sum(), backend=backend(fallback="warn"))
    y = torch.ones(3, requires_grad=True)
    loss = changed(x, y)
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(SessionError, match="create_graph=True.*changes its inputs"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_graphs_of_only_views_have_no_session() -> None:
    engine = backend()
    step = torch.compile(lambda x: x.detach().view(-1), backend=engine)
    x = torch.randn(2, 3)
    assert torch.equal(step(x), x.view(-1))
    assert not engine.compile_log.graphs


def test_a_fallback_names_a_defect_and_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_ort.backend.graph_signature.saved_inputs", lambda _: None)
    step = torch.compile(lambda x: x.exp(), backend=backend())
    with pytest.raises(
        CompileError, match=r"because of a defect of lit_ort: TypeError: .*, at backend/graph_signature.py:\d+"
    ):
        step(torch.ones(3, requires_grad=True))


def test_a_graph_that_cannot_be_prepared_runs_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no numbers today")

    monkeypatch.setattr("lit_ort.backend.backend.separate_numbers", broken)
    engine, x = backend(fallback="warn"), torch.ones(3)
    step = torch.compile(lambda x: x.exp().sum(), backend=engine)
    with pytest.warns(LitOrtWarning, match="RuntimeError: no numbers today"):
        assert torch.equal(step(x), x.exp().sum())
    assert torch.equal(step(x), x.exp().sum())
    assert [graph.kind for graph in engine.compile_log.graphs] == ["eager"]
    torch.compiler.reset()
    with pytest.raises(CompileError, match="no numbers today"):
        torch.compile(lambda x: x.exp().sum(), backend=backend())(x)


def test_tied_and_frozen_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 6)
            self.mix = nn.Linear(6, 6)
            self.mix.weight.requires_grad_(False)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embedding.weight

    def step(module: Any, tokens: Tensor) -> Tensor:
        hidden = module.mix(module.embedding(tokens))
        return F.cross_entropy(module.head(hidden).flatten(0, 1), tokens.flatten())

    module = Tied()
    assert_same_step(module, step, torch.randint(11, (3, 4)))
    assert module.mix.weight.grad is None
    assert module.mix.bias.grad is not None


class Matrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(5, 5))


TWICE: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda x: x * x,
    "product": lambda x: x @ x,
    "product with its transpose": lambda x: x @ x.T,
    "linear": lambda x: F.linear(x, x),
    "sum and product": lambda x: torch.addmm(x, x, x),
    "concatenation": lambda x: torch.cat([x, x]),
}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("operator", TWICE)
def test_one_operator_that_reads_a_parameter_twice(operator: str, split: bool) -> None:
    twice = TWICE[operator]
    module, twin = Matrix(), Matrix()
    engine = backend()

    def step(weight: Tensor) -> Tensor:
        value = twice(weight).tanh()
        return value if split else value.sum()

    torch.compile(step, backend=engine)(module.weight).sum().backward()
    step(twin.weight).sum().backward()
    assert relative_error(gradients(module)["weight"], gradients(twin)["weight"]) < 1e-5
    assert [graph.kind for graph in engine.compile_log.graphs] == ["split" if split else "fused"]


def test_a_parameter_that_the_loss_does_not_depend_on_has_no_gradient() -> None:
    module = nn.ModuleDict({"used": nn.Linear(3, 3), "logged": nn.Linear(3, 3)})

    def step(module: nn.ModuleDict, x: Tensor) -> tuple[Tensor, Tensor]:
        return module["used"](x).sum(), module["logged"](x).detach()

    loss, logged = torch.compile(step, backend=backend())(module, torch.randn(2, 3))
    loss.backward()
    assert module["logged"].weight.grad is None
    assert module["used"].weight.grad is not None
    assert not logged.requires_grad


def test_non_contiguous_bool_and_integer_inputs() -> None:
    module = nn.Linear(4, 4)
    assert_same_step(
        module,
        lambda m, x, mask, index: (m(x)[index] * mask).sum(),
        torch.randn(4, 6).T,
        torch.randn(3, 4) > 0,
        torch.tensor([0, 2, 5]),
    )


@pytest.mark.parametrize("kind", ["detach", "no_grad"])
def test_gradients_stop_where_eager_stops_them(kind: str) -> None:
    def step(module: nn.Module, x: Tensor) -> Tensor:
        hidden = module(x)
        if kind == "detach":
            target = hidden.detach() * 2
        else:
            with torch.no_grad():
                target = hidden * 2
        return (hidden * target).sum() + (target**2).mean()

    assert_same_step(nn.Linear(4, 4), step, torch.randn(3, 4))


def test_a_graph_with_other_outputs_without_gradient_is_fused() -> None:
    engine = backend()
    module, (x, y) = Classifier(), classes(9)

    def step(module: Classifier, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = module(x)
        return F.cross_entropy(logits, y), logits.detach(), (logits.argmax(-1) == y).float().mean()

    loss, logits, accuracy = torch.compile(step, backend=engine)(module, x, y)
    assert engine.compile_log.graphs[0].kind == "fused"
    torch.testing.assert_close(logits, module(x).detach())
    assert accuracy == (module(x).argmax(-1) == y).float().mean()
    assert loss.requires_grad
    assert not accuracy.requires_grad


def test_graph_breaks_run_as_split_sessions() -> None:
    engine = backend()

    def step(module: Classifier, x: Tensor, y: Tensor) -> Tensor:
        logits = module(x)
        torch._dynamo.graph_break()
        return F.cross_entropy(logits * 2, y)

    module, (x, y) = Classifier(), classes(9)
    twin = copy.deepcopy(module)
    torch.compile(step, backend=engine)(module, x, y).backward()
    F.cross_entropy(twin(x) * 2, y).backward()
    assert sorted(graph.kind for graph in engine.compile_log.graphs) == ["fused", "split"]
    for name, gradient in gradients(twin).items():
        assert relative_error(gradients(module)[name], gradient) < 1e-5


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_split_sessions_in_flight(order: tuple[int, ...]) -> None:
    engine = backend()
    module = Classifier()
    twin = copy.deepcopy(module)
    compiled = torch.compile(module, backend=engine)
    batches = [torch.randn(7, 6) for _ in order]
    outputs = [compiled(batch) for batch in batches]
    assert engine.compile_log.graphs[0].kind == "split"
    for k in order:
        module.zero_grad()
        twin.zero_grad()
        weights = torch.randn_like(outputs[k])
        # Data parallelism and pipelines run the backward in the autograd engine's thread.
        thread = threading.Thread(target=outputs[k].backward, args=(weights,))
        thread.start()
        thread.join()
        twin(batches[k]).backward(weights)
        for name, gradient in gradients(twin).items():
            assert relative_error(gradients(module)[name], gradient) < 1e-5


def test_split_graph_with_an_unused_output() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.b = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.a(x), self.b(x), (x > 0).sum()

    module, x = Two(), torch.randn(4, 3)
    first, _, count = torch.compile(module, backend=backend())(x)
    first.sum().backward()
    torch.testing.assert_close(module.a.weight.grad, x.sum(0).expand(3, 3))
    assert module.b.weight.grad is None or not module.b.weight.grad.any()
    assert count == (x > 0).sum()


def test_a_forward_without_a_backward_frees_its_memory() -> None:
    import psutil

    module = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512))
    compiled = torch.compile(module, backend=backend())
    x = torch.randn(2048, 512)
    for _ in range(5):
        compiled(x)
    before = psutil.Process().memory_info().rss
    for _ in range(40):
        compiled(x)
    assert psutil.Process().memory_info().rss - before < 60e6


def test_several_shapes() -> None:
    engine = backend()
    module = Classifier()
    loss = torch.compile(Classifier.loss, backend=engine)
    for rows in (7, 5, 3, 7, 5):
        x, y = classes(rows)
        torch.testing.assert_close(loss(module, x, y), module.loss(x, y))
    assert len(engine.compile_log.graphs) == 2
    assert not [graph for graph in engine.compile_log.graphs if graph.fallback]


class Clipped(torch.autograd.Function):
    """Its gradient is not linear in that of its result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.clamp(-0.02, 0.02)


def of_function(x: Tensor) -> Tensor:
    return Clipped.apply(x * 2).square().sum()


def of_hook(x: Tensor) -> Tensor:
    doubled = x * 2
    doubled.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    return doubled.square().sum()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("scale", [1.0, 0.25, 20.0])
@pytest.mark.parametrize("function", [of_function, of_hook])
def test_a_loss_that_is_scaled_behind_a_backward_that_is_not_linear(
    function: Callable[[Tensor], Tensor], scale: float
) -> None:
    gradients = []
    for run in (function, torch.compile(function, backend=backend())):
        x = torch.linspace(-0.1, 0.1, 9, requires_grad=True)
        (run(x) * scale).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_sizes_that_a_graph_serves_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[CompiledGraph] = []
    original = CompiledGraph.__init__

    def recording(self: CompiledGraph, *args: Any) -> None:
        original(self, *args)
        kept.append(self)

    monkeypatch.setattr(CompiledGraph, "__init__", recording)
    compiled = torch.compile(lambda x: (x * 2).sum(), backend=backend(), dynamic=True)
    for rows in range(2, 150):
        assert compiled(torch.ones(rows, 3)) == 6 * rows
    (graph,) = kept
    assert len(graph._executables) <= 2
    assert len(graph._served) <= MOST_SIZES


def test_a_graph_that_is_refused_for_two_sizes_is_not_traced_again() -> None:
    engine = backend(fallback="warn", dynamic="never")
    function = torch.compile(sparse_gradient, backend=engine)
    with pytest.warns(LitOrtWarning, match=REASON):
        function(torch.randn(4, 3, requires_grad=True))
    for rows in (5, 6, 7):
        function(torch.randn(rows, 3, requires_grad=True))
    # Each size is another graph of Dynamo's, until it makes one for any.
    assert len(engine.compile_log.graphs) <= 3


def test_many_numbers_run_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_ort.backend.backend.MANY_SIGNATURES", 3)
    engine = backend()
    function = lambda x, number: torch.where(x > number, x, 0.0).sum()  # noqa: E731
    compiled = torch.compile(function, backend=engine)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LitOrtWarning)
        for number in (0.5, 0.25, 0.125, 0.1, 0.2, 0.3, 0.4):
            x = torch.rand(9, requires_grad=True)
            torch.testing.assert_close(compiled(x, number), function(x, number))
    assert len(engine.compile_log.graphs) <= 5


def test_compiling_for_many_shapes_causes_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_ort.backend.backend.MANY_SIGNATURES", 3)
    compiled = torch.compile(lambda x: (x * 2).sum(), backend=backend(dynamic="never"))
    for rows in (4, 5, 6):
        compiled(torch.ones(rows, requires_grad=True))
    with pytest.warns(LitOrtWarning, match="compiled for 3 different sizes"):
        compiled(torch.ones(7, requires_grad=True))


def test_forwards_without_gradients() -> None:
    engine = backend()
    module, (x, y) = Classifier(), classes(7)
    loss = torch.compile(Classifier.loss, backend=engine)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(loss(module, x, y), module.loss(x, y))
    assert {graph.kind for graph in engine.compile_log.graphs} == {"forward"}


def test_fallback_warns_once_and_runs_in_eager() -> None:
    engine = backend(fallback="warn")
    function = torch.compile(sparse_gradient, backend=engine)
    x = torch.randn(4, 3, requires_grad=True)
    with pytest.warns(LitOrtWarning, match=f"(?s)runs in eager PyTorch.*{REASON}.*torch.compiler.disable"):
        function(x).backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(sparse_gradient(x), x)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(x)
    report = engine.compile_log.graphs[0]
    assert report.kind == "eager"
    assert report.fallback is not None
    assert REASON in report.fallback


def test_a_function_that_dynamo_fails_to_trace_runs_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise AttributeError("nothing")

    monkeypatch.setattr("torch._dynamo.convert_frame.trace_frame", broken)
    with pytest.warns(LitOrtWarning, match="AttributeError: nothing"):
        assert torch.compile(lambda x: x + 1, backend=backend(fallback="warn"))(torch.ones(())) == 2
    with pytest.raises(InternalTorchDynamoError, match="AttributeError: nothing"):
        torch.compile(lambda x: x + 1, backend=backend())(torch.ones(()))


def test_a_reason_is_reported_once_and_counted() -> None:
    engine = backend(fallback="warn", dynamic="never")
    step = torch.compile(sparse_gradient, backend=engine)
    with pytest.warns(LitOrtWarning, match=REASON) as caught:
        step(torch.randn(3, 4, requires_grad=True))
    assert [Path(warning.filename).name for warning in caught] == ["compare.py"]
    for rows in (4, 5):
        step(torch.randn(rows, 4, requires_grad=True))
    explanation = explain(engine)
    assert len(explanation.fallbacks) == 3
    first, second, *advice = str(explanation).splitlines()
    assert first == "lit_ort: 3 graphs (3 eager), in eager PyTorch, no graph break"
    assert second.endswith("100% eager PyTorch")
    (fallback,) = [text for text in advice if "fallback" in text]
    assert fallback.startswith("fallback, 3 times: ")
    assert "compare.py" in fallback


def test_a_share_out_of_range_raises_as_in_eager() -> None:
    engine = backend(fallback="warn")
    loss = torch.compile(lambda x, y: F.binary_cross_entropy(x * 2, y), backend=engine)
    target = torch.rand(3)
    for x in (torch.tensor([0.1, 0.2, 0.7]), torch.tensor([-0.1, 0.2, 0.3])):
        with pytest.raises(RuntimeError, match="Eager: all elements of input should be between 0 and 1"):
            loss(x, target)
        loss(torch.rand(3) / 2, target)
    assert [graph.fallback for graph in engine.compile_log.graphs] == [None]


@pytest.mark.parametrize("bad", [6, -7])
def test_an_index_of_two_dimensions_out_of_range_raises_as_in_eager(bad: int) -> None:
    engine = backend(fallback="warn")
    pick = torch.compile(lambda x, row, column: x.exp()[row, column].sum(), backend=engine)
    x, rows = torch.randn(5, 6), torch.arange(3)
    with pytest.raises(IndexError, match=f"{bad} is out of bounds for dimension"):
        pick(x, rows, torch.tensor([1, bad, 0]))
    torch.testing.assert_close(pick(x, rows, torch.tensor([1, -6, 5])), x.exp()[rows, torch.tensor([1, 0, 5])].sum())


def test_a_label_out_of_range_raises_as_in_eager() -> None:
    module = Classifier()
    loss = torch.compile(Classifier.loss, backend=backend())
    x = torch.randn(3, 6)
    for label in (5, -1):
        with pytest.raises(SessionError, match="index"):
            loss(module, x, torch.tensor([0, 1, label]))
    engine = backend(fallback="warn")
    loss = torch.compile(Classifier.loss, backend=engine)
    loss(module, x, torch.tensor([0, 1, 2]))
    with pytest.raises(IndexError):
        loss(module, x, torch.tensor([0, 1, 5]))
    # The batch is wrong, not the graph.
    loss(module, x, torch.tensor([0, 1, 2]))
    assert [graph.kind for graph in engine.compile_log.graphs] == ["fused"]


def test_a_run_that_fails_where_eager_does_not_falls_back_for_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = backend(fallback="warn", dynamic="never")
    step = torch.compile(lambda x: x.exp().sum(), backend=engine)
    step(torch.ones(3))
    run = Session.run

    def failing(session: Session, inputs: RunInputs) -> list[Tensor]:
        if inputs.tensors[0].numel() == 4:
            raise SessionError("no kernel for four", remedy="Use three.")
        return run(session, inputs)

    monkeypatch.setattr(Session, "run", failing)
    with pytest.warns(LitOrtWarning, match="no kernel for four"):
        torch.testing.assert_close(step(torch.ones(4)), torch.ones(4).exp().sum())
    for size in (3, 4):
        torch.testing.assert_close(step(torch.ones(size)), torch.ones(size).exp().sum())
    assert [graph.kind for graph in engine.compile_log.graphs] == ["forward", "forward", "eager"]


def test_a_graph_runs_if_the_dump_folder_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    engine = backend(dump_dir=str(tmp_path))
    with pytest.warns(LitOrtWarning, match=r"dump_dir: .*1_captured.txt can't be written: No space left on device"):
        result = torch.compile(lambda x: x.exp().sum(), backend=engine)(torch.ones(3))
    torch.testing.assert_close(result, torch.ones(3).exp().sum())
    assert [graph.fallback for graph in engine.compile_log.graphs] == [None]


def test_explain_and_dump(tmp_path: Path) -> None:
    engine = backend(dump_dir=str(tmp_path), disable_passes=("dropout",))
    torch.compile(Classifier.loss, backend=engine)(Classifier(), *classes(7))
    assert "region over" in (tmp_path / "graph_0" / "4_forward.txt").read_text()
    first, second = str(explain(engine)).splitlines()
    assert first == "lit_ort: 1 graph (1 fused), no fallback, no graph break"
    assert re.fullmatch(r"time of runs: \d+% ONNX Runtime, \d+% torch operators .*, 0% eager PyTorch", second)
    text = explain(engine).details()
    assert "fused, 8 inputs, 6 gradients" in text
    assert "pass     linear_cross_entropy: 0 rewritten, 1 declined" in text
    assert "elements, fewer than" in text
    assert "pass     dropout" not in text
    report = engine.compile_log.graphs[0]
    assert report.operators_before["aten.cross_entropy_loss.default"] == 1
    assert report.operators_after["Matmul" if openmp.uses_openmp() else "Gemm"] > 0
    assert report.operators_after["Region"] == sum(report.regions.values()) > 0
    assert "no call of Python" in text
    assert report.seconds > 0
    stages = sorted(path.name for path in (tmp_path / "graph_0").iterdir())
    assert stages == ["1_captured.txt", "2_fused.txt", "3_joint.txt", "4_forward.onnx", "4_forward.txt"]
    with pytest.raises(TypeError, match="nothing to show"):
        explain(object())


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.1, amsgrad=True),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize(
    ("name", "verify"),
    [
        ("sgd", True),
        ("adam", False),
        *(pytest.param(*case, marks=pytest.mark.sweep) for case in (("adamw", True), ("sgd", False))),
    ],
)
@pytest.mark.sampled(1)
def test_compiled_steps_of_optimizers(name: str, verify: bool) -> None:
    """Dynamo stores parameters and state as attributes of the graph, which changes them in place."""

    def steps(step: Callable[[torch.optim.Optimizer], None]) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(4, 3)) for _ in range(2)]
        optimizers = [OPTIMIZERS[name]([parameter]) for parameter in parameters]
        for k in range(3):
            for parameter, optimizer in zip(parameters, optimizers, strict=True):
                parameter.grad = (parameter.detach() * (k + 1)).sin()
                step(optimizer)
        return [parameter.detach() for parameter in parameters], optimizers[1].state[parameters[1]]

    engine = backend(verify_first_step=verify)
    compiled = torch.compile(lambda optimizer: optimizer.step(), backend=engine)
    torch.testing.assert_close(steps(compiled), steps(lambda optimizer: optimizer.step()), rtol=1e-4, atol=1e-5)
    assert engine.compile_log.graphs
    assert all(graph.fallback is None for graph in engine.compile_log.graphs)
