"""Lightning Fabric: a Transformer encoder sorts digits; the module that returns the loss is compiled before the setup.

    python examples/fabric.py --strategy ort

Fabric has no strategy named "ort": `torch.compile(..., backend="ort")` works with Fabric's own strategies.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lit_ort

DIGITS, LENGTH = 10, 16


class Sorter(nn.Module):
    """For int64[batch, LENGTH] digits: the logits float32[batch, LENGTH, DIGITS] of the same digits in order."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(DIGITS, width)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, DIGITS)

    def forward(self, digits: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(digits) + self.positions))


class SortingLoss(nn.Module):
    """The model with its loss. Compiled as a whole it is one graph: the loss and all gradients come from one run."""

    def __init__(self, model: Sorter) -> None:
        super().__init__()
        self.model = model

    def forward(self, digits: Tensor) -> Tensor:
        return F.cross_entropy(self.model(digits).flatten(0, 1), digits.sort(dim=1).values.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=("eager", "ort"), default="ort")
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="32-true")
    parser.add_argument("--devices", type=int, default=1, help="number of processes; several use DDP")
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()

    fabric = Fabric(accelerator="cpu", devices=args.devices, precision=args.precision)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    sorter = Sorter()
    module: Any = SortingLoss(sorter)
    if args.strategy == "ort":
        module = torch.compile(module, backend="ort", options={"precision": args.precision, "fallback": "error"})
    module, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-3))

    digits = torch.randint(DIGITS, (64 * args.steps * args.devices, LENGTH))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(digits), batch_size=64))
    for number, (batch,) in enumerate(loader, start=1):
        optimizer.zero_grad()
        loss = module(batch)
        fabric.backward(loss)
        fabric.clip_gradients(module, optimizer, max_norm=1.0)
        optimizer.step()
        if number % 100 == 0:
            fabric.print(f"step {number}: loss {loss.item():.4f}")

    test = torch.randint(DIGITS, (512, LENGTH))
    sorter.eval()
    with torch.no_grad():
        accuracy = (sorter(test).argmax(-1) == test.sort(dim=1).values).float().mean().item()
    fabric.print(f"digits at the right position {accuracy:.3f} (chance: 0.1)")
    if args.strategy == "ort":
        fabric.print(lit_ort.explain())


if __name__ == "__main__":
    main()
