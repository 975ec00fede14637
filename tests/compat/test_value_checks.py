"""Steps that raise for values of tensors: one graph, and eager's exception."""

from __future__ import annotations

import contextlib
import linecache
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributions, nn, tensor
from torch._dynamo.testing import CompileCounter
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lit_ort.backend.tracing_settings import dynamo_settings
from tests.compare import backend, mostly
from tests.compat.canary import canary

# Statements of a step in which `loss` is a scalar that is not finite for the second batch, `x` float[4, 3].
ONE_GRAPH = {
    "assert": "assert torch.isfinite(loss)",
    "assert with a message": "assert torch.isfinite(loss), 'loss is not finite'",
    "assert with a value": "assert torch.isfinite(loss), f'{loss=} of {tuple(x.shape)} in {self.name}'",
    "assert of several": "assert torch.isfinite(loss) and (x < 9).all(), 'out of range'",
    "assert of a float": "assert loss - loss + 1 > 0",
    "assert of an integer": "assert torch.isfinite(loss).long()",
    "if": "if torch.isnan(loss): raise RuntimeError('nan')",
    "if not": "if not loss.isfinite().all(): raise FloatingPointError(f'{self.name}: {x[0, 0] * 2}')",
    "if else": "if loss.isfinite():\n            loss = loss + 1\n        else:\n            raise ValueError",
    "if or": "if torch.isnan(loss) or torch.isinf(loss): raise ValueError(len(x))",
    "if with numbers": "if self.name and loss.isnan(): raise ValueError(self.name)",
    "exception of one's own": "if loss.isnan(): raise Skipped(i, loss, rows=len(x))",
    "message of several lines": "if loss.isnan():\n            text = [f'{k}={v}' for k, v in zip('ab', x[0])]\n"
    "            raise ValueError('\\n'.join(text))",
    "message with a branch": "if loss.isnan(): raise ValueError('a' if i > 1 else 'b' if len(x) else 'c')",
    "attribute that is assigned": "self.last = loss * 2\n        if loss.isnan(): raise ValueError(f'{self.last}')",
    "new object": "p = Pair(loss, [i, (x, {'a': x.shape})])\n        assert loss.isfinite(), p.text()",
    "in a function": "check(loss, 'loss')",
    "in a method": "self.check(loss)",
    "in a loop": "for k in range(3):\n            if (loss * k).isnan(): raise ValueError(k)",
    "behind a log": "self.outputs.append(i)\n        assert loss.isfinite()",
    "without gradients": "with torch.no_grad():\n            check(loss, 'in a context')",
    "in place afterwards": "bad = loss.isnan()\n        if bad: raise ValueError\n        bad.fill_(True)",
    "a cell": "f = lambda: loss\n        assert loss.isfinite(), f'{loss}'\n        f()",
    "gaussian_nll_loss": "loss = functional.gaussian_nll_loss(x, x, torch.nan_to_num(x * 0, nan=-1.0) + 0.1)",
    "GaussianNLLLoss": "loss = nn.GaussianNLLLoss()(x, x, torch.nan_to_num(x * 0, nan=-1.0) + 0.1)",
    "clip_grad_norm_": "nn.utils.get_total_norm([loss.detach()], error_if_nonfinite=True)",
}
# These are traced as they are without the mend.
MORE_GRAPHS = {
    "caught": "try: check(loss, 'caught')\n        except ValueError: loss = x.sum() * 0",
    "caught outside": "loss = guarded(loss)",
    "suppressed": "with contextlib.suppress(ValueError): check(loss, 'suppressed')",
    "finally": "try: check(loss, 'finally')\n        finally: self.outputs.append(2)",
    "raised from an error": "try: int('a')\n        except ValueError as e:\n"
    "            if loss.isnan(): raise KeyError('b') from e",
    "branch that returns": "if loss.isnan(): return x.sum() * 0",
    "branch that may return": "if loss.isnan():\n            if i < 9: return x.sum()\n            raise ValueError",
    "branch that computes": "if loss.isnan(): loss = loss * 0",
    "in a checkpoint": "loss = checkpoint(check, loss, 'in a checkpoint', use_reentrant=False)",
    "both sides": "if loss.isnan(): raise ValueError(1)\n        elif i == 9: raise ValueError(2)",
}


class Skipped(Exception):
    def __init__(self, index: int, loss: torch.Tensor, rows: int) -> None:
        super().__init__(f"{index} {loss} {rows}")


class Pair:
    def __init__(self, first: Any, second: Any) -> None:
        self.first = first
        self.second = second

    def text(self) -> str:
        return f"{self.first} {self.second}"


