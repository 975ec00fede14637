"""`ort_tensor` on two ranks, compared with one process: the transformer LM, with an odd vocabulary, and GPT-2."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_optimizer
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, seed_everything
from lit_ort_tasks.data.tokenization import train_byte_level_bpe
from lit_ort_tasks.gpt2 import GPT2
from lit_ort_tasks.transformer_lm import TransformerLM
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lit_ort
from lit_ort import ORTTensorStrategy
from lit_ort.distributed.tensor_parallel import Cut, Shard, shard
from lit_ort.errors import OptionsError, UnsupportedError
from tests.lightning_models import Net, trainer
from tests.ranks import message_of, run_on_ranks

# All tests of the file share one launch.
pytestmark = pytest.mark.xdist_group("tensor_parallel")

WORDS, LENGTH, COLUMNS = 51, 12, 10
SGD = partial(torch.optim.SGD, lr=0.2)
LAMB = partial(pytorch_optimizer.Lamb, lr=1e-2)
ADAM = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
Weights = dict[str, Tensor]


def transformer(optimizer: Any = SGD, **sizes: Any) -> TransformerLM:
    settings = {"width": 16, "feed_forward": 24, "dropout": 0.0, **sizes}
    return TransformerLM(WORDS, optimizer, **settings)


def gpt2() -> GPT2:
    tokenizer = train_byte_level_bpe(["a few words"], 261)
    return GPT2(tokenizer, SGD, layers=2, heads=2, width=16, dropout=0.0, max_length=LENGTH, sample_tokens=0)


def streams(words: int) -> Tensor:
    return torch.randint(words, (5, LENGTH + 1, COLUMNS), generator=torch.Generator().manual_seed(3))


def text() -> DataLoader[Any]:
    tokens = streams(WORDS)
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=None)


def blocks() -> DataLoader[Any]:
    rows = streams(200).transpose(1, 2)
    data = [{"input_ids": row[:, :-1].contiguous(), "targets": row[:, 1:].contiguous()} for row in rows]
    data[0]["targets"][:, :3] = -100
    return DataLoader(data, batch_size=None)  # pyright: ignore[reportArgumentType] - a list serves as a dataset


RUNS: dict[str, tuple[Callable[[], LightningModule], Callable[[], Any], dict[str, Any]]] = {
    "transformer LM": (transformer, text, {"gradient_clip_val": 0.3, "limit_val_batches": 1.0}),
    "AdamW": (partial(transformer, ADAM), text, {"accumulate_grad_batches": 2}),
    "64-true": (transformer, text, {"gradient_clip_val": 0.3, "precision": "64-true"}),
    "GPT-2": (gpt2, blocks, {"gradient_clip_val": 0.5, "limit_val_batches": 1.0}),
}
# Resumed runs have AdamW, and clipping in float64 is the same code.
SWEEP = ("AdamW", "64-true", "GPT-2")
NORMAL = [name for name in RUNS if name not in SWEEP]


def fit(strategy: Any, module: LightningModule, data: Any, **settings: Any) -> Any:
    seed_everything(1, verbose=False)
    checkpoint = settings.pop("ckpt_path", None)
    devices = int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1
    runner = trainer(strategy, **{"devices": devices, "limit_val_batches": 0, **settings})
    runner.fit(module, data, data, ckpt_path=checkpoint, weights_only=False)
    return runner


def run(strategy: Any, name: str) -> Any:
    make, data, settings = RUNS[name]
    seed_everything(1, verbose=False)
    return fit(strategy, make(), data(), **settings)


def strict() -> ORTTensorStrategy:
    return ORTTensorStrategy(fallback="error")


def weights(runner: Any) -> Weights:
    return {name: value.clone() for name, value in runner.strategy.lightning_module_state_dict().items()}


def validation_loss(runner: Any) -> float | None:
    """The loss in a run that has a validation."""
    loss = runner.callback_metrics.get("val/loss")
    return None if loss is None else float(loss)


def adam(seed: int = 1) -> TransformerLM:
    seed_everything(seed, verbose=False)
    return transformer(ADAM)


def results_of(names: Sequence[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in names:
        runner = run(strict(), name)
        log = lit_ort.explain(runner)
        kinds = {graph.kind for graph in log.graphs if graph.name.startswith("training")}
        size = sum(parameter.numel() for parameter in runner.lightning_module.parameters())
        results[name] = {"weights": weights(runner), "kinds": kinds, "size": size, "loss": validation_loss(runner)}
    return results


def all_runs(folder: Path) -> dict[str, Any]:
    results = results_of(NORMAL)
    half = fit(strict(), adam(), text(), max_epochs=1)
    half.save_checkpoint(folder / "tensor.ckpt", weights_only=False)
    results["resumed"] = weights(fit(strict(), adam(seed=2), text(), ckpt_path=folder / "alone.ckpt"))
    results["draws"] = draws()
    results["messages"] = {name: message_of(function) for name, function in unsupported_runs().items()}
    return results


class Recorder(Callback):
    """Records the order of the data, draws in the first process alone, and asks for the number of steps."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.draws: list[float] = []

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        if trainer.is_global_zero:
            self._draw()

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.order.append(int(batch[0].sum()))
        if not batch_idx:
            self.draws = self._draw()

    def _draw(self) -> list[float]:
        return [float(torch.rand(())), random.random(), float(np.random.rand())]


