"""Train a GAN with manual optimization and two optimizers: points on a ring of eight Gaussians.

    python examples/gan.py --strategy ort

Under manual optimization each `manual_backward` gets a graph, and the optimizers step between the graphs in PyTorch.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lit_ort  # registers strategy="ort"

MODES, SPREAD = 8, 0.05
STRATEGIES = {"eager": "auto", "ort": "ort"}


def centers() -> Tensor:
    """Return float32[MODES, 2] points on the unit circle."""
    angles = torch.arange(MODES) * (2 * math.pi / MODES)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def ring(count: int) -> Tensor:
    """Return float32[count, 2] samples of the mixture."""
    return centers()[torch.randint(MODES, (count,))] + SPREAD * torch.randn(count, 2)


def perceptron(*widths: int) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(a, b), nn.LeakyReLU(0.2)) for a, b in zip(widths, widths[1:-1], strict=False)]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))


class GAN(LightningModule):
    def __init__(self, latent: int = 16, width: int = 256, lr: float = 1e-3) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.latent, self.lr = latent, lr
        self.generator = perceptron(latent, width, width, 2)
        self.discriminator = perceptron(2, width, width, 1)

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def noise(self, count: int) -> Tensor:
        return torch.randn(count, self.latent)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        (real,) = batch
        generator_optimizer, discriminator_optimizer = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]

        self.toggle_optimizer(discriminator_optimizer)
        fake = self(self.noise(len(real))).detach()
        # The non-saturating loss of Goodfellow et al., 2014: softplus(-logit) is -log(sigmoid(logit)).
        loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()
        self.log("discriminator_loss", loss, prog_bar=True)
        discriminator_optimizer.zero_grad()
        self.manual_backward(loss)
        discriminator_optimizer.step()
        self.untoggle_optimizer(discriminator_optimizer)

        self.toggle_optimizer(generator_optimizer)
        loss = F.softplus(-self.discriminator(self(self.noise(len(real))))).mean()
        self.log("generator_loss", loss, prog_bar=True)
        generator_optimizer.zero_grad()
        self.manual_backward(loss)
        generator_optimizer.step()
        self.untoggle_optimizer(generator_optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        networks = (self.generator, self.discriminator)
        return [torch.optim.Adam(network.parameters(), self.lr, betas=(0.5, 0.99)) for network in networks]


@torch.no_grad()
def quality(gan: GAN, count: int = 4_000) -> tuple[int, float]:
    """Return how many of the modes get at least 2% of the samples, and the share of samples near any mode."""
    distances = torch.cdist(gan(gan.noise(count)), centers())
    nearest, mode = distances.min(dim=1)
    near = nearest < 6 * SPREAD
    counts = torch.bincount(mode[near], minlength=MODES)
    return int((counts >= 0.02 * count).sum()), float(near.float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=STRATEGIES, default="ort")
    parser.add_argument("--steps", type=int, default=2_000)
    args = parser.parse_args()

    seed_everything(0)
    gan = GAN()
    print("untrained: {} of 8 modes, {:.0%} of the samples near one".format(*quality(gan)))
    trainer = Trainer(
        strategy=STRATEGIES[args.strategy],
        accelerator="cpu",
        max_steps=2 * args.steps,  # Lightning counts the steps of both optimizers
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(gan, DataLoader(TensorDataset(ring(20_000)), batch_size=256, shuffle=True, drop_last=True))

    print("trained: {} of 8 modes, {:.0%} of the samples near one".format(*quality(gan)))
    if args.strategy == "ort":
        print(lit_ort.explain(trainer))


if __name__ == "__main__":
    main()
