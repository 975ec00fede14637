"""Models written with torch.nn alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.cases import Case, Made, weighted_mean


class Translator(nn.Module):
    """`nn.Transformer` with causal and padding masks."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.transformer = nn.Transformer(16, 4, 2, 2, 32, dropout, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.size(1))
        seen = self.transformer(
            self.words(source),
            self.words(target),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.head(seen)


class Recurrent(nn.Module):
    """A recurrent network with its last state read as well."""

    def __init__(self, kind: type[nn.RNNBase], dropout: float, **figures: Any) -> None:
        super().__init__()
        cells: Any = kind
        self.cells: nn.Module = cells(6, 8, batch_first=True, dropout=dropout, **figures)
        self.head = nn.Linear(16 if figures.get("bidirectional") else 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        seen, state = self.cells(x)
        last = state[0] if isinstance(state, tuple) else state
        return self.head(seen) + last.mean()


class Residual(nn.Module):
    """A block of ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + self.shortcut(x)).relu()


class Inverted(nn.Module):
    """A block of MobileNet v3: widen, filter each channel, squeeze and excite, narrow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 3 * width
        self.widen = nn.Sequential(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish())
        self.filter = nn.Sequential(nn.Conv2d(wide, wide, 3, 1, 1, groups=wide), nn.BatchNorm2d(wide), nn.ReLU6())
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, wide, 1), nn.Hardsigmoid())
        self.narrow = nn.Conv2d(wide, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.filter(self.widen(x))
        return x + self.narrow(inside * self.gate(inside))


def resnet(dropout: float) -> Made:
    body = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1), Residual(8, 16, 2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(16, 4)]
    return nn.Sequential(*body, *head), {"input": torch.randn(4, 3, 24, 24)}


def mobilenet(dropout: float) -> Made:
    body = [nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish(), Inverted(8), Inverted(8)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(8, 4)]
    return nn.Sequential(*body, *head), {"input": torch.randn(4, 3, 16, 16)}


class UNet(nn.Module):
    """Two levels with group normalisation, pooling down, a transposed convolution and interpolation up."""

    def __init__(self, dropout: float) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU())

        self.first, self.second, self.third = block(3, 8), block(8, 16), block(16, 16)
        self.down, self.up = nn.AvgPool2d(2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.drop, self.last = nn.Dropout2d(dropout), nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.drop(self.second(self.down(first)))
        third = self.third(nn.functional.max_pool2d(second, 2))
        second = second + nn.functional.interpolate(third, scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.last(torch.cat([first, self.up(second)], 1))


class Autoencoder(nn.Module):
    """A variational autoencoder with a transposed convolution; noise only where dropout asks for randomness."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64, 8))
        self.decoder = nn.Sequential(
            nn.Linear(4, 64), nn.Unflatten(1, (4, 4, 4)), nn.ConvTranspose2d(4, 1, 4, 2, 1), nn.Sigmoid()
        )
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        drawn = torch.randn_like(mean) if self.noise else torch.ones_like(mean)
        code = mean + drawn * (log_variance / 2).exp()
        divergence = -(1 + log_variance - mean.square() - log_variance.exp()).mean() / 2
        rebuilt = nn.functional.binary_cross_entropy(self.decoder(code), x.sigmoid())
        return rebuilt + divergence


def plain(make: Callable[[float], nn.Module], **batch: Callable[[], Tensor]) -> Case:
    return Case(lambda dropout: (make(dropout), {name: value() for name, value in batch.items()}), weighted_mean)


def recurrent(kind: type[nn.RNNBase], **figures: Any) -> Case:
    layers = {"num_layers": 2, **figures}
    return plain(lambda dropout: Recurrent(kind, dropout, **layers), x=lambda: torch.randn(3, 7, 6))


def padded() -> Tensor:
    mask = torch.zeros(3, 6, dtype=torch.bool)
    mask[1, 4:] = True
    return mask


CASES: dict[str, Case] = {
    "nn.Transformer": plain(
        Translator,
        source=lambda: torch.randint(20, (3, 6)),
        target=lambda: torch.randint(20, (3, 5)),
        padding=padded,
    ),
    "LSTM": recurrent(nn.LSTM),
    "bidirectional LSTM": recurrent(nn.LSTM, bidirectional=True),
    "GRU": recurrent(nn.GRU),
    "bidirectional GRU": recurrent(nn.GRU, bidirectional=True),
    "RNN": recurrent(nn.RNN),
    "bidirectional RNN": recurrent(nn.RNN, bidirectional=True, nonlinearity="relu"),
    "ResNet": Case(resnet, weighted_mean),
    "MobileNet": Case(mobilenet, weighted_mean),
    "U-Net": plain(UNet, x=lambda: torch.randn(2, 3, 16, 16)),
    "VAE": plain(Autoencoder, x=lambda: torch.randn(3, 1, 8, 8)),
}