class AsksForSteps(TransformerLM):
    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def draws() -> dict[str, Any]:
    """The order of data with processes that aren't seeded, shuffled and not."""
    found: dict[str, Any] = {}
    for shuffle in (True, False):
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        data, recorder = text(), Recorder()
        data = DataLoader(data.dataset, batch_size=None, shuffle=shuffle)
        module = AsksForSteps(WORDS, SGD, width=16, feed_forward=24, dropout=0.0)
        runner = trainer(strict(), devices=2, limit_val_batches=0, callbacks=[recorder])
        runner.fit(module, data)
        found["shuffled" if shuffle else "in order"] = recorder.order
        found[f"draws {shuffle}"] = recorder.draws
    return found


def unsupported_runs() -> dict[str, Callable[[], Any]]:
    return {
        "no plan": lambda: fit(strict(), Net(), text()),
        "heads": lambda: fit(strict(), transformer(width=15, heads=3), text()),
        "LAMB": lambda: fit(strict(), transformer(LAMB), text()),
        "columns": lambda: fit(strict(), transformer(feed_forward=25), text()),
        "between": lambda: fit(strict(), Between(), DataLoader(torch.randn(8, 4), batch_size=4)),  # pyright: ignore[reportArgumentType]
        "words": lambda: fit(strict(), transformer(), no_words()),
    }


def no_words() -> DataLoader[Any]:
    tokens = streams(WORDS)
    return DataLoader(TensorDataset(tokens[:, :-1] + WORDS, tokens[:, 1:]), batch_size=None)