def check(value: torch.Tensor, name: str) -> torch.Tensor:
    if not torch.isfinite(value):
        raise ValueError(f"{name} is {value}")
    return value * 1


def guarded(value: torch.Tensor) -> torch.Tensor:
    try:
        return check(value, "guarded")
    except ValueError:
        return torch.nan_to_num(value)


class Module(nn.Module):
    step: Any

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.name, self.last = nn.Linear(3, 2), "net", None
        self.outputs: list[int] = []

    def check(self, value: torch.Tensor) -> None:
        if value.isnan():
            raise ValueError(f"{self.name} {self.outputs}")


def module_of(name: str, statements: str) -> Module:
    source = "def step(self, x, i):\n        loss = self.net(x).square().mean()\n"
    source += f"        {statements}\n        return loss\n"
    file = f"<checks {name}>"
    # Torch reads the lines of code that it traces.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {"torch": torch, "nn": nn, "functional": functional, "contextlib": contextlib}
    names.update(Skipped=Skipped, Pair=Pair, check=check, guarded=guarded, checkpoint=checkpoint)
    exec(compile(source, file, "exec"), names)
    return type("Written", (Module,), {"step": names["step"]})()


def outcome(step: Callable[..., Any], *args: Any) -> Any:
    """A step's result, or its exception without the name of the function that computes gradients."""
    try:
        return step(*args)
    except Exception as error:
        return type(error).__name__, re.sub(r", grad_fn=<\w+>", "", str(error))


def graphs_of(name: str, statements: str, engine: Any) -> int:
    """Runs good and bad batches in eager and compiled, requires the same outcomes, and returns the number of breaks."""
    eager, module = module_of(name, statements), module_of(name, statements)
    step = torch.compile(module.step, backend=engine)
    for i, factor in enumerate((1.0, 1.0, math.nan, 1.0)):
        x = torch.ones(4, 3) * factor
        with dynamo_settings("step", strict=False, report=lambda *_: None, compile_log=engine.compile_log):
            expected, actual = outcome(eager.step, x, i), outcome(step, x, i)
        if isinstance(expected, tuple):
            assert actual == expected
        else:
            torch.testing.assert_close(actual, expected, equal_nan=True)
        assert module.outputs == eager.outputs
    return len(engine.compile_log.breaks)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", mostly(pytest.mark.slow, ONE_GRAPH | MORE_GRAPHS, 6))
def test_exceptions_and_graphs(name: str) -> None:
    effect = "a step that raises for values of tensors has several graphs"
    with canary("generic_jump of torch._dynamo.symbolic_convert", "value_checks", effect):
        torch.compiler.reset()
        breaks = graphs_of(name, {**ONE_GRAPH, **MORE_GRAPHS}[name], backend(fallback="warn"))
        assert name in MORE_GRAPHS or not breaks


