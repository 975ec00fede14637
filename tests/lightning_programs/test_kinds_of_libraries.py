"""Modules of the kinds that libraries of time series, single cells and molecules have, in each way of compiling."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lit_ort import ORTStrategy, explain
from tests.lightning_models import trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers:UserWarning"),
    pytest.mark.usefixtures("one_thread"),
]


class QuantileLoss(torchmetrics.Metric):
    """A loss that is a metric, as in libraries of forecasts."""

    higher_is_better, full_state_update = False, False

    def __init__(self, quantiles: Sequence[float]) -> None:
        super().__init__()
        self.quantiles = quantiles
        self.add_state("losses", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def loss(self, forecast: Tensor, target: Tensor) -> Tensor:
        errors = target[..., None] - forecast
        parts = [torch.maximum(q * errors[..., k], (q - 1) * errors[..., k]) for k, q in enumerate(self.quantiles)]
        return torch.stack(parts, -1).mean(-1)

    def update(self, forecast: Tensor, target: Tensor) -> None:
        losses = self.loss(forecast, target)
        self.losses = self.losses + losses.sum()
        self.count = self.count + losses.numel()

    def compute(self) -> Tensor:
        return self.losses / self.count


class Forecaster(LightningModule):
    """Windows that are normalized one by one, columns that are written, results that are kept for the epoch's end."""

    def __init__(self) -> None:
        super().__init__()
        self.quantiles = [0.1, 0.5, 0.9]
        self.encoder, self.decoder = nn.LSTM(2, 16, batch_first=True), nn.Linear(16, 6 * len(self.quantiles))
        self.loss = QuantileLoss(self.quantiles)
        self.errors = torchmetrics.MetricCollection([torchmetrics.MeanAbsoluteError(), torchmetrics.MeanSquaredError()])
        self.forecasts: list[Tensor] = []

    def forward(self, past: Tensor) -> Tensor:
        mean, deviation = past.mean(1, keepdim=True), past.std(1, keepdim=True) + 1e-5
        inputs = torch.zeros(*past.shape, 2)
        inputs[..., 0] = (past - mean) / deviation
        inputs[:, :, 1] = torch.arange(past.shape[1]) / past.shape[1]
        _, (hidden, _) = self.encoder(inputs)
        return self.decoder(hidden[-1]).view(len(past), 6, -1) * deviation[..., None] + mean[..., None]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        forecast = self(batch[0][:, :-6])
        loss = self.loss(forecast, batch[0][:, -6:])
        self.log("train_loss", loss, batch_size=len(batch[0]), prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        forecast = self(batch[0][:, :-6])
        self.log("val_loss", self.loss(forecast, batch[0][:, -6:]), batch_size=len(batch[0]))
        self.log_dict(self.errors(forecast[..., 1].contiguous(), batch[0][:, -6:].contiguous()))
        self.forecasts.append(forecast.detach())

    def on_validation_epoch_end(self) -> None:
        self.log("spread", torch.cat(self.forecasts).std())
        self.forecasts.clear()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    @staticmethod
    def loader() -> DataLoader[Any]:
        values = torch.sin(torch.arange(75)[:, None] + torch.arange(30) * 0.7) + torch.arange(30) * 0.1
        return DataLoader(TensorDataset(values), batch_size=16)


@dataclasses.dataclass
class Losses:
    """What a module of cells returns."""

    loss: Tensor
    reconstruction: Tensor
    divergence: Tensor
    weight: float


class Cells(LightningModule):
    """An autoencoder of counts whose divergence gets more weight in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16, momentum=0.01, eps=1e-3), nn.ReLU())
        self.mean, self.variance = nn.Linear(16, 3), nn.Linear(16, 3)
        self.decoder = nn.Sequential(nn.Linear(3 + 2, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 20))
        self.dispersion = nn.Parameter(torch.zeros(20))

    @property
    def weight(self) -> float:
        return min(1.0, (self.current_epoch + 1) / 4)

    def losses(self, batch: dict[str, Tensor]) -> Losses:
        counts, kind = batch["counts"], F.one_hot(batch["kind"], 2)
        hidden = self.encoder(torch.log1p(counts))
        latent = Normal(self.mean(hidden), torch.exp(self.variance(hidden)).sqrt() + 1e-4, validate_args=True)
        # Fixed in place of drawn numbers, which a strategy draws from a generator of its own.
        point = latent.loc + latent.scale * torch.linspace(-1, 1, 3)
        scale = torch.softmax(self.decoder(torch.cat([point, kind], -1)), -1) * counts.sum(-1, keepdim=True)
        theta = torch.exp(self.dispersion)
        ratio = torch.log(theta + scale + 1e-8)
        likelihood = theta * (torch.log(theta + 1e-8) - ratio) + counts * (torch.log(scale + 1e-8) - ratio)
        likelihood = likelihood + torch.lgamma(counts + theta) - torch.lgamma(theta) - torch.lgamma(counts + 1)
        divergence = kl_divergence(latent, Normal(torch.zeros(3), torch.ones(3))).sum(-1)
        reconstruction = -likelihood.sum(-1)
        loss = (reconstruction + self.weight * divergence).mean()
        return Losses(loss, reconstruction.mean(), divergence.mean(), self.weight)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        losses = self.losses(batch)
        self.log("weight", losses.weight)
        self.log_dict(
            {"loss": losses.loss, "divergence": losses.divergence}, on_epoch=True, batch_size=len(batch["kind"])
        )
        return losses.loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("elbo", self.losses(batch).reconstruction, batch_size=len(batch["kind"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-3, weight_decay=1e-6, eps=0.01)

    @staticmethod
    def loader() -> DataLoader[Any]:
        draws = torch.Generator().manual_seed(0)
        cells = [
            {"counts": torch.poisson(torch.rand(20, generator=draws) * 5, generator=draws), "kind": torch.tensor(k % 2)}
            for k in range(90)
        ]
        dataset: Any = cells
        return DataLoader(dataset, batch_size=32)


class Graphs:
    """A batch of molecules: an object with methods, whose numbers of atoms and bonds change."""

    def __init__(self, seed: int) -> None:
        draws = torch.Generator().manual_seed(seed)
        atoms = int(torch.randint(30, 60, (), generator=draws))
        self.atoms = torch.randn(atoms, 6, generator=draws)
        self.bonds = torch.randint(atoms, (2, 2 * atoms + seed % 5), generator=draws)
        self.molecule = torch.arange(atoms) * 8 // atoms
        self.targets = torch.randn(8, 2, generator=draws)
        self.targets[seed % 8, 0] = float("nan")

    def to(self, device: Any) -> Graphs:
        return self

    def __len__(self) -> int:
        return len(self.targets)


class Stream(IterableDataset[Graphs]):
    def __iter__(self) -> Iterator[Graphs]:
        return map(Graphs, range(8))


class Molecules(LightningModule):
    """Messages along bonds, a mean of each molecule, targets that are not all known."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.message = nn.Linear(6, 16), nn.Linear(16, 16, bias=False)
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 2)
        self.error = torchmetrics.MeanAbsoluteError()

    def forward(self, batch: Graphs) -> Tensor:
        start = hidden = self.first(batch.atoms).relu()
        for _ in range(2):
            sums = torch.zeros_like(hidden).index_add(0, batch.bonds[1], self.message(hidden[batch.bonds[0]]))
            hidden = (start + sums).relu()
        index = batch.molecule[:, None].expand_as(hidden)
        totals = hidden.new_zeros(len(batch), 16).scatter_reduce(0, index, hidden, "mean", include_self=False)
        return self.head(self.norm(totals))

    def training_step(self, batch: Graphs, batch_idx: int) -> Tensor:
        known = batch.targets.isfinite()
        targets = batch.targets.nan_to_num(nan=0.0)
        errors = (self(batch) - targets).square() * known
        loss = errors.sum() / known.sum()
        self.log("train_loss", loss, batch_size=len(batch))
        return loss

    def validation_step(self, batch: Graphs, batch_idx: int) -> None:
        self.error.update(self(batch), batch.targets.nan_to_num(nan=0.0))
        self.log("error", self.error, batch_size=len(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-3)

    @staticmethod
    def loader() -> DataLoader[Any]:
        return DataLoader(Stream(), batch_size=None)


# The number of graphs at most, with validation: for the first sizes, for all others, and for any number of the epoch.
KINDS: dict[type[Any], int] = {Forecaster: 8, Cells: 6, Molecules: 5}


def fit(kind: type[Any], strategy: Any) -> tuple[LightningModule, dict[str, Tensor]]:
    seed_everything(1, verbose=False)
    module = kind()
    runner = trainer(strategy, max_epochs=4, log_every_n_steps=1)
    runner.fit(module, kind.loader(), kind.loader())
    return module, dict(runner.callback_metrics)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("compile", ["auto", "always"])
@pytest.mark.sampled(3)
def test_the_same_weights_and_values_as_eager(kind: type[Any], compile: Any) -> None:
    expected, expected_values = fit(kind, "auto")
    strategy = ORTStrategy(compile=compile)
    actual, values = fit(kind, strategy)
    torch.testing.assert_close(dict(actual.state_dict()), dict(expected.state_dict()), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(values, expected_values, rtol=1e-3, atol=1e-5)
    explanation = explain(strategy)
    assert not explanation.fallbacks
    assert len(explanation.graphs) <= (KINDS[kind] if compile == "always" else 0)
