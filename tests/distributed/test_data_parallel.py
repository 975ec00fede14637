"""`ort_ddp` and `ort_zero1` on two ranks, compared with one process that has each whole batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import pytorch_optimizer
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import lit_ort
from lit_ort import ORTDDPStrategy, ORTZero1Strategy
from lit_ort.distributed.optimizer_copies import depends_on_others
from lit_ort.errors import OptionsError
from lit_ort.runtime.report import Choice
from lit_ort.strategies import jit
from tests.lightning_models import Net, loader, trainer
from tests.ranks import message_of, run_on_ranks

# All tests of the file share one launch.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("data_parallel")]

RANKS = 2
BATCH = 8
ROWS = 80
Weights = dict[str, Tensor]


class Partial(Net):
    """A module with a parameter that is not used in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))


class Deciding(Partial):
    """A module whose steps branch on values of their batches, which differ between ranks."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = super().training_step(batch, batch_idx)
        if x.mean() > 0:
            loss = loss + self.unused.square().sum()
        return 2 * loss if (y == 0).sum() > 2 else loss


class Manual(Net):
    """A module with manual optimization, and another forward than its class has."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.forward = self.doubled

    def doubled(self, x: Tensor) -> Tensor:
        return 2 * self.head(self.body(x))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Statistics(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU())


class WithLamb(Net):
    def configure_optimizers(self) -> Any:
        return pytorch_optimizer.Lamb(self.parameters(), lr=1e-2, weight_decay=0.01)


class WithAdam(Net):
    """A module that records the form of its optimizer's steps."""

    def __init__(self) -> None:
        super().__init__()
        self.forms: list[list[bool | None]] = []

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.body.parameters()}, {"params": self.head.parameters(), "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, 1e-2, eps=1e-3)
        optimizer.register_step_post_hook(lambda o, *_: self.forms.append([g["fused"] for g in o.param_groups]))
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)]


class WithAdagrad(Net):
    """Its optimizer has a state before the first step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), 0.05, initial_accumulator_value=0.1)


class SetsRate(Net):
    """Sets the learning rate of the step at hand."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.global_step)


def fit(
    strategy: Any, make: Callable[[], LightningModule], rows: int = ROWS, batch: int = BATCH, **settings: Any
) -> Any:
    seed_everything(1, verbose=False)
    module = make()
    checkpoint = settings.pop("ckpt_path", None)
    runner = trainer(
        strategy, **{"devices": RANKS if dist.is_torchelastic_launched() else 1, "limit_val_batches": 0, **settings}
    )
    runner.fit(module, part_of(loader(rows, batch)), loader(), ckpt_path=checkpoint, weights_only=False)
    return runner


def part_of(whole: DataLoader[Any]) -> DataLoader[Any]:
    """Every second row of the data on each of two ranks, in order; together, their batches are those of one process."""
    if not dist.is_torchelastic_launched():
        return whole
    dataset: Any = whole.dataset
    sampler = DistributedSampler(dataset, RANKS, int(os.environ["RANK"]), shuffle=False)
    return DataLoader(dataset, whole.batch_size, sampler=sampler)


def weights(runner: Any) -> Weights:
    return {name: value.clone() for name, value in runner.lightning_module.state_dict().items()}


def strict(**arguments: Any) -> ORTDDPStrategy:
    return ORTDDPStrategy(fallback="error", **arguments)


def in_buckets() -> ORTDDPStrategy:
    return strict(gradient_as_bucket_view=True)


def sharded(**arguments: Any) -> ORTZero1Strategy:
    return ORTZero1Strategy(fallback="error", **arguments)


