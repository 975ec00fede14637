"""Public reports of Lightning's users, and of libraries on Lightning, as programs of our own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics.classification import BinaryAccuracy

from tests.lightning_models import Net, loader, trainer
from tests.reports.report import Module, Strategy, row, trained, trainings

pytestmark = [
    pytest.mark.filterwarnings("ignore:You .* Skipping val loop:UserWarning"),
    pytest.mark.filterwarnings("ignore:.training_step. returned .None.:UserWarning"),
    pytest.mark.filterwarnings("ignore:train_dataloader yielded None:UserWarning"),
]


def perceptron(inputs: int, results: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, results))


@trainings()
def test_an_optimizer_is_toggled_in_the_step(strategy: Strategy) -> Any:
    """`toggle_optimizer` in a step with automatic optimization failed when the module was compiled.

    https://github.com/Lightning-AI/pytorch-lightning/issues/21513
    """

    class Toggling(Module):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
            self.toggle_optimizer(self.optimizers())  # pyright: ignore[reportArgumentType]
            loss = self.loss_of(batch[0])
            self.log("train_loss", loss)
            return loss

    net = perceptron(4, 1)
    return trained([net], lambda x: net(x).square().mean(), row(16, 4).cos(), strategy, module=Toggling)


class SometimesNothing(IterableDataset[Any]):
    """Batches, some of which are None."""

    def __iter__(self) -> Iterator[Any]:
        for k in range(5):
            yield None if k in (0, 3) else row(4, 3) + k


@trainings()
def test_batches_that_are_none(strategy: Strategy) -> Any:
    """The step returns None for batches that the loader replaces by None; that raised an error.

    https://github.com/Lightning-AI/pytorch-lightning/issues/6753
    """
    net = perceptron(3, 1)

    class Skipping(Module):
        def training_step(self, batch: Tensor | None, batch_idx: int) -> Tensor | None:  # pyright: ignore
            return None if batch is None else net(batch).square().mean()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(None if outputs is None else outputs["loss"])

    module = Skipping([net], nn.Identity())
    trainer(strategy()).fit(module, DataLoader(SometimesNothing(), batch_size=None))
    return module.losses, module.state_dict()


@pytest.mark.slow
@trainings()
def test_sharpness_aware_steps_by_hand(strategy: Strategy) -> Any:
    """Two forwards and backwards in one step, between which the weights are moved uphill and back.

    https://github.com/davda54/sam/issues/42
    """
    net = perceptron(4, 1)

    class Sharpness(Module):
        automatic_optimization = False  # pyright: ignore

        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> dict[str, Tensor]:  # pyright: ignore
            optimizer = self.optimizers()
            assert not isinstance(optimizer, list)
            loss = self.loss_of(batch[0])
            self.manual_backward(loss)
            weights: list[Tensor] = [p for p in self.parameters() if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in weights]).norm()  # pyright: ignore
            with torch.no_grad():
                moves = [0.05 * p.grad / norm for p in weights]  # pyright: ignore
                for p, move in zip(weights, moves, strict=True):
                    p.add_(move)
            optimizer.zero_grad()
            self.manual_backward(self.loss_of(batch[0]))
            with torch.no_grad():
                for p, move in zip(weights, moves, strict=True):
                    p.sub_(move)
            optimizer.step()
            optimizer.zero_grad()
            return {"loss": loss.detach()}

    return trained([net], lambda x: net(x).sub(1).square().mean(), row(32, 4).cos(), strategy, module=Sharpness)


@pytest.mark.slow
@trainings()
def test_a_weight_that_grows_with_the_epochs(strategy: Strategy) -> Any:
    """The weight of a variational loss that is warmed up over epochs, or over steps, stayed too small.

    https://github.com/scverse/scvi-tools/issues/1569
    """
    encoder, decoder = nn.Linear(4, 4), nn.Linear(2, 4)

    class Annealed(Module):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
            mean, scale = encoder(batch[0]).chunk(2, -1)
            posterior = torch.distributions.Normal(mean, F.softplus(scale) + 0.1)
            divergence = torch.distributions.kl_divergence(posterior, torch.distributions.Normal(0.0, 1.0)).sum(-1)
            weight = min(1.0, self.current_epoch / 3) * min(1.0, self.global_step / 10)
            self.log("kl_weight", weight)
            return (F.mse_loss(decoder(mean), batch[0], reduction="none").sum(-1) + weight * divergence).mean()

    settings = {"max_epochs": 5, "module": Annealed}
    return trained([encoder, decoder], nn.Identity(), row(24, 4).cos(), strategy, **settings)


@trainings()
def test_tasks_with_missing_targets(strategy: Strategy) -> Any:
    """Targets of several tasks, where NaN stands for an unknown one: the loss and all gradients became NaN.

    https://github.com/chemprop/chemprop/issues/1122
    """
    net = perceptron(3, 3)

    def loss_of(rows: Tensor) -> Tensor:
        x, targets = rows.chunk(2, -1)
        known = targets.isfinite()
        losses = F.mse_loss(net(x), targets.nan_to_num(nan=0.0), reduction="none")
        return (losses * known * torch.tensor([1.0, 0.5, 2.0])).sum() / known.sum()

    rows = row(24, 6).cos()
    rows[::3, 3], rows[1::2, 4] = math.nan, math.nan
    return trained([net], loss_of, rows, strategy)


@trainings()
def test_accumulated_gradients_are_weighted_by_their_tokens(strategy: Strategy) -> Any:
    """Gradients of batches with unequal numbers of tokens have to be accumulated as sums and divided at the end.

    https://github.com/Lightning-AI/pytorch-lightning/issues/20350
    """
    table, head = nn.Embedding(12, 8), nn.Linear(8, 12)

    class Weighted(Module):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
            tokens = batch[0].long()
            targets = tokens.roll(-1, 1).masked_fill(tokens == 0, -100)
            if batch_idx % 2 == 0:
                self.count = 0
            self.count += (targets != -100).sum().item()
            return F.cross_entropy(head(table(tokens)).flatten(0, 1), targets.flatten(), reduction="sum")

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for p in self.parameters():
                assert p.grad is not None
                p.grad.mul_(2 / self.count)

    tokens = torch.arange(32 * 6).view(32, 6) % 12
    tokens[torch.arange(6) >= torch.arange(32)[:, None] % 5 + 2] = 0
    settings = {"accumulate_grad_batches": 2, "module": Weighted}
    return trained([table, head], nn.Identity(), tokens, strategy, **settings)


@trainings()
def test_lbfgs_evaluates_a_step_many_times(strategy: Strategy) -> Any:
    """LBFGS, which calls the step's closure several times for one batch, did not converge as outside of Lightning.

    https://github.com/Lightning-AI/pytorch-lightning/issues/4083
    """
    net = perceptron(4, 1)

    class SecondOrder(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    def loss_of(x: Tensor) -> Tensor:
        return (net(x) - x.sum(1, keepdim=True).sin()).square().mean()

    return trained([net], loss_of, row(16, 4).cos(), strategy, module=SecondOrder)


@trainings()
def test_clipped_gradients_are_logged(strategy: Strategy) -> Any:
    """Norms that are logged in `on_before_optimizer_step` are those before the clipping, which has to follow.

    https://github.com/Lightning-AI/pytorch-lightning/issues/12595
    """
    results = []
    for algorithm, value in (("norm", 0.01), ("value", 0.002)):
        norms: list[Tensor] = []
        net = perceptron(4, 1)

        class Noting(Module):
            def on_before_optimizer_step(self, optimizer: Any, norms: list[Tensor] = norms) -> None:
                norms.append(torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]))

        settings = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm, "module": Noting}
        fitted = trained([net], lambda x, net=net: net(x).square().sum(), row(16, 4).cos(), strategy, **settings)
        results.append((fitted, norms))
    return results


@trainings()
def test_a_metric_that_the_step_creates(strategy: Strategy) -> Any:
    """A metric that is created in the step instead of in the module raised an AttributeError of its hooks.

    https://github.com/Lightning-AI/pytorch-lightning/issues/18123
    """
    net = perceptron(4, 1)

    class Measuring(Module):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
            logits = net(batch[0]).squeeze(1)
            labels = (batch[0].sum(1) > 0).long()
            accuracy = BinaryAccuracy()
            self.log("accuracy", accuracy(logits.detach().sigmoid(), labels))
            return F.binary_cross_entropy_with_logits(logits, labels.float())

    return trained([net], nn.Identity(), row(32, 4).cos(), strategy, module=Measuring)


@pytest.mark.slow
@trainings(amplifies=True)
def test_padding_of_an_encoder_in_validation(strategy: Strategy) -> Any:
    """`nn.TransformerEncoder` with a padding mask has other results, or raises, in evaluation than in training.

    https://github.com/pytorch/pytorch/issues/86120 and https://github.com/pytorch/pytorch/issues/163640
    """
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    encoder, head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 1)

    def loss_of(x: Tensor) -> Tensor:
        padded = torch.arange(4) > torch.arange(len(x))[:, None] % 4
        hidden = encoder(x.view(-1, 4, 8), src_key_padding_mask=padded).masked_fill(padded[..., None], 0.0)
        return head(hidden.sum(1)).square().mean()

    return trained([encoder, head], loss_of, row(16, 32).sin(), strategy, validates=True)


@trainings()
def test_distributions_of_forecasts(strategy: Strategy) -> Any:
    """Losses of forecasts by a beta and by a negative binomial distribution had no gradients, or became NaN.

    https://github.com/sktime/pytorch-forecasting/issues/231 and https://github.com/awslabs/gluonts/issues/833
    """
    net = perceptron(3, 4)

    def loss_of(x: Tensor) -> Tensor:
        shares, counts = x[:, 0].sigmoid(), (x[:, 1].abs() * 5).round()
        mean, precision, total, logits = net(x).unbind(-1)
        mean, precision = mean.sigmoid() * 0.98 + 0.01, F.softplus(precision) + 1e-2
        beta = torch.distributions.Beta(mean * precision, (1 - mean) * precision)
        binomial = torch.distributions.NegativeBinomial(F.softplus(total) + 1e-2, logits=logits)
        return -(beta.log_prob(shares) + binomial.log_prob(counts)).mean()

    return trained([net], loss_of, row(24, 3) * 3, strategy)


class Tweedie(torch.distributions.Distribution):
    """The part of a Tweedie distribution's likelihood that depends on its mean."""

    def __init__(self, log_mean: Tensor, rho: float) -> None:
        super().__init__(log_mean.shape, validate_args=False)
        self.log_mean, self.rho = log_mean, rho

    def log_prob(self, value: Tensor) -> Tensor:
        a = value * torch.exp((1 - self.rho) * self.log_mean) / (1 - self.rho)
        b = torch.exp((2 - self.rho) * self.log_mean) / (2 - self.rho)
        return a - b


