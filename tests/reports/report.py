"""Turns programs of public bug reports into tests that compare them with eager."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_ort import LitOrtWarning, ORTStrategy, explain
from tests.compare import backend
from tests.lightning_models import trainer

F = TypeVar("F", bound=Callable[..., Any])
Compile = Callable[[F], F]
Strategy = Callable[[], Any]
Values = dict[str, Any]

# Relative and absolute.
FLOAT32 = (1e-4, 1e-6)
TRAINED = (1e-4, 1e-5)
BFLOAT16 = (2e-2, 2e-2)
AMPLIFIED = (1e-2, 1e-4)


def steps(
    *, falls_back: str | None = None, aot_can: bool = False, strides: bool = False, bfloat16: bool = False
) -> Callable[..., Any]:
    """Makes a test of a program that receives a compiler for its steps: its results are the same as in eager.

    Args:
        falls_back: a pattern of the only warning, for what `aot_eager` can't do either; None if nothing may run in
            eager.
        aot_can: `aot_eager`, whose operators are torch's, can do what falls back.
        strides: compare the strides of results, too.
        bfloat16: the program computes in bfloat16, so that results agree to few digits.
    """

    def test_of(program: Callable[[Compile[Any]], Any]) -> Callable[[], None]:
        def test() -> None:
            engine = backend(fallback="error" if falls_back is None else "warn")
            expected = results_of(program, lambda step: step)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", LitOrtWarning)
                actual = results_of(program, lambda step: torch.compile(step, backend=engine))
            assert_same(actual, expected, strides, BFLOAT16 if bfloat16 else FLOAT32)
            assert engine.compile_log.graphs or falls_back
            messages = [str(warning.message) for warning in caught]
            if falls_back is None:
                assert not messages
                return
            assert len(messages) == 1
            assert re.search(falls_back, messages[0]), messages
            if aot_can:
                return
            with pytest.raises(Exception):  # noqa: B017, PT011 - it raises or is wrong
                assert_aot_eager_can(program, expected)

        return named(test, program)

    return test_of


def trainings(*, falls_back: str | None = None, bfloat16: bool = False, amplifies: bool = False) -> Callable[..., Any]:
    """Makes a test of a program that receives a strategy for its Trainers: its results are the same as in eager.

    Args:
        falls_back: a pattern of the only warning, for what Dynamo can't trace; None if nothing may run in eager.
        bfloat16: the program computes in bfloat16, so that results agree to few digits.
        amplifies: the program amplifies rounding errors, eager's included.
    """
    tolerances = BFLOAT16 if bfloat16 else AMPLIFIED if amplifies else TRAINED

    def test_of(program: Callable[[Strategy], Any]) -> Callable[[], None]:
        def test() -> None:
            strategies: list[ORTStrategy] = []

            def strategy() -> ORTStrategy:
                strategies.append(ORTStrategy(fallback="error" if falls_back is None else "warn"))
                return strategies[-1]

            expected = results_of(program, lambda: "auto")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", LitOrtWarning)
                actual = results_of(program, strategy)
            assert_same(actual, expected, False, tolerances)
            if falls_back is None:
                assert not caught
                assert all(explain(used).graphs for used in strategies)
                return
            assert len(caught) == 1
            assert re.search(falls_back, str(caught[0].message)), caught[0].message

        return named(test, program)

    return test_of


def row(*shape: int) -> Tensor:
    """Increasing numbers of both signs in a tensor of a shape."""
    return torch.linspace(-1.5, 2.0, torch.Size(shape).numel()).view(shape)


def assert_aot_eager_can(program: Callable[..., Any], expected: Values) -> None:
    actual = results_of(program, lambda step: torch.compile(step, backend="aot_eager"))
    assert_same(actual, expected, False, FLOAT32)


class Module(LightningModule):
    """Trains modules with a loss of each batch, by SGD.

    Args:
        parts: the modules.
        loss_of: the loss of a batch.
    """

    def __init__(self, parts: Sequence[nn.Module], loss_of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.parts, self.loss_of, self.losses = nn.ModuleList(parts), loss_of, []

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self.loss_of(batch[0])

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch[0]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach().float())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


def trained(
    parts: Sequence[nn.Module],
    loss_of: Callable[[Tensor], Tensor],
    rows: Tensor,
    strategy: Strategy,
    validates: bool = False,
    module: type[Module] = Module,
    **settings: Any,
) -> Any:
    """Losses, metrics and weights of a training of two epochs in batches of 8 rows."""
    trainee = module(parts, loss_of)
    loader = DataLoader(TensorDataset(rows), 8)
    fitting = trainer(strategy(), **settings)
    fitting.fit(trainee, loader, loader if validates else None)
    return trainee.losses, dict(fitting.callback_metrics), trainee.state_dict()


def named(test: Callable[[], None], program: Callable[..., Any]) -> Callable[[], None]:
    test.__name__, test.__qualname__, test.__doc__ = program.__name__, program.__qualname__, program.__doc__
    test.__module__ = program.__module__
    test.program = program  # pyright: ignore
    return test


def results_of(program: Callable[..., Any], argument: Any) -> Values:
    """The results of a program in a fresh compiler, by their place."""
    torch.compiler.reset()
    torch.manual_seed(0)
    return dict(flat(program(argument), ""))


def flat(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        yield from flat(value.state_dict(), f"{place}.state")
        yield from flat({name: p.grad for name, p in value.named_parameters()}, f"{place}.gradients")
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from flat(part, f"{place}.{key}")
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for key, part in enumerate(value):
            yield from flat(part, f"{place}.{key}")
    else:
        yield place, value


def assert_same(actual: Values, expected: Values, strides: bool, tolerances: tuple[float, float]) -> None:
    """Raises AssertionError for the first result that differs by more than rounding."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    for place, reference in expected.items():
        value = actual[place]
        if isinstance(reference, Tensor):
            assert isinstance(value, Tensor), f"{place}: {value}, but a tensor in eager"
            assert value.requires_grad == reference.requires_grad, f"{place}.requires_grad: {value.requires_grad}"
            torch.testing.assert_close(
                value,
                reference,
                equal_nan=True,
                check_stride=strides,
                msg=lambda text, place=place: f"{place}: {text}",
                rtol=tolerances[0],
                atol=tolerances[1],
            )
        elif isinstance(reference, float):
            assert value == pytest.approx(reference, rel=1e-4, abs=1e-6, nan_ok=True), place
        else:
            assert value == reference, f"{place}: {value}, but {reference} in eager"