# Strategies on both ranks, with the module and the settings for the same run in one process.
RUNS: dict[str, tuple[Callable[[], Any], Callable[[], LightningModule], dict[str, Any]]] = {
    "ddp": (strict, Net, {"limit_val_batches": 1}),
    "overlap": (lambda: strict(overlap=True, bucket_cap_mb=1e-4), Net, {}),
    "gradients in buckets": (in_buckets, Net, {}),
    "accumulation": (strict, Net, {"accumulate_grad_batches": 2}),
    "clip": (strict, Net, {"gradient_clip_val": 0.05}),
    "64-true": (strict, Net, {"precision": "64-true"}),
    "manual optimization": (strict, Manual, {}),
    "zero1": (sharded, Net, {"limit_val_batches": 1}),
    "zero1 with AdamW": (sharded, WithAdam, {}),
    "zero1 with LAMB": (sharded, WithLamb, {}),
    "zero1 with Adagrad": (sharded, WithAdagrad, {}),
    "zero1, rates set within the step": (sharded, SetsRate, {}),
    "zero1 with accumulation": (sharded, WithAdam, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
}
# Each of them is in another run too, but for float64.
SWEEP = ("accumulation", "clip", "64-true", "zero1 with AdamW", "zero1 with LAMB")
NORMAL = [name for name in RUNS if name not in SWEEP]
# Runs that differ from one process in eager too, so that they are compared with two ranks in eager.
EAGER_RUNS: dict[str, tuple[dict[str, Any], Callable[[], LightningModule], int]] = {
    "a shorter last batch": ({}, Net, 76),
    "an unused parameter": ({"find_unused_parameters": True}, Partial, ROWS),
    "branches on values": ({"find_unused_parameters": True}, Deciding, ROWS),
    "batch statistics": ({}, Statistics, ROWS),
}


def runs_of(names: Sequence[str]) -> dict[str, Any]:
    return {name: fit(make(), net, **settings) for name, (make, net, settings) in RUNS.items() if name in names}


def weights_of(names: Sequence[str]) -> dict[str, Weights]:
    return {name: weights(runner) for name, runner in runs_of(names).items()}


def all_runs(folder: Path) -> dict[str, Any]:
    runs = runs_of(NORMAL)
    results: dict[str, Any] = {name: weights(runner) for name, runner in runs.items()}
    for name, (arguments, net, rows) in EAGER_RUNS.items():
        results[name] = weights(fit(strict(**arguments), net, rows))
        results[f"eager: {name}"] = weights(fit(DDPStrategy(**arguments), net, rows))
    results["kinds"] = kinds(runs["ddp"]), kinds(runs["overlap"])
    results["dropout"] = losses_with_dropout()
    results["adasum"] = weights(fit(strict(adasum=True), Net))
    results["chosen"] = chosen_on_the_way()
    whole, *others = (fit(strategy, WithAdam, max_epochs=1) for strategy in (sharded(), strict(), in_buckets()))
    results["state"] = state_sizes(whole)
    results["forms"] = [forms(runner) for runner in (whole, *others)]
    results["messages"] = error_messages()
    whole.save_checkpoint(folder / "one.ckpt", weights_only=False)
    results["resumed"] = weights(fit(sharded(), WithAdam, ckpt_path=folder / "one.ckpt"))
    return results


def kinds(runner: Any) -> list[str]:
    return [graph.kind for graph in lit_ort.explain(runner).graphs if graph.name.startswith("training")]


def losses_with_dropout() -> list[float]:
    """The losses of a rank, where both ranks have the same data."""
    module = Net(dropout=0.5, learning_rate=0.0)
    trainer(strict(), devices=RANKS, max_epochs=1, use_distributed_sampler=False).fit(module, loader(), loader())
    return module.losses


CHOSEN_EPOCHS = 5


def chosen_on_the_way() -> tuple[Weights, Choice]:
    """The weights of a run that begins in eager, and how the training step ran."""
    # Compiling is expected to take no time.
    with patch.object(jit, "estimate_of", lambda *_: jit.Estimate(1e-6, 0.5)):
        runner = fit(ORTDDPStrategy(compile="auto"), Net, max_epochs=CHOSEN_EPOCHS)
    return weights(runner), next(c for c in lit_ort.explain(runner).choices if c.step == "training_step")


def state_sizes(runner: Any) -> tuple[int, int]:
    """The number of elements of the optimizer's state on this rank, and of all parameters."""
    states = runner.optimizers[0].optim.state.values()
    moments = sum(value.numel() for state in states for value in state.values() if value.dim())
    return moments, sum(value.numel() for value in runner.lightning_module.parameters())


def forms(runner: Any) -> list[list[bool | None]]:
    """The forms of the optimizer's first two steps, and the one in its options."""
    return [*runner.lightning_module.forms[:2], [group["fused"] for group in runner.optimizers[0].param_groups]]


def error_messages() -> dict[str, str]:
    functions: dict[str, Callable[[], Any]] = {
        "sync": lambda: fit(strict(), Net, sync_batchnorm=True),
        "static": lambda: fit(strict(static_graph=True), Net, accumulate_grad_batches=2),
        "world": lambda: fit(strict(), Net, devices=3),
    }
    return {name: message_of(function) for name, function in functions.items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return run_on_ranks(all_runs, RANKS, folder), folder


Results = tuple[list[dict[str, Any]], Path]


def assert_equal(actual: Weights, expected: Weights, tolerance: float = 1e-5) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error = float((actual[name] - value).float().norm())
        assert error <= tolerance * max(float(value.float().norm()), 1e-3), name


@pytest.mark.parametrize("name", NORMAL)
def test_weights_are_those_of_one_process(name: str, results: Results) -> None:
    assert_like_one_process(name, results[0])


@pytest.mark.sweep
def test_more_runs() -> None:
    results = run_on_ranks(weights_of, RANKS, SWEEP)
    for name in SWEEP:
        assert_like_one_process(name, results)


def assert_like_one_process(name: str, results: list[dict[str, Any]]) -> None:
    _, net, settings = RUNS[name]
    expected = weights(fit("auto", net, batch=RANKS * BATCH, **settings))
    for rank in range(RANKS):
        assert_equal(results[rank][name], expected)


@pytest.mark.parametrize("name", EAGER_RUNS)
def test_weights_are_those_of_eager_ranks(name: str, results: Results) -> None:
    for result in results[0]:
        assert_equal(result[name], result[f"eager: {name}"])


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("Lamb", {}, False),
        ("Lamb", {"pre_norm": True}, True),
        ("Prodigy", {}, True),
        ("Lion", {}, False),
        ("AdaFactor", {}, False),
    ],
)
def test_updates_that_depend_on_other_parameters_are_found(name: str, settings: Any, expected: bool) -> None:
    optimizer = getattr(pytorch_optimizer, name)([torch.nn.Parameter(torch.ones(2))], lr=1.0, **settings)
    # At first, this schedule sets the learning rate to zero.
    torch.optim.lr_scheduler.LambdaLR(optimizer, float)
    assert depends_on_others(optimizer) == expected