class Between(LightningModule):
    """A parameter between two layers, whose gradient has parts on all processes."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 8), nn.PReLU(), nn.Linear(8, 1))

    def tensor_plan(self) -> dict[str, str]:
        return {"network.0": "column", "network.2": "row"}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.network(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    fit("auto", adam(), text(), max_epochs=1).save_checkpoint(folder / "alone.ckpt", weights_only=False)
    return folder


@pytest.fixture(scope="module")
def results(alone: Path) -> list[dict[str, Any]]:
    return run_on_ranks(all_runs, 2, alone)


def assert_equal(actual: Weights, expected: Weights) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert float((actual[name] - value).norm()) <= 1e-5 * max(float(value.norm()), 1e-2), name


@pytest.mark.slow
@pytest.mark.parametrize("name", NORMAL)
def test_weights_and_losses_are_those_of_one_process(name: str, results: list[dict[str, Any]]) -> None:
    assert_like_one_process(name, results)


@pytest.mark.sweep
def test_more_runs() -> None:
    results = run_on_ranks(results_of, 2, SWEEP)
    for name in SWEEP:
        assert_like_one_process(name, results)
    assert all(result[name]["kinds"] == {"fused"} for name in SWEEP for result in results)


def assert_like_one_process(name: str, results: list[dict[str, Any]]) -> None:
    expected = run("auto", name)
    assert_equal(results[0][name]["weights"], weights(expected))
    for result in results:
        assert result[name]["loss"] == pytest.approx(validation_loss(expected), rel=1e-5)


@pytest.mark.slow
def test_a_step_is_one_graph_of_a_part_of_the_model(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert all(result[name]["kinds"] == {"fused"} for name in NORMAL)
    whole = sum(parameter.numel() for parameter in transformer().parameters())
    assert whole / 2 < results[0]["transformer LM"]["size"] < 0.6 * whole


@pytest.mark.slow
def test_checkpoints_are_those_of_one_process(results: list[dict[str, Any]], alone: Path) -> None:
    whole = fit("auto", adam(), text())
    assert_equal(results[0]["resumed"], weights(whole))
    assert_equal(weights(fit("auto", adam(seed=2), text(), ckpt_path=alone / "tensor.ckpt")), weights(whole))


@pytest.mark.slow
def test_all_processes_read_the_same_batches(results: list[dict[str, Any]]) -> None:
    first, second = (result["draws"] for result in results)
    assert first == second
    order = [int(tokens[:-1].sum()) for tokens in streams(WORDS)]
    assert first["in order"] == order * 2
    assert sorted(first["shuffled"]) == sorted(order * 2)
    assert first["shuffled"] != order * 2


@pytest.mark.slow
def test_error_messages(results: list[dict[str, Any]]) -> None:
    messages = results[0]["messages"]
    assert "the layers that Net.tensor_plan() names, but there is no such method" in messages["no plan"]
    assert "3 attention heads don't divide into equal parts for 2 processes" in messages["heads"]
    assert "Lamb may need whole parameters (as LAMB and Adafactor do)" in messages["LAMB"]
    assert "network.1.weight has another gradient on each process: it is used between layers" in messages["between"]
    assert "out of range" in messages["words"]
    assert "25 outputs of model.encoder.layers.0.linear1 don't divide" in messages["columns"]


@pytest.mark.parametrize(("cut", "size"), [(Cut(0), 3), (Cut(1), 2), (Cut(0, 3), 2), (Cut(1, 2), 3)])
def test_parts_concatenate_to_the_whole(cut: Cut, size: int) -> None:
    whole = torch.arange(12.0 * 12).view(12, 12)
    parts = [cut.part(whole, rank, size) for rank in range(size)]
    assert torch.equal(cut.whole(parts), whole)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"head": "columns"}, "tensor_plan has the style 'columns' for 'head', which is not one of column, row"),
        ({"heads": "column"}, "tensor_plan has the pattern 'heads', but Net has no matching layer"),
    ],
)
def test_invalid_plans_raise(plan: dict[str, str], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        shard(Net(), plan, Shard("none", 0, 2))


def test_a_tied_parameter_is_sharded_everywhere_or_nowhere() -> None:
    module = nn.ModuleDict({"words": nn.Embedding(8, 4), "out": nn.Linear(4, 8, bias=False)})
    module["out"].weight = module["words"].weight
    with pytest.raises(
        UnsupportedError, match=r"words.weight and out.weight are one parameter.*leaves words.weight whole"
    ):
        shard(module, {"out": "output"}, Shard("none", 0, 2))


@pytest.mark.parametrize("layer", [nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(reduction="sum")])
def test_a_loss_that_is_not_a_plain_mean_is_rejected(layer: nn.Module) -> None:
    module = nn.ModuleDict({"loss": layer})
    with pytest.raises(UnsupportedError, match="tensor_plan supports only the plain mean"):
        shard(module, {"loss": "cross_entropy"}, Shard("none", 0, 2))


def test_logits_of_some_words_need_a_loss_of_all() -> None:
    with pytest.raises(UnsupportedError, match="has the style 'output' without 'cross_entropy'"):
        shard(nn.ModuleDict({"out": nn.Linear(4, 8)}), {"out": "output"}, Shard("none", 0, 2))


def clipped_step() -> float:
    """The norm of the change of a sharded weight in one step of `pytorch_lightning`."""
    import pytorch_lightning as pl

    class Plain(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def tensor_plan(self) -> dict[str, str]:
            return {"linear": "column"}

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.linear(batch).square().sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1.0)

    module = Plain()
    before = module.linear.weight.detach().clone()
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    runner = pl.Trainer(
        strategy="ort_tensor",
        accelerator="cpu",
        devices=1,
        max_steps=1,
        gradient_clip_val=1e-3,
        enable_checkpointing=False,
        **quiet,
    )
    rows: Any = torch.ones(8, 6)
    runner.fit(module, DataLoader(rows, batch_size=8))
    return float((module.linear.weight.detach() - before).norm())


@pytest.mark.sweep
def test_gradients_of_pytorch_lightnings_modules_are_clipped() -> None:
    """Lightning's plugins clip gradients only in modules of their own package and ignore others without a warning."""
    (change,) = run_on_ranks(clipped_step, 1)
    assert 0 < change <= 1e-3


def test_invalid_arguments_raise_at_once() -> None:
    with pytest.raises(OptionsError, match="Unknown option 'plan'"):
        ORTTensorStrategy(plan={})  # pyright: ignore[reportCallIssue]
    with pytest.raises(OptionsError, match="threads=0 must be an integer above 0"):
        ORTTensorStrategy(threads=0)