_LOCATION = {"loc": tensor([0.0]), "scale": tensor([1.0])}
_COUNTS = {"total_count": tensor([5.0]), "probs": tensor([0.3])}
_BETA = {"concentration1": tensor([2.0]), "concentration0": tensor([3.0])}
_CLASSES = {"probs": tensor([0.2, 0.8])}
_TRIANGLE = torch.eye(2)
# Their parameters, and a value.
DISTRIBUTIONS: dict[str, tuple[dict[str, Any], torch.Tensor]] = {
    "Normal": (_LOCATION, tensor([0.3])),
    "Bernoulli": ({"logits": tensor([0.3])}, tensor([1.0])),
    "Beta": (_BETA, tensor([0.4])),
    "Binomial": (_COUNTS, tensor([2.0])),
    "Categorical": (_CLASSES, tensor([1.0])),
    "Cauchy": (_LOCATION, tensor([0.3])),
    "Chi2": ({"df": tensor([3.0])}, tensor([1.0])),
    "ContinuousBernoulli": ({"probs": tensor([0.3])}, tensor([0.4])),
    "Dirichlet": ({"concentration": tensor([2.0, 3.0])}, tensor([0.4, 0.6])),
    "Exponential": ({"rate": tensor([2.0])}, tensor([1.0])),
    "FisherSnedecor": ({"df1": tensor([2.0]), "df2": tensor([3.0])}, tensor([1.0])),
    "Gamma": ({"concentration": tensor([2.0]), "rate": tensor([3.0])}, tensor([1.0])),
    "Geometric": ({"probs": tensor([0.3])}, tensor([2.0])),
    "Gumbel": (_LOCATION, tensor([0.3])),
    "HalfCauchy": ({"scale": tensor([1.0])}, tensor([0.5])),
    "HalfNormal": ({"scale": tensor([1.0])}, tensor([0.5])),
    "InverseGamma": ({"concentration": tensor([2.0]), "rate": tensor([3.0])}, tensor([1.0])),
    "Kumaraswamy": (_BETA, tensor([0.4])),
    "LKJCholesky": ({"dim": 2, "concentration": tensor(1.0)}, _TRIANGLE),
    "Laplace": (_LOCATION, tensor([0.3])),
    "LogNormal": (_LOCATION, tensor([1.5])),
    "LogisticNormal": (_LOCATION, tensor([0.4, 0.6])),
    "Multinomial": ({"total_count": 3, "probs": tensor([0.4, 0.6])}, tensor([1.0, 2.0])),
    "MultivariateNormal": ({"loc": tensor([0.0, 1.0]), "scale_tril": _TRIANGLE}, tensor([0.4, 0.6])),
    "NegativeBinomial": (_COUNTS, tensor([2.0])),
    "OneHotCategorical": (_CLASSES, tensor([0.0, 1.0])),
    "Pareto": ({"scale": tensor([1.0]), "alpha": tensor([2.0])}, tensor([2.0])),
    "Poisson": ({"rate": tensor([2.0])}, tensor([3.0])),
    "RelaxedBernoulli": ({"temperature": tensor([1.0]), "probs": tensor([0.3])}, tensor([0.4])),
    "RelaxedOneHotCategorical": ({"temperature": tensor(1.0), **_CLASSES}, tensor([0.4, 0.6])),
    "StudentT": ({"df": tensor([3.0]), **_LOCATION}, tensor([0.3])),
    "Uniform": ({"low": tensor([0.0]), "high": tensor([1.0])}, tensor([0.3])),
    "VonMises": ({"loc": tensor([0.0]), "concentration": tensor([1.0])}, tensor([0.3])),
    "Weibull": ({"scale": tensor([1.0]), "concentration": tensor([2.0])}, tensor([0.5])),
}
# One of each kind of parameters, and of values: numbers, counts, classes, simplexes, matrices, bounds.
REPRESENTATIVES = ["Normal", "Bernoulli", "Beta", "Binomial", "Categorical", "LKJCholesky", "LogNormal", "Multinomial"]
REPRESENTATIVES += ["MultivariateNormal", "Poisson", "RelaxedOneHotCategorical", "Uniform", "VonMises"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name",
    [
        *mostly(pytest.mark.slow, REPRESENTATIVES, len(REPRESENTATIVES)),
        *(pytest.param(name, marks=pytest.mark.sweep) for name in sorted(DISTRIBUTIONS.keys() - set(REPRESENTATIVES))),
    ],
)
def test_validation_of_distributions(name: str) -> None:
    kind = getattr(distributions, name)
    parameters, value = DISTRIBUTIONS[name]

    def step(parameters: dict[str, Any], value: torch.Tensor) -> torch.Tensor:
        return kind(**parameters, validate_args=True).log_prob(value).sum()

    wrong = {key: own * math.nan if isinstance(own, torch.Tensor) else own for key, own in parameters.items()}
    torch.compiler.reset()
    engine = backend()
    compiled = torch.compile(step, backend=engine)
    for arguments in ((parameters, value), (wrong, value), (parameters, value * math.nan)):
        assert outcome(compiled, *arguments) == pytest.approx(outcome(step, *arguments), rel=1e-5)
    assert len(engine.compile_log.graphs) == 1


def test_divergence_of_types_that_are_new_to_torch() -> None:
    class Own(distributions.Normal):
        pass

    def step(x: torch.Tensor) -> torch.Tensor:
        return distributions.kl_divergence(Own(x, x.exp()), distributions.Independent(Own(x, x.exp()), 0).base_dist)

    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(step, backend=counter)
    for _ in range(2):
        with dynamo_settings("step", strict=True):
            torch.testing.assert_close(compiled(torch.ones(3)), torch.zeros(3))
    assert counter.frame_count == 1


def labels_and_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if not labels.max() < logits.shape[1]:
        raise AssertionError(f"{labels.max()} is out of range")
    return functional.cross_entropy(logits, labels)


@pytest.mark.parametrize("fallback", ["warn", "error"])
def test_check_before_an_operator_that_raises(fallback: str) -> None:
    torch.compiler.reset()
    engine = backend(fallback=fallback)
    step = torch.compile(labels_and_loss, backend=engine)
    logits = torch.ones(2, 4, requires_grad=True)
    for last in (1, 4, 2):
        labels = torch.tensor([0, last])
        assert outcome(step, logits, labels) == outcome(labels_and_loss, logits, labels)
    assert [graph.fallback for graph in engine.compile_log.graphs] == [None]