def test_ranks_choose_the_same_way_for_a_step(results: Results) -> None:
    (first, choice), (second, other) = (result["chosen"] for result in results[0])
    assert (choice.way, choice.calls) == (other.way, other.calls)
    assert choice.calls[1] >= jit.TURNS
    expected = weights(fit("auto", Net, batch=RANKS * BATCH, max_epochs=CHOSEN_EPOCHS))
    assert_equal(first, expected)
    assert_equal(second, expected)


def test_a_step_is_one_graph_or_one_for_each_bucket(results: Results) -> None:
    fused, by_bucket = results[0][0]["kinds"]
    assert set(fused) == {"fused"}
    assert "split" in by_bucket
    assert len(by_bucket) > len(fused)


def test_ranks_have_different_dropout_masks(results: Results) -> None:
    first, second = (result["dropout"] for result in results[0])
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_adasum_is_applied_to_the_gradients(results: Results) -> None:
    (first, second), averaged = (result["adasum"] for result in results[0]), results[0][0]["ddp"]
    assert_equal(first, second)
    assert any(not torch.allclose(first[name], averaged[name], rtol=1e-3) for name in averaged)


def test_each_rank_has_a_part_of_the_optimizer_state(results: Results) -> None:
    sizes = [result["state"][0] for result in results[0]]
    assert sum(sizes) == 2 * results[0][0]["state"][1]
    assert max(sizes) < 0.7 * sum(sizes)


def test_optimizers_step_in_the_fused_form(results: Results) -> None:
    for result in results[0]:
        assert result["forms"] == [[[None, None], [True, True], [None, None]]] * 3


def test_a_sharded_checkpoint_resumes_on_two_ranks_and_on_one(results: Results) -> None:
    by_rank, folder = results
    expected = weights(fit("auto", WithAdam, batch=RANKS * BATCH))
    assert_equal(by_rank[0]["resumed"], expected)
    alone = fit(lit_ort.ORTStrategy(fallback="error"), WithAdam, batch=RANKS * BATCH, ckpt_path=folder / "one.ckpt")
    assert_equal(weights(alone), expected)


def test_error_messages(results: Results) -> None:
    messages = results[0][0]["messages"]
    assert "SyncBatchNorm has no kernel for the CPU" in messages["sync"]
    assert "static_graph=True with accumulate_grad_batches=2" in messages["static"]
    assert "3" in messages["world"]
    assert "2" in messages["world"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"adasum": 1}, "adasum=1 is not a bool"),
        ({"fallback": "never"}, "fallback='never' is not one of"),
        ({"adasum": True, "ddp_comm_hook": print}, "adasum=True sets a ddp_comm_hook"),
    ],
)
def test_invalid_arguments_raise_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        ORTDDPStrategy(**arguments)


@pytest.mark.parametrize("name", ["bucket_cap", "optimizer_in_graph"])
@pytest.mark.parametrize("strategy", [ORTDDPStrategy, ORTZero1Strategy])
def test_unknown_arguments_raise_at_once(strategy: type[ORTDDPStrategy], name: str) -> None:
    arguments: dict[str, Any] = {name: True}
    with pytest.raises(OptionsError, match=f"Unknown option '{name}'"):
        strategy(**arguments)
