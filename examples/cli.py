"""LightningCLI: the strategy and its arguments come from the command line or a YAML file.

    python examples/cli.py fit --config examples/cli.yaml
    python examples/cli.py fit --config examples/cli.yaml --trainer.strategy auto
    python examples/cli.py fit --config examples/cli.yaml --trainer.strategy.init_args.cache_dir graphs
    python examples/cli.py fit --trainer.strategy.help lit_ort.ORTStrategy

The model is a variational autoencoder of 16 x 16 pictures of bars.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lit_ort  # registers strategy="ort"

SIZE = 16


def bars(count: int, seed: int) -> Tensor:
    """Return float32[count, SIZE * SIZE]: a horizontal and a vertical bar at random positions."""
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.zeros(count, SIZE, SIZE)
    rows, columns = torch.randint(SIZE, (2, count), generator=generator)
    every = torch.arange(count)
    pictures[every, rows] = 1
    pictures[every, :, columns] = 1
    return pictures.flatten(1)


class Bars(LightningDataModule):
    """Pictures of bars, drawn in the program.

    Args:
        count: training pictures.
        batch_size: of training and validation.
    """

    def __init__(self, count: int = 8_000, batch_size: int = 128) -> None:
        super().__init__()
        self.count, self.batch_size = count, batch_size

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(bars(self.count, seed=0)), self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(bars(1_024, seed=1)), self.batch_size)


class VAE(LightningModule):
    """A variational autoencoder (Kingma and Welling, 2013).

    Args:
        width: of the hidden layers.
        latent: dimensions of the code.
        lr: learning rate.
    """

    def __init__(self, width: int = 256, latent: int = 16, lr: float = 2e-3) -> None:
        super().__init__()
        self.lr = lr
        pixels = SIZE * SIZE
        self.encoder = nn.Sequential(nn.Linear(pixels, width), nn.GELU(), nn.Linear(width, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.GELU(), nn.Linear(width, pixels))

    def loss(self, batch: tuple[Tensor]) -> Tensor:
        """Return the negative evidence lower bound, in nats per picture."""
        (pictures,) = batch
        mean, log_variance = self.encoder(pictures).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        reconstruction = F.binary_cross_entropy_with_logits(self.decoder(code), pictures, reduction="none").sum(1)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        return (reconstruction + divergence).mean()

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.lr)


class CLI(LightningCLI):
    def after_fit(self) -> None:
        print(f"validation loss {float(self.trainer.callback_metrics['val_loss']):.1f} nats (uniform pixels: 177.4)")
        if isinstance(self.trainer.strategy, lit_ort.ORTStrategy):
            print(lit_ort.explain(self.trainer))


if __name__ == "__main__":
    CLI(VAE, Bars, save_config_callback=None)
