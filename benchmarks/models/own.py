"""Modules as Lightning users write them, with torch.nn only. Each module returns its loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.case import SMALL, Model, ModuleAndBatch, identity


class Perceptron(nn.Module):
    """A perceptron with three hidden layers for flattened images of 28 x 28."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [
            part for k in range(3) for part in (nn.Linear(width if k else 784, width), nn.ReLU(), nn.Dropout(0.1))
        ]
        self.body = nn.Sequential(nn.Flatten(), *layers, nn.Linear(width, 10))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x), y)


class Autoencoder(nn.Module):
    """An autoencoder of convolutions and transposed convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        w = width
        self.encoder = nn.Sequential(
            *(nn.Conv2d(3, w, 3, 2, 1), nn.GELU(), nn.Conv2d(w, 2 * w, 3, 2, 1), nn.GELU()),
            *(nn.Conv2d(2 * w, 4 * w, 3, 2, 1), nn.GELU()),
        )
        self.decoder = nn.Sequential(
            *(nn.ConvTranspose2d(4 * w, 2 * w, 4, 2, 1), nn.GELU(), nn.ConvTranspose2d(2 * w, w, 4, 2, 1), nn.GELU()),
            nn.ConvTranspose2d(w, 3, 4, 2, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.decoder(self.encoder(x)), x)


class Variational(nn.Module):
    """A variational autoencoder of linear layers. Source: Kingma and Welling 2014."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.mean, self.log_variance = nn.Linear(width, 32), nn.Linear(width, 32)
        self.decoder = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, 784))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = -(1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean() / 2
        return F.binary_cross_entropy_with_logits(self.decoder(code), x, reduction="sum") / len(x) + divergence


class LstmLanguageModel(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.cells = nn.LSTM(width, width, 2, batch_first=True, dropout=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.cells(self.words(ids[:, :-1]))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids[:, 1:].flatten())


class GruClassifier(nn.Module):
    """A bidirectional GRU that classifies time series."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cells = nn.GRU(16, width, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.LayerNorm(2 * width), nn.Linear(2 * width, 5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden, _ = self.cells(x)
        return F.cross_entropy(self.head(hidden.mean(1)), y)


class GraphNetwork(nn.Module):
    """Three layers that average over neighbors. Source: Hamilton, Ying and Leskovec 2017 (GraphSAGE)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [64, width, width, width]
        self.layers = nn.ModuleList(nn.Linear(2 * a, b) for a, b in zip(widths, widths[1:], strict=False))
        self.head = nn.Linear(width, 7)
        self.dropout = 0.1

    def forward(self, nodes: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        source, target = edges
        ones = torch.ones(len(target), device=nodes.device)
        counts = torch.zeros_like(nodes[:, 0]).index_add(0, target, ones).clamp(min=1)
        for layer in self.layers:
            sums = torch.zeros_like(nodes).index_add(0, target, nodes[source])
            nodes = F.dropout(layer(torch.cat([nodes, sums / counts[:, None]], 1)).relu(), self.dropout, self.training)
        return F.cross_entropy(self.head(nodes), y)


class TabularTransformer(nn.Module):
    """Attention over the columns of a table. Source: Gorishniy et al. 2021 (FT-Transformer)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.randn(20, width) / width**0.5)
        self.offsets = nn.Parameter(torch.zeros(20, width))
        self.kinds = nn.Embedding(10 * 50, width)
        self.token = nn.Parameter(torch.zeros(width))
        layer = nn.TransformerEncoderLayer(width, 8, 2 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1)

    def forward(self, numbers: Tensor, kinds: Tensor, y: Tensor) -> Tensor:
        columns = numbers[..., None] * self.numbers + self.offsets
        words = self.kinds(kinds + torch.arange(10, device=kinds.device) * 50)
        token = self.token.expand(len(numbers), 1, -1)
        hidden = self.body(torch.cat([token, columns, words], 1))
        return F.mse_loss(self.head(hidden[:, 0]).squeeze(1), y)


def sized(small: int, medium: int, make: Callable[[int], ModuleAndBatch], clip: float | None = None) -> Model:
    """A model that is created with one of two widths."""
    return Model(lambda size: make(small if size == SMALL else medium), identity, clip)


def graph(width: int) -> ModuleAndBatch:
    nodes, count = 4_000, 32_000
    edges = torch.randint(nodes, (2, count))
    return GraphNetwork(width), {"nodes": torch.randn(nodes, 64), "edges": edges, "y": torch.randint(7, (nodes,))}


def table(width: int) -> ModuleAndBatch:
    rows = 256
    batch = {"numbers": torch.randn(rows, 20), "kinds": torch.randint(50, (rows, 10)), "y": torch.randn(rows)}
    return TabularTransformer(width, 3), batch


def flat_images(rows: int) -> Tensor:
    return torch.rand(rows, 784)


MODELS: dict[str, Model] = {
    "MLP": sized(
        512,
        1024,
        lambda width: (Perceptron(width), {"x": torch.randn(256, 1, 28, 28), "y": torch.randint(10, (256,))}),
    ),
    "autoencoder": sized(32, 64, lambda width: (Autoencoder(width), {"x": torch.rand(16, 3, 64, 64)})),
    "VAE": sized(512, 1024, lambda width: (Variational(width), {"x": flat_images(256)})),
    "LSTM": sized(
        256, 512, lambda width: (LstmLanguageModel(width, 8_000), {"ids": torch.randint(8_000, (16, 65))}), 1.0
    ),
    "GRU": sized(
        128, 256, lambda w: (GruClassifier(w), {"x": torch.randn(32, 100, 16), "y": torch.randint(5, (32,))}), 1.0
    ),
    "graph network": sized(128, 256, graph),
    "tabular transformer": sized(128, 256, table),
}
