"""What steps draw: as in eager, and again after a run is resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import lit_ort
from lit_ort.strategies import jit

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "noise": lambda x: x + 0.1 * torch.randn_like(x),
    "windows": lambda x: x[torch.randint(len(x), (len(x),))],
    "permutation": lambda x: x + 0.1 * x[torch.randperm(len(x))],
    "samples": lambda x: x[torch.multinomial(x.square().sum(1), len(x), replacement=True)],
    "mask": lambda x: x * torch.bernoulli(torch.full_like(x, 0.7)),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "several": lambda x: (x + torch.rand(6)).masked_fill(torch.rand_like(x) < 0.2, 0.0) * torch.randint(1, 3, (4, 1)),
    "distribution": lambda x: torch.distributions.Normal(x, 0.1 + x.abs()).rsample(),
    "categories": lambda x: x + torch.distributions.Categorical(logits=x).sample().unsqueeze(1),
}


class Drawing(LightningModule):
    """Saves a checkpoint after a number of steps."""

    def __init__(self, draw: Callable[[Tensor], Tensor], saved_at: int, path: str | Path) -> None:
        super().__init__()
        self.net, self.draw = nn.Linear(6, 1), draw
        self.saved_at, self.path = saved_at, path
        self.seen: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(self.draw(batch[0])).square().mean()

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.net(batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += [outputs["loss"].item(), batch[0].sum().item()]
        if self.trainer.global_step == self.saved_at and batch_idx < 3:
            self.trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self) -> None:
        if self.trainer.global_step == self.saved_at:
            self.trainer.save_checkpoint(self.path)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def fit(
    draw: Callable[[Tensor], Tensor],
    strategy: Any,
    *,
    shuffle: bool = True,
    ckpt_path: Path | None = None,
    seed: int = 1,
    saved_at: int = -1,
    path: str | Path = "",
) -> list[float]:
    seed_everything(seed, verbose=False)
    # Batches that are not shuffled are all the same.
    rows = torch.randn(16, 6) if shuffle else torch.randn(4, 6).repeat(4, 1)
    module, data = Drawing(draw, saved_at, path), TensorDataset(rows)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        max_epochs=3,
    )
    trainer.fit(module, DataLoader(data, 4, shuffle=shuffle), ckpt_path=ckpt_path)
    return module.seen


@pytest.mark.sampled(4)
@pytest.mark.parametrize("compile", ["always", "auto"])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_steps_draw_what_eager_draws(draw: Callable[[Tensor], Tensor], compile: Literal["always", "auto"]) -> None:
    """The same numbers, and so the same order of data in the following epochs."""
    expected = fit(draw, "auto")
    actual = fit(draw, lit_ort.ORTStrategy(compile=compile, fallback="error"))
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-5, atol=1e-6)


DROPOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "values": lambda x: F.dropout(x, 0.3),
    "in_place": lambda x: F.dropout(x * 2, 0.3, inplace=True),
    "rows": lambda x: F.dropout1d(x, 0.3),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, True),
}


@pytest.mark.parametrize("draw", DROPOUTS.values(), ids=DROPOUTS)
def test_dropout_leaves_the_order_of_data_to_the_seed(draw: Callable[[Tensor], Tensor]) -> None:
    """However steps run: when a step is compiled depends on its time."""
    runs = [fit(draw, lit_ort.ORTStrategy(compile=compile)) for compile in ("always", "auto", "never")]
    orders = [torch.tensor(run[1::2]) for run in runs]
    assert torch.equal(orders[0], orders[1])
    assert torch.equal(orders[0], torch.tensor(fit(lambda x: x, "auto")[1::2]))
    assert runs[0][::2] != fit(lambda x: x, "auto")[::2]


# Dropout beside another random operator, before and after it.
MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "noise first": lambda x: F.dropout(DRAWS["noise"](x), 0.3),
    "dropout first": lambda x: DRAWS["noise"](F.dropout(x, 0.3)),
}


def orders_by_first_calls(draw: Callable[[], Callable[[Tensor], Tensor]], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The orders of data of runs that compile their step after other numbers of calls."""
    monkeypatch.setattr(jit, "estimate_of", lambda *_: jit.Estimate(1e-6, 0.5))
    monkeypatch.setattr(jit, "TURNS", 1)
    orders = []
    for first_calls in (3, 5, 8):
        monkeypatch.setattr(jit, "FIRST_CALLS", first_calls)
        strategy = lit_ort.ORTStrategy(compile="auto")
        orders.append(fit(draw(), strategy)[1::2])
        (choice,) = strategy.compile_log.explanation().choices
        assert choice.calls[1] > 0
    return orders


class NoisyDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(DRAWS["noise"](x))


def test_nor_on_the_first_call_of_layers_with_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = orders_by_first_calls(NoisyDropout, monkeypatch)
    assert first == second == third == fit(NoisyDropout(), lit_ort.ORTStrategy(compile="always"))[1::2]


class Checkpointed(LightningModule):
    """Keeps the result of a checkpoint with dropout, and the gradients of its first step."""

    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 6), nn.Dropout(0.5)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = checkpoint(lambda x: self.dropout(self.linear(x)), batch[0], use_reentrant=False)
        assert isinstance(hidden, Tensor)
        self.hidden = hidden.detach()
        return (hidden * torch.arange(6)).sum()

    def on_after_backward(self) -> None:
        assert self.linear.bias.grad is not None
        self.gradient = self.linear.bias.grad.clone()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def test_the_first_step_recomputes_the_masks_of_a_checkpoint() -> None:
    seed_everything(1, verbose=False)
    module = Checkpointed()
    quiet: Any = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    strategy = lit_ort.ORTStrategy(compile="never")
    runner = Trainer(accelerator="cpu", strategy=strategy, max_steps=1, **quiet)
    runner.fit(module, DataLoader(TensorDataset(torch.ones(4, 6)), 4))
    # The gradient of what was kept is doubled, as its value.
    kept = (module.hidden != 0).float() * 2
    torch.testing.assert_close(module.gradient, (torch.arange(6) * kept).sum(0))


