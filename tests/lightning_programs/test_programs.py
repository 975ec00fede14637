"""Programs in the style of Lightning's tutorials, changed only in the strategy: the same weights after 20 steps."""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy

from lit_ort import LitOrtWarning, ORTStrategy, explain
from tests.lightning_models import trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging:UserWarning"),
    pytest.mark.filterwarnings("ignore:You .* Skipping val loop:UserWarning"),
    pytest.mark.usefixtures("one_thread"),
]

CLASSES = 4
Batch = tuple[Tensor, Tensor]

# With Adam's usual epsilon, rounding errors move weights whose gradients are zero, such as the biases of keys.
EPSILON = 1e-3


class Program(LightningModule):
    """A module that trains all parameters with Adam."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-3, eps=EPSILON)


def perceptron(*widths: int) -> nn.Sequential:
    layers = [layer for a, b in zip(widths, widths[1:], strict=False) for layer in (nn.Linear(a, b), nn.LeakyReLU(0.2))]
    return nn.Sequential(*layers[:-1])


class ImageClassifier(Program):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(8 * 16, CLASSES),
        )  # fmt: skip
        self.train_acc, self.val_acc = (Accuracy(task="multiclass", num_classes=CLASSES) for _ in range(2))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.net(batch[0].view(-1, 1, 8, 8))
        loss = F.cross_entropy(logits, batch[1])
        self.train_acc(logits, batch[1])
        self.log_dict({"loss": loss, "acc": self.train_acc}, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        logits = self.net(batch[0].view(-1, 1, 8, 8))
        self.val_acc.update(logits, batch[1])
        self.log("val_acc", self.val_acc)
        self.log("val_loss", F.cross_entropy(logits, batch[1]))


class AutoEncoder(Program):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = perceptron(64, 32, 3), perceptron(3, 32, 64)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        x = batch[0].view(batch[0].size(0), -1)
        z = self.encoder(x)
        decoded = self.decoder(z)
        loss = F.mse_loss(decoded, x)
        self.log("train_loss", loss)
        return {"loss": loss, "z": z, "decoded": decoded}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["z"].shape == (len(batch[0]), 3)


class Gan(LightningModule):
    """A GAN with manual optimization and a running mean in Python."""

    automatic_optimization = False  # pyright: ignore[reportAssignmentType,reportIncompatibleMethodOverride]

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = perceptron(8, 32, 64), perceptron(64, 32, 1)
        self.running = 0.0

    def noise(self, x: Tensor) -> Tensor:
        return torch.linspace(-1, 1, 8).repeat(x.shape[0], 1).type_as(x)

    def training_step(self, batch: Batch) -> None:
        x, _ = batch
        g, d = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
        z, valid = self.noise(x), torch.ones(x.size(0), 1).type_as(x)
        self.toggle_optimizer(g)
        g_loss = F.binary_cross_entropy_with_logits(self.discriminator(self.generator(z)), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.running = 0.9 * self.running + 0.1 * g_loss.item()
        self.manual_backward(g_loss)
        g.step()
        g.zero_grad()
        self.untoggle_optimizer(g)
        self.toggle_optimizer(d)
        real = F.binary_cross_entropy_with_logits(self.discriminator(x), valid)
        fake = F.binary_cross_entropy_with_logits(self.discriminator(self.generator(z).detach()), 1 - valid)
        d_loss = (real + fake) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        d.step()
        d.zero_grad()
        self.untoggle_optimizer(d)

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.discriminator)
        return [torch.optim.Adam(part.parameters(), 2e-4, betas=(0.5, 0.999), eps=EPSILON) for part in parts], []


class PenalizedGan(Gan):
    """A GAN with a gradient penalty: the critic's loss has the norm of its gradient."""

    def training_step(self, batch: Batch) -> None:
        x, _ = batch
        g, d = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
        z = self.noise(x)
        between = (0.5 * x + 0.5 * self.generator(z).detach()).requires_grad_()
        score = self.discriminator(between)
        (slope,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True)
        penalty = (slope.norm(2, dim=1) - 1).square().mean()
        fake = self.discriminator(self.generator(z).detach())
        d_loss = fake.mean() - self.discriminator(x).mean() + 10 * penalty
        d.zero_grad()
        self.manual_backward(d_loss)
        d.step()
        g_loss = -self.discriminator(self.generator(z)).mean()
        g.zero_grad()
        self.manual_backward(g_loss)
        g.step()
        self.log_dict({"d_loss": d_loss, "g_loss": g_loss})


