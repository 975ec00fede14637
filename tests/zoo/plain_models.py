"""Models written with torch.nn only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.zoo import text_models
from tests.zoo.cases import Case, ModuleAndBatch, loss_of_output, weighted_mean


class Translator(nn.Module):
    """`nn.Transformer` with causal and padding masks."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.transformer = nn.Transformer(16, 4, 2, 2, 32, dropout, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.size(1))
        hidden = self.transformer(
            self.words(source),
            self.words(target),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.head(hidden)


class Recurrent(nn.Module):
    """A recurrent network whose last state is used too."""

    def __init__(self, kind: type[nn.RNNBase], dropout: float, **settings: Any) -> None:
        super().__init__()
        cells: Any = kind
        self.cells: nn.Module = cells(6, 8, batch_first=True, dropout=dropout, **settings)
        self.head = nn.Linear(16 if settings.get("bidirectional") else 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        output, state = self.cells(x)
        last = state[0] if isinstance(state, tuple) else state
        return self.head(output) + last.mean()


class Residual(nn.Module):
    """A residual block of ResNet."""

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
    """An inverted residual block of MobileNet v3 with squeeze and excitation."""

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


def resnet(dropout: float) -> ModuleAndBatch:
    body = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1), Residual(8, 16, 2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(16, 4)]
    return nn.Sequential(*body, *head), {"input": torch.randn(4, 3, 24, 24)}


def mobilenet(dropout: float) -> ModuleAndBatch:
    body = [nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish(), Inverted(8), Inverted(8)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(8, 4)]
    return nn.Sequential(*body, *head), {"input": torch.randn(4, 3, 16, 16)}


class UNet(nn.Module):
    """A U-Net of two levels with group normalization, pooling, a transposed convolution and interpolation."""

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
    """A variational autoencoder with a transposed convolution; it draws noise only if `noise` is not zero."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64, 8))
        self.decoder = nn.Sequential(
            nn.Linear(4, 64), nn.Unflatten(1, (4, 4, 4)), nn.ConvTranspose2d(4, 1, 4, 2, 1), nn.Sigmoid()
        )
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        noise = torch.randn_like(mean) if self.noise else torch.ones_like(mean)
        code = mean + noise * (log_variance / 2).exp()
        divergence = -(1 + log_variance - mean.square() - log_variance.exp()).mean() / 2
        reconstruction = nn.functional.binary_cross_entropy(self.decoder(code), x.sigmoid())
        return reconstruction + divergence


class PackedRecurrent(nn.Module):
    """An LSTM over packed sequences of different lengths."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.cells = nn.LSTM(6, 8, 2, batch_first=True, dropout=dropout, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, (state, _) = self.cells(packed)
        padded, _ = pad_packed_sequence(output, batch_first=True)
        return self.head(padded).mean(1) + self.head(torch.cat([state[-2], state[-1]], 1))


class MessagePassing(nn.Module):
    """A graph network of two layers: means and maxima of messages, and sums over each graph's nodes."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.messages = nn.ModuleList([nn.Linear(2 * 8, 8), nn.Linear(2 * 8, 8)])
        self.updates = nn.ModuleList([nn.Linear(3 * 8, 8), nn.Linear(3 * 8, 8)])
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(8, 2)

    def forward(self, nodes: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        source, target = edges
        for message, update in zip(self.messages, self.updates, strict=True):
            messages = self.drop(message(torch.cat([nodes[source], nodes[target]], 1)).relu())
            index = target[:, None].expand_as(messages)
            means = torch.zeros_like(nodes).scatter_reduce(0, index, messages, "mean", include_self=False)
            maxima = torch.full_like(nodes, -1.0).scatter_reduce(0, index, messages, "amax")
            nodes = nodes + update(torch.cat([nodes, means, maxima], 1)).tanh()
        return self.head(torch.zeros(3, 8).index_add(0, graph, nodes))


class SetPrediction(nn.Module):
    """Set prediction as in DETR: queries attend to the input, and the loss uses the best matching of predictions."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(5, 16))
        self.decoder = nn.TransformerDecoderLayer(16, 4, 32, dropout, batch_first=True)
        self.classes, self.boxes = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor, boxes: Tensor) -> Tensor:
        hidden = self.decoder(self.queries.expand(len(x), -1, -1), x)
        scores, predicted = self.classes(hidden), self.boxes(hidden).sigmoid()
        total = x.new_zeros(())
        for k in range(len(x)):
            objects = labels[k][labels[k] >= 0]
            targets = boxes[k][: len(objects)]
            cost = torch.cdist(predicted[k], targets, p=1) - scores[k].softmax(-1)[:, objects]
            rows, columns = linear_sum_assignment(cost.detach().numpy())
            classes = torch.full((5,), 3)
            classes[torch.as_tensor(rows)] = objects[torch.as_tensor(columns)]
            total = total + F.cross_entropy(scores[k], classes)
            total = total + F.l1_loss(predicted[k][torch.as_tensor(rows)], targets[torch.as_tensor(columns)])
        return total


class Adapter(nn.Module):
    """A frozen linear layer with a trained low-rank update (LoRA)."""

    def __init__(self, base: nn.Linear, dropout: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.drop = nn.Dropout(dropout)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.drop(x))) * 2.0


def llama_with_adapters(dropout: float) -> ModuleAndBatch:
    """Llama with adapters on two linear layers of each attention; all other parameters are frozen."""
    module, batch = text_models.CASES["Llama"].make(dropout)
    module.requires_grad_(False)
    for layer in module.get_submodule("model.layers").children():
        attention: Any = layer.get_submodule("self_attn")
        attention.q_proj, attention.v_proj = Adapter(attention.q_proj, dropout), Adapter(attention.v_proj, dropout)
    return module, batch


def set_batch(dropout: float) -> ModuleAndBatch:
    labels = torch.tensor([[0, 2, 1], [1, -1, -1], [2, 2, -1]])
    return SetPrediction(dropout), {"x": torch.randn(3, 7, 16), "labels": labels, "boxes": torch.rand(3, 3, 4)}


def plain(make: Callable[[float], nn.Module], **batch: Callable[[], Tensor]) -> Case:
    return Case(lambda dropout: (make(dropout), {name: value() for name, value in batch.items()}), weighted_mean)


def recurrent(kind: type[nn.RNNBase], **settings: Any) -> Case:
    layers = {"num_layers": 2, **settings}
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
    "LSTM of packed sequences": plain(
        PackedRecurrent, x=lambda: torch.randn(3, 7, 6), lengths=lambda: torch.tensor([5, 7, 3])
    ),
    "graph network": plain(
        MessagePassing,
        nodes=lambda: torch.randn(9, 8),
        edges=lambda: torch.randint(9, (2, 20)),
        graph=lambda: torch.arange(9) % 3,
    ),
    "set prediction, as DETR's": Case(set_batch, weighted_mean, breaks=True),
    "LoRA on Llama": Case(llama_with_adapters, loss_of_output),
    "ResNet": Case(resnet, weighted_mean),
    "MobileNet": Case(mobilenet, weighted_mean),
    "U-Net": plain(UNet, x=lambda: torch.randn(2, 3, 16, 16)),
    "VAE": plain(Autoencoder, x=lambda: torch.randn(3, 1, 8, 8)),
}