@trainings()
def test_a_distribution_class_of_a_library(strategy: Strategy) -> Any:
    """A loss that is a distribution class of the library's own, whose parameters come from a network, failed.

    https://github.com/Nixtla/neuralforecast/issues/1181
    """
    net = perceptron(3, 1)

    def loss_of(x: Tensor) -> Tensor:
        y = x.abs().sum(1).floor()
        scale = y.mean().clamp(min=1.0)
        distribution = Tweedie(net(x).squeeze(1) + scale.log(), rho=1.2)
        return -(distribution.log_prob(y) * torch.ones_like(y)).sum() / y.numel()

    return trained([net], loss_of, row(24, 3) * 2, strategy)


@trainings()
def test_weights_after_a_search_of_the_learning_rate(strategy: Strategy) -> Any:
    """The search of the learning rate left the weights of its trial behind; `fit` has to start from the first ones.

    https://github.com/Lightning-AI/pytorch-lightning/issues/6675
    """
    module = Net(learning_rate=1e-3)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    fitting = trainer(strategy(), max_epochs=1)
    search = Tuner(fitting).lr_find(module, loader(), num_training=8, update_attr=False)
    assert search is not None
    after = [torch.equal(value, before[name]) for name, value in module.state_dict().items()]
    module.losses.clear()
    fitting.fit(module, loader())
    return search.results["loss"], after, module.losses, module.state_dict()


@trainings(falls_back="toggle_optimizer` outside of graphs")
def test_three_optimizers_that_accumulate(strategy: Strategy) -> Any:
    """Several optimizers, each with its own part toggled, over accumulated batches: a loss had no gradients.

    https://github.com/Lightning-AI/pytorch-lightning/issues/8365
    """
    parts = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)]

    class InTurns(Module):
        automatic_optimization = False  # pyright: ignore

        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> dict[str, Tensor]:  # pyright: ignore
            total = torch.zeros(())
            for optimizer in self.optimizers():  # pyright: ignore[reportGeneralTypeIssues]
                self.toggle_optimizer(optimizer)
                loss = parts[2](parts[1](parts[0](batch[0]).tanh()).relu()).sub(1).square().mean() / 2
                self.manual_backward(loss)
                if batch_idx % 2:
                    optimizer.step()
                    optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)
                total = total + loss.detach()
            return {"loss": total}

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), 0.1) for part in parts]

    return trained(parts, nn.Identity(), row(32, 4).cos(), strategy, module=InTurns)