class Transformer(Program):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Linear(8, 16), nn.Parameter(torch.zeros(8, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, CLASSES)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(8)
        hidden = self.encoder(self.embed(batch[0].view(-1, 8, 8)) + self.position, mask=mask, is_causal=True)
        loss = F.cross_entropy(self.head(hidden[:, -1]), batch[1], label_smoothing=0.1)
        for group in self.optimizers().param_groups:  # pyright: ignore[reportAttributeAccessIssue]
            self.log("lr", group["lr"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3, eps=EPSILON)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class GraphNetwork(Program):
    """Messages along the edges of a ring, summed with index_add and averaged with scatter_reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.head = perceptron(16, 32, 8), perceptron(16, 32, 8), nn.Linear(8, CLASSES)
        nodes = torch.arange(8)
        self.register_buffer("edges", torch.stack([nodes.repeat(2), torch.cat([nodes.roll(1), nodes.roll(-1)])]))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x = batch[0].view(-1, 8, 8).transpose(0, 1)
        assert isinstance(self.edges, Tensor)
        source, target = self.edges
        messages = self.message(torch.cat([x[source], x[target]], -1))
        summed = torch.zeros_like(x).index_add(0, target, messages)
        index = target.view(-1, 1, 1).expand_as(messages)
        mean = torch.zeros_like(x).scatter_reduce(0, index, messages, "mean", include_self=False)
        x = x + self.update(torch.cat([x, summed + mean], -1))
        loss = F.cross_entropy(self.head(x.mean(0)), batch[1])
        self.log("loss", loss)
        return loss


class BarlowTwins(Program):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(perceptron(64, 32, 16), nn.BatchNorm1d(16, affine=False))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x = batch[0]
        a, b = self.net(x), self.net(x.flip(1))
        correlation = a.T @ b / len(x)
        on = (torch.diagonal(correlation) - 1).pow(2).sum()
        off = correlation.flatten()[:-1].view(15, 17)[:, 1:].pow(2).sum()
        self.log_dict({"on": on, "off": off})
        return on + 0.01 * off


class SimClr(Program):
    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(64, 32, 16)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        features = self.net(torch.cat([batch[0], batch[0] * 0.9 + 0.05]))
        similar = F.cosine_similarity(features[:, None], features[None], dim=-1)
        own = torch.eye(len(similar), dtype=torch.bool)
        similar.masked_fill_(own, -9e15)
        positive = own.roll(len(similar) // 2, 0)
        similar = similar / 0.07
        loss = (-similar[positive] + torch.logsumexp(similar, -1)).mean()
        joined = torch.cat([similar[positive][:, None], similar.masked_fill(positive, -9e15)], -1)
        rank = joined.argsort(-1, descending=True).argmin(-1)
        self.log("acc_top1", (rank == 0).float().mean())
        return loss


class Byol(Program):
    """BYOL with a target network that is an exponential moving average, with an annealed decay."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = perceptron(64, 32, 16), perceptron(16, 32, 16)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x = batch[0]
        with torch.no_grad():
            target = F.normalize(self.target(x.flip(1)), dim=-1)
        prediction = F.normalize(self.predictor(self.online(x)), dim=-1)
        self.log("cosine", (prediction * target).sum(-1).mean())
        return 2 - 2 * (prediction * target).sum(-1).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        decay = 1 - (1 - 0.99) * (math.cos(math.pi * self.global_step / 40) + 1) / 2
        with torch.no_grad():
            for own, other in zip(self.target.parameters(), self.online.parameters(), strict=True):
                own.mul_(decay).add_(other, alpha=1 - decay)


class Dqn(Program):
    """A deep Q-network with a replay buffer in Python, which it fills itself, and a target network copied every 5
    steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net, self.goal = perceptron(64, 32, CLASSES), perceptron(64, 32, CLASSES)
        self.replay: deque[tuple[Tensor, Tensor]] = deque(maxlen=5)
        self.total, self.epsilon = 0.0, 1.0

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        states, actions = batch
        self.epsilon = max(0.05, self.epsilon - 0.01)
        self.replay.append((states, actions))
        rewards = (states.mean(1) > 0).float()
        self.total += rewards.sum().item()
        values = self.net(states).gather(1, actions[:, None]).squeeze(-1)
        with torch.no_grad():
            following = self.goal(states.roll(1, 0)).max(1)[0]
            following[rewards > 0.5] = 0.0
        loss = F.smooth_l1_loss(values, following.detach() * 0.99 + rewards)
        if self.global_step % 5 == 0:
            self.goal.load_state_dict(self.net.state_dict())
        self.log_dict({"total": self.total, "epsilon": self.epsilon, "loss": loss}, prog_bar=True)
        return loss


class Vae(Program):
    """A variational autoencoder with an annealed weight of the divergence; it prints the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = perceptron(64, 32, 8), perceptron(4, 32, 64)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        mean, log_variance = self.encoder(batch[0]).chunk(2, -1)
        noise = torch.linspace(-1, 1, 4).expand_as(mean)
        decoded = self.decoder(mean + noise * torch.exp(0.5 * log_variance))
        weight = min(1.0, self.global_step / 1000)
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1).mean()
        loss = F.mse_loss(decoded, batch[0]) + weight * divergence
        self.log("weight", weight)
        print(f"loss {loss.item():.3f}")
        return loss


class LowRank(nn.Module):
    """A frozen linear layer with a trained low-rank update."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * 2


class Adapted(Program):
    """Attention with low-rank adapters of query and value only."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = LowRank(nn.Linear(16, 16)), LowRank(nn.Linear(16, 16))
        self.key, self.head = nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, CLASSES)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x = batch[0].view(-1, 4, 16)
        heads = (part(x).view(len(x), 4, 2, 8).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(len(x), 4, 16)
        loss = F.cross_entropy(self.head(mixed[:, -1]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], 1e-3, eps=EPSILON)


# The number of training graphs of each program, by kind.
PROGRAMS: dict[Callable[[], LightningModule], dict[str, int]] = {
    ImageClassifier: {"fused": 1},
    AutoEncoder: {"fused": 1},
    Gan: {"fused": 3, "forward": 2},
    PenalizedGan: {"fused": 2, "forward": 1, "eager": 1},
    Transformer: {"fused": 1},
    GraphNetwork: {"fused": 1},
    BarlowTwins: {"fused": 1},
    SimClr: {"fused": 1},
    Byol: {"fused": 1},
    # It branches on the step's number, and converts a tensor to a Python number.
    Dqn: {"fused": 3, "forward": 2},
    Vae: {"fused": 2},
    Adapted: {"fused": 1},
}


def fit(make: Callable[[], LightningModule], strategy: Any) -> tuple[LightningModule, dict[str, Tensor]]:
    seed_everything(1, verbose=False)
    module = make()
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(80, 64, generator=generator)
    loader = DataLoader(TensorDataset(x, torch.arange(80) % CLASSES), 8)
    runner = trainer(strategy, max_epochs=2, limit_val_batches=2)
    runner.fit(module, loader, loader)
    return module, dict(runner.callback_metrics)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_the_same_weights_as_eager(make: Callable[[], LightningModule]) -> None:
    expected, expected_metrics = fit(make, "auto")
    strategy = ORTStrategy(fused_optimizer=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LitOrtWarning)
        actual, metrics = fit(make, strategy)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(actual.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert metrics.keys() == expected_metrics.keys()
    for name, value in expected_metrics.items():
        torch.testing.assert_close(metrics[name], value, rtol=1e-4, atol=1e-5, msg=name)
    for name in ("running", "total", "epsilon"):
        assert getattr(actual, name, None) == pytest.approx(getattr(expected, name, None), rel=1e-5)
    explanation = explain(strategy)
    graphs = [graph for graph in explanation.graphs if graph.name.startswith("training")]
    assert Counter(graph.kind for graph in graphs) == PROGRAMS[make]
    ort_warnings = [warning for warning in caught if warning.category is LitOrtWarning]
    assert len(ort_warnings) == PROGRAMS[make].get("eager", 0)
    assert all(function.is_rest for function in explanation.eager_functions)
