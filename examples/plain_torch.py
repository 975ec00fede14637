"""A plain PyTorch loop, without Lightning: a GRU forecasts a noisy sum of two sines.

    python examples/plain_torch.py --strategy ort

The compiled function returns the loss, so that the loss and all gradients come from one run of ONNX Runtime.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lit_ort

LENGTH, BATCH = 64, 64


def series(count: int) -> Tensor:
    """Return float32[count, LENGTH + 1, 1]: two sines of random periods and phases, with noise."""
    time = torch.arange(LENGTH + 1)
    periods = torch.empty(2, count, 1).uniform_(8, 32)
    phases = torch.empty(2, count, 1).uniform_(0, 2 * math.pi)
    waves = torch.sin(2 * math.pi * time / periods + phases).sum(0)
    return (waves + 0.05 * torch.randn(count, LENGTH + 1)).unsqueeze(-1)


class Forecaster(nn.Module):
    """Predicts the next value at each position."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.gru = nn.GRU(1, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, values: Tensor) -> Tensor:
        return self.head(self.gru(values)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=("eager", "ort"), default="ort")
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Forecaster()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)

    def loss_of(values: Tensor) -> Tensor:
        return F.mse_loss(model(values[:, :-1]), values[:, 1:])

    step = loss_of
    if args.strategy == "ort":
        step = torch.compile(loss_of, backend="ort", options={"fallback": "error"})

    for number in range(1, args.steps + 1):
        optimizer.zero_grad()
        loss = step(series(BATCH))
        loss.backward()
        optimizer.step()
        if number % 100 == 0:
            print(f"step {number}: loss {loss.item():.4f}")

    test = series(512)
    with torch.no_grad():
        error = loss_of(test).item()
    naive = F.mse_loss(test[:, :-1], test[:, 1:]).item()
    print(f"mean squared error {error:.4f} (the last value as the forecast: {naive:.4f})")
    if args.strategy == "ort":
        print(lit_ort.explain())


if __name__ == "__main__":
    main()
