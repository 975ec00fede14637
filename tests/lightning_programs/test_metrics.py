"""Metrics of torchmetrics' classification and regression packages: the same values as in eager, one graph per step."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric, MetricCollection, classification, regression

from lit_ort import LitOrtWarning, ORTStrategy, explain
from tests.compare import mostly
from tests.lightning_models import trainer

pytestmark = [
    # Metrics warn of classes without samples and similar, as in eager.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.usefixtures("one_thread"),
]

CLASSES = 4
ARGUMENTS: dict[str, dict[str, Any]] = {
    "FBetaScore": {"beta": 0.5},
    "Fairness": {"num_groups": 2},
    "GroupStatRates": {"num_groups": 2},
    "PrecisionAtFixedRecall": {"min_recall": 0.5},
    "RecallAtFixedPrecision": {"min_precision": 0.5},
    "SensitivityAtSpecificity": {"min_specificity": 0.5},
    "SpecificityAtSensitivity": {"min_sensitivity": 0.5},
    "CriticalSuccessIndex": {"threshold": 0.5},
    "MinkowskiDistance": {"p": 3},
}
GROUPS = {"Multiclass": {"num_classes": CLASSES}, "Multilabel": {"num_labels": CLASSES}, "Binary": {}}
DISTRIBUTIONS = ("KLDivergence", "JensenShannonDivergence")


def names_of(package: Any, groups: tuple[str, ...]) -> list[str]:
    """The metrics of a package whose names start with a group; others only dispatch to them."""
    return [name for name in package.__all__ if name.startswith(groups)]


CLASSIFICATION = names_of(classification, tuple(GROUPS))
REGRESSION = names_of(regression, ("",))


def metric_of(name: str) -> Metric:
    group = next((group for group in GROUPS if name.startswith(group)), "")
    arguments = {**GROUPS.get(group, {}), **ARGUMENTS.get(name.removeprefix(group), {})}
    package = classification if group else regression
    return getattr(package, name)(**arguments)


def arguments_of(name: str, logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """The arguments of a metric, from logits[batch, CLASSES] and labels[batch]."""
    one_hot = F.one_hot(labels, CLASSES)
    if name.startswith("Multiclass"):
        return (logits.argmax(-1) if "ExactMatch" in name else logits, labels)
    if name.startswith("Multilabel"):
        return logits.sigmoid(), one_hot
    if name.startswith("Binary"):
        groups = (labels % 2,) if name.endswith(("Fairness", "GroupStatRates")) else ()
        return logits[:, 0].sigmoid(), (labels > 1).long(), *groups
    if name in DISTRIBUTIONS:
        return logits.softmax(-1), (one_hot + 0.1).softmax(-1)
    if name == "ContinuousRankedProbabilityScore":
        return logits, labels.float()
    if name == "CosineSimilarity":
        return logits, one_hot.float()
    return logits[:, 0].exp(), labels.float() + 1


class WithMetric(LightningModule):
    """A classifier that calls a metric in training and updates one in validation."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.train_metric, self.val_metric = metric_of(name), metric_of(name)
        self.values: list[Any] = []

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, labels = batch
        logits = self.body(x)
        loss = F.cross_entropy(logits, labels)
        value = self.train_metric(*arguments_of(self.name, logits, labels))
        if isinstance(value, Tensor) and value.numel() == 1:
            self.log("train", self.train_metric, on_step=True, on_epoch=True)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        x, labels = batch
        self.val_metric.update(*arguments_of(self.name, self.body(x), labels))

    def on_validation_epoch_end(self) -> None:
        self.values.append(self.val_metric.compute())
        self.val_metric.reset()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


class WithCollections(WithMetric):
    """The same with metric collections, which log the results of a call or themselves after an update."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        metrics = [classification.MulticlassAccuracy(CLASSES, average=kind) for kind in ("micro", "macro")]
        collection = MetricCollection(
            {"micro": metrics[0], "macro": metrics[1], "f1": classification.MulticlassF1Score(CLASSES)}
        )
        self.train_metrics, self.val_metrics = collection.clone(prefix="train_"), collection.clone(prefix="val_")
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, labels = batch
        logits = self.body(x)
        loss = F.cross_entropy(logits, labels)
        self.log_dict(self.train_metrics(logits, labels))
        self.mean.update(loss)
        self.log("mean", self.mean, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        x, labels = batch
        logits = self.body(x)
        self.val_metrics.update(logits, labels)
        self.log_dict(self.val_metrics)  # pyright: ignore[reportArgumentType] - Lightning accepts a collection
        self.log("val_loss", F.cross_entropy(logits, labels))

    def on_validation_epoch_end(self) -> None:
        pass


def fit(strategy: Any, module: LightningModule) -> dict[str, Tensor]:
    """Trains the module and returns the logged metrics."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(30, 6, generator=generator)
    loader = DataLoader(TensorDataset(x, torch.arange(30) % CLASSES), 10)
    runner = trainer(strategy, max_epochs=2, limit_val_batches=2, num_sanity_val_steps=1)
    runner.fit(module, loader, loader)
    return dict(runner.callback_metrics)


def assert_same_as_eager(make: type[WithMetric], name: str) -> None:
    outcomes = []
    strategy = ORTStrategy(fallback="error")
    for own_strategy in ("auto", strategy):
        seed_everything(2, verbose=False)
        module = make(name)
        with warnings.catch_warnings():
            warnings.simplefilter("error", LitOrtWarning)
            metrics = fit(own_strategy, module)
        outcomes.append((module, metrics))
    (eager, expected), (module, actual) = outcomes
    assert_close(actual, expected)
    assert_close(module.values, eager.values)
    assert_close(dict(module.state_dict()), dict(eager.state_dict()))
    counts = Counter(graph.name.rpartition("_")[0] for graph in explain(strategy).graphs)
    assert counts == {"training_step": 1, "validation_step": 1}


def assert_close(actual: Any, expected: Any) -> None:
    if isinstance(expected, Mapping):
        assert actual.keys() == expected.keys()
        for key in expected:
            assert_close(actual[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for value, reference in zip(actual, expected, strict=True):
            assert_close(value, reference)
    else:
        torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.parametrize("name", ["MulticlassAccuracy", "BinaryAUROC", "MultilabelF1Score", "MeanSquaredError"])
@pytest.mark.sampled(2)
def test_metrics(name: str) -> None:
    assert_same_as_eager(WithMetric, name)


# Every tenth one, since most metrics have a binary, a multiclass and a multilabel form.
@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", mostly(pytest.mark.sweep, [*CLASSIFICATION, *REGRESSION], 10))
def test_all_metrics(name: str) -> None:
    assert_same_as_eager(WithMetric, name)


def test_collections_and_means() -> None:
    assert_same_as_eager(WithCollections, "MulticlassAccuracy")