@pytest.mark.parametrize("draw", MIXED.values(), ids=MIXED)
def test_the_order_of_data_does_not_depend_on_when_a_step_is_compiled(
    draw: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = orders_by_first_calls(lambda: draw, monkeypatch)
    assert first == second == third


def test_nor_if_dropout_begins_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def begins_later() -> Callable[[Tensor], Tensor]:
        shares = iter([0.0] * 2 + [0.3] * 20)
        return lambda x: F.dropout(x, share) if (share := next(shares)) else x

    first, second, third = orders_by_first_calls(begins_later, monkeypatch)
    assert first == second == third


def test_calls_that_are_not_compiled_draw_from_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "estimate_of", lambda *_: jit.Estimate(1e-6, 0.5))
    monkeypatch.setattr(jit, "TURNS", 1)
    monkeypatch.setattr(jit.StepChoice, "_is_faster_compiled", lambda self: True)
    modes = iter([3.0] * 5 + [0.5, 1.5] * 20)

    def branching(x: Tensor) -> Tensor:
        # Rare values of a Python number would need code of their own.
        return F.dropout(x * next(modes), 0.3)

    orders = fit(branching, lit_ort.ORTStrategy(compile="auto"))[1::2]
    assert orders == fit(lambda x: x, "auto")[1::2]


def test_fits_without_draws_of_their_own_have_different_masks() -> None:
    seed_everything(1, verbose=False)
    rows = TensorDataset(torch.randn(4, 6).repeat(4, 1))
    module = Drawing(DROPOUTS["values"], -1, "")
    quiet: Any = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    for _ in range(2):
        module.net.load_state_dict({"weight": torch.ones(1, 6), "bias": torch.zeros(1)})
        data = DataLoader(rows, 4, shuffle=True, generator=torch.Generator().manual_seed(1))
        Trainer(accelerator="cpu", strategy="ort", max_epochs=1, **quiet).fit(module, data)
    first, second = module.seen[:8:2], module.seen[8::2]
    assert set(first).isdisjoint(second)


class Nested(LightningModule):
    """Calls what a mode for operators would get in the way of."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 1)
        self.part = torch.compile(nn.Linear(6, 6), fullgraph=True, backend="eager")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.part(F.dropout(batch[0], 0.1))
        x = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))
        return self.net(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


@pytest.mark.parametrize("compile", ["auto", "never"])
def test_the_first_step_has_compiled_parts_and_branches_on_tensors(compile: Literal["auto", "never"]) -> None:
    quiet: Any = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    strategy = lit_ort.ORTStrategy(compile=compile)
    runner = Trainer(accelerator="cpu", strategy=strategy, max_epochs=1, **quiet)
    runner.fit(Nested(), DataLoader(TensorDataset(torch.randn(16, 6)), 4))
    assert runner.global_step == 4


# Drawn in code that Dynamo doesn't trace.
OUTSIDE = torch.compiler.disable(DRAWS["noise"])


@pytest.mark.sampled(5)
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("compile", ["always", "auto"])
@pytest.mark.parametrize("steps", [6, 8], ids=["inside_epoch", "between_epochs"])
@pytest.mark.parametrize(
    "draw",
    [DRAWS["noise"], DROPOUTS["values"], OUTSIDE, *MIXED.values()],
    ids=["noise", "dropout", "outside of graphs", *MIXED],
)
def test_a_resumed_run_draws_what_the_whole_one_drew(
    tmp_path: Path, draw: Callable[[Tensor], Tensor], steps: int, compile: Literal["always", "auto"]
) -> None:
    # Inside of an epoch, and with dropout alone, a loader draws its order from the seed again, as in eager.
    shuffle = draw in (DRAWS["noise"], OUTSIDE) and steps == 8
    path = tmp_path / "run.ckpt"
    whole = fit(draw, lit_ort.ORTStrategy(compile=compile), shuffle=shuffle, saved_at=steps, path=path)
    resumed = fit(draw, lit_ort.ORTStrategy(compile=compile), shuffle=shuffle, ckpt_path=path)
    assert resumed == whole[2 * steps :]


def test_a_run_resumed_with_another_seed_draws_other_numbers(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    whole = fit(DRAWS["noise"], "ort", saved_at=8, path=path)
    resumed = fit(DRAWS["noise"], "ort", ckpt_path=path, seed=2)
    assert len(resumed) == len(whole) - 16
    assert set(resumed).isdisjoint(whole)


def test_a_checkpoint_that_is_only_validated_resumes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    fit(DROPOUTS["values"], "ort", shuffle=False, saved_at=6, path=path)

    def losses(seed: int) -> list[float]:
        seed_everything(0, verbose=False)
        module, rows = Drawing(DROPOUTS["values"], -1, ""), torch.randn(4, 6).repeat(4, 1)
        loader = DataLoader(TensorDataset(rows), 4)
        quiet: Any = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        trainer = Trainer(
            accelerator="cpu", strategy=lit_ort.ORTStrategy(compile="always"), max_epochs=1, enable_checkpointing=False,
            **quiet,
        )  # fmt: skip
        trainer.test(module, loader, ckpt_path=path, verbose=False)
        seed_everything(seed, verbose=False)
        trainer.fit(module, loader)
        return module.seen

    assert losses(1) == losses(1) != losses(2)
