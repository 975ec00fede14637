"""Training steps as ONNX models: in an onnxruntime without torch they train as eager PyTorch does."""

from __future__ import annotations

import copy
import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

import lit_ort
from lit_ort.errors import ExportError
from lit_ort.export.differentiable_forms import DifferentiableForms
from lit_ort.export.safetensors_file import read_tensors, write_tensors
from lit_ort.export.seeded_random import SeededRandom
from lit_ort.export.step_function import Step
from tests.export.elsewhere import train_elsewhere
from tests.export.training_cases import CASES, Batch, Images, TrainingCase

pytestmark = [
    pytest.mark.usefixtures("one_thread", "forked_sessions"),
    pytest.mark.filterwarnings("ignore:You are trying to `self.log"),
]
STEPS, RATE = 20, 1e-3
SIZES = (6, 4)
# Interpreters of environments with an onnxruntime of other versions, with colons between them.
OTHER_PYTHONS = os.environ.get("LIT_ORT_TEST_PYTHONS")


def batches_of(case: TrainingCase) -> list[Batch]:
    return [case.batch(SIZES[k % 2], k) for k in range(STEPS)]


def loss_of(module: Any, batch: Batch) -> torch.Tensor:
    found = module.training_step(batch, 0) if hasattr(module, "training_step") else module(**batch)[0]
    return found["loss"] if isinstance(found, dict) else found


def eager_losses(module: nn.Module, batches: list[Batch], optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for k, batch in enumerate(batches):
        optimizer.zero_grad()
        with SeededRandom(torch.tensor(k)), DifferentiableForms(dropout=True):
            loss = loss_of(module, batch)
            loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


# docs/deploy.md trains a BERT elsewhere.
SLOW = ("convolutions",)
SWEEP = sorted(CASES.keys() - {"MLP", *SLOW})


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name",
    [
        "MLP",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
        *(pytest.param(name, marks=pytest.mark.sweep) for name in SWEEP),
    ],
)
def test_twenty_steps_of_two_sizes_are_those_of_eager(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    module = case.make().train()
    batches = batches_of(case)
    before = copy.deepcopy(module.state_dict())
    exported = lit_ort.export_training(module, tmp_path / "step", batches[0], dynamic=case.dynamic, **case.settings)
    assert max(one.error for one in exported.checked) < 1e-4
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())

    trained = [value for name, value in module.named_parameters() if name in exported.trainable]
    losses = eager_losses(module, batches, torch.optim.AdamW(trained, RATE))
    assert len(set(losses)) == STEPS
    # One case in a process of its own, the others in forks, which have imported onnxruntime.
    pythons = OTHER_PYTHONS.split(":") if OTHER_PYTHONS else [sys.executable if name == "MLP" else None]
    for k, python in enumerate(pythons):
        folder = shutil.copytree(exported.folder, tmp_path / f"{k}")
        found = train_elsewhere(folder, batches, RATE, python)
        np.testing.assert_allclose(found["loss"], losses, rtol=1e-4, atol=1e-4)
        fresh = case.make()
        fresh.load_state_dict(before)
        lit_ort.load_training_checkpoint(fresh, folder)
        for key, value in module.state_dict().items():
            if not any(part in key for part in case.left_out):
                torch.testing.assert_close(fresh.state_dict()[key], value, rtol=1e-4, atol=1e-4, msg=f"{python}: {key}")


class Recurrent(nn.Module):
    """The mean of the results of a recurrent layer, with a state that is learned."""

    def __init__(self, kind: Any, **settings: Any) -> None:
        super().__init__()
        self.layer = kind(4, 8, 2, **settings)
        self.state = nn.Parameter(torch.randn(4 if settings.get("bidirectional") else 2, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.state.expand(-1, x.shape[1], -1).contiguous()
        output, last = self.layer(x, (state, state) if isinstance(self.layer, nn.LSTM) else state)
        return (output.square().mean() + output[-1].mean() + torch.stack(list(last)).mean()).sin()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param(nn.GRU, {"bidirectional": True}, marks=pytest.mark.slow),
        *(
            pytest.param(kind, settings, marks=pytest.mark.sweep)
            for kind in (nn.LSTM, nn.RNN)
            for settings in ({"bias": False}, {"bidirectional": True})
        ),
        pytest.param(nn.RNN, {"nonlinearity": "relu"}, marks=pytest.mark.sweep),
    ],
)
def test_recurrent_layers_of_any_length(kind: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Recurrent(kind, **settings)
    exported = lit_ort.export_training(module, tmp_path / "step", torch.randn(5, 3, 4), optimizer="sgd")
    # The width alone.
    assert [size.partition(" at ")[0] for size in exported.fixed_sizes] == ["x has 4 in dimension 2"]
    # Of other lengths than the batch among them.
    assert max(one.error for one in exported.checked) < 1e-5


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


class Scaled(nn.Module):
    """The mean of a product with a parameter, after a function."""

    def __init__(self, function: Any = lambda x: x) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(6)), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight).float().mean()


class WithSideEffects(Images):
    """A step that writes into a buffer and a teacher's parameters, keeps losses, and logs under names of inputs."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 3))
        self.teacher = nn.Linear(6, 3).requires_grad_(False)
        self.register_buffer("average", torch.zeros(()))
        # Which no step reads.
        self.register_buffer("last", torch.zeros(()))
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        predictions = self(batch["x"])
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                own.mul_(0.9).add_(other, alpha=0.1)
        loss = nn.functional.cross_entropy(predictions, batch["y"])
        loss = loss + nn.functional.mse_loss(predictions, self.teacher(batch["x"]))
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        self.losses.append(loss)
        self.last = loss.detach()
        self.accuracy(predictions, batch["y"])
        for name in ("average", "average_out", "x", "learning_rate", "optimizer.step", "average.next"):
            self.log(name, self.average)
        self.log("accuracy", self.accuracy)
        if not self.training:
            self.log("in_eval", loss)
        return loss + 0.1 * self.average


def test_side_effects_of_a_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, batch = WithSideEffects(), {"x": torch.randn(6, 6), "y": torch.randint(3, (6,))}
    exported = lit_ort.export_training(module, tmp_path / "step", batch)
    assert max(one.error for one in exported.checked) < 1e-5
    assert module.losses == []
    assert float(module.average) == 0
    logged = (
        "average_out",
        "average_out_out",
        "x_out",
        "learning_rate_out",
        "optimizer.step_out",
        "average.next_out",
        "accuracy",
    )
    assert exported.inputs.keys() == {"x", "y"}
    assert exported.outputs == ("loss", *logged)
    found = train_elsewhere(exported.folder, [batch] * 3, RATE)
    losses = eager_losses(module, [batch] * 3, torch.optim.AdamW(module.net.parameters(), RATE))
    np.testing.assert_allclose(found["loss"], losses, rtol=1e-5)
    np.testing.assert_allclose(found["eval/output"], module(batch["x"]).detach(), atol=1e-6)
    loaded = lit_ort.load_training_checkpoint(copy.deepcopy(WithSideEffects()), exported.folder)
    assert {"average", "last", "teacher.weight", "net.weight"} <= set(loaded)


class Counting(nn.Module):
    """A loss that depends on how often it was computed."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (x * self.weight).sum() * self.calls


class Keeping(Scaled):
    """A step that goes on from the results of the last one, whose batch has to be of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept, self.last = self.last, x.detach()
        return super().forward(x if kept is None else x + kept)


class Assigning(Scaled):
    """A step that replaces the values of a frozen parameter, which no trace shows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.data = self.scale.data * 0.9
        return super().forward(x)


class Manual(Images):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 2))
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "batch", "settings", "message"),
    [
        (Mean(), torch.randn(2), {}, "No parameter of Mean requires a gradient. Select some with trainable=."),
        (
            Scaled(),
            torch.randn(2, 6),
            {"optimizer": "lion"},
            "optimizer='lion' is unknown. Use one of adamw, adam, sgd.",
        ),
        (
            *(Scaled(), torch.randn(2, 6), {"optimizer_settings": {"lr": 1.0}}),
            "optimizer_settings has 'lr', which adamw doesn't have. Use betas, eps, weight_decay;",
        ),
        (Scaled(), torch.randn(2, 6), {"trainable": ["bias"]}, "trainable='bias' matches no parameter of Scaled."),
        (Scaled(), torch.randn(2, 6), {"clip_norm": 0.0}, "clip_norm=0.0 is not positive."),
        (Scaled(), torch.randn(2, 7), {}, "Scaled.forward rejects the batch: RuntimeError"),
        (Scaled(), {"y": torch.randn(2, 6)}, {}, "Scaled.forward rejects the batch: TypeError"),
        (nn.Linear(6, 2), torch.randn(2, 6), {}, "Linear.forward returns [2, 2] of torch.float32, but a loss is"),
        (Scaled(lambda x: x.detach()), torch.randn(2, 6), {}, "The loss of Scaled depends on none of the parameters"),
        (Scaled(torch.log), -torch.ones(2, 6), {}, "The loss of Scaled for the batch is nan, with which nothing can"),
        (
            Scaled().bfloat16(),
            torch.ones(2, 6),
            {},
            "weight is of torch.bfloat16, for which onnxruntime has no kernels",
        ),
        (
            *(Scaled(), torch.randn(2, 6), {"optimizer_settings": {"betas": (2.0, 0.5)}}),
            "optimizer_settings={'betas': (2.0, 0.5)}: Invalid beta parameter at index 0: 2.0. Use values of torch's",
        ),
        (Counting(), torch.ones(2, 6), {"dynamic": False}, "Steps change calls, of which the models have the first"),
        (Keeping(), torch.ones(4, 6), {}, "parameters and buffers, earlier steps have changed last."),
        pytest.param(
            *(Assigning(), torch.ones(2, 6), {}, "changes scale in a way that can't be traced. Write into it instead"),
            marks=pytest.mark.slow,
        ),
        (Manual(), (torch.randn(2, 6), torch.ones(2)), {}, "Manual has automatic_optimization=False"),
        (
            *(Scaled(lambda x: x.mode(1)[0]), torch.randn(2, 6), {"dynamic": False}),
            "Scaled can't be exported (operator aten.mode) at",
        ),
        pytest.param(*(Scaled(), torch.randn(2, 6), {"tolerance": -1.0}, "but tolerance=-1."), marks=pytest.mark.slow),
    ],
)
def test_what_is_refused_leaves_nothing(
    module: nn.Module, batch: Any, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=re.escape(message)):
        lit_ort.export_training(module, tmp_path / "step", batch, **settings)
    assert not os.listdir(tmp_path)


def test_a_folder_that_exists_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=f"{tmp_path} exists. Choose a folder that doesn't exist, or remove it."):
        lit_ort.export_training(Scaled(), tmp_path, torch.randn(2, 6))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist. Pass a folder of export_training"),
        ({"other": torch.ones(6)}, "has 'other', but Scaled has no parameter or buffer of this name."),
        ({"weight": torch.ones(5)}, "has 'weight' of shape [5], but in Scaled its shape is [6]."),
        (b"something else", "is not a safetensors file"),
    ],
)
def test_parameters_of_another_module(content: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "parameters.safetensors"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content:
        write_tensors(file, content)
    module = Scaled()
    with pytest.raises(ExportError, match=re.escape(message)):
        lit_ort.load_training_checkpoint(module, file)
    assert torch.equal(module.weight, torch.ones(6))


def test_files_are_those_of_the_safetensors_library(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    tensors = {"a": torch.randn(2, 3), "b": torch.tensor(5), "c": torch.empty(0, 4), "d": torch.tensor([True, False])}
    write_tensors(tmp_path / "ours", tensors)
    library.save_file(tensors, tmp_path / "theirs")
    for found in (library.load_file(tmp_path / "ours"), read_tensors(tmp_path / "theirs")):
        assert all(
            torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in tensors.items()
        )


def scattered_mean(x: torch.Tensor) -> torch.Tensor:
    index = torch.tensor([[0, 0, 1, 1, 3, 3], [2, 2, 2, 0, 1, 1]])
    return torch.zeros(2, 4).scatter_reduce(1, index, x, "mean", include_self=False)


def weighted_loss(x: torch.Tensor) -> torch.Tensor:
    """Writes into a tensor that is computed of constants."""
    return nn.functional.cross_entropy(x, torch.tensor([1, 4]), torch.arange(1.0, 7), label_smoothing=0.1)


def divided(x: torch.Tensor) -> torch.Tensor:
    """Integers beyond the 24 bits of float32."""
    large = torch.tensor([4294967295, 123456789123, -123456789123, 16777217, -5, 7])
    return x * (torch.div(large, 16, rounding_mode="trunc") % 1000) + torch.div(large, 7, rounding_mode="floor") % 1000


class Faulty(nn.Module):
    """A sum of a function's results in which each has another weight."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(6)), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.function(x * self.weight)
        return (found * torch.arange(1.0, found.numel() + 1).reshape(found.shape)).mean()


# Each is written by torch's exporter, as it is by default, as something else.
@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: (x * 0) / ((x * 0).square().sum(0).sqrt() + 1e-8) + x, id="1e-8"),
        pytest.param(scattered_mean, id="scatter_reduce"),
        pytest.param(nn.BatchNorm1d(6), id="batch norm"),
        pytest.param(divided, id="integer division"),
        pytest.param(weighted_loss, id="writes"),
    ],
)
@pytest.mark.sampled(2)
def test_faults_of_the_exporter(function: Any, tmp_path: Path) -> None:
    module = Faulty(function)
    exported = lit_ort.export_training(module, tmp_path / "step", torch.randn(2, 6), dynamic=False)
    assert max(one.error for one in exported.checked) < 1e-5


@pytest.mark.slow
@pytest.mark.sweep
def test_dropout_follows_the_seed(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), Mean())
    exported = lit_ort.export_training(module, tmp_path / "step", torch.randn(2, 6), clip_norm=0.5)
    batches = [{"input": torch.ones(2, 6)}] * 4
    losses = [train_elsewhere(exported.folder, batches, 0.0)["loss"] for _ in range(2)]
    assert len(set(losses[0].tolist())) == 4
    np.testing.assert_array_equal(losses[0], losses[1])
    exported = lit_ort.export_training(module, tmp_path / "without", torch.randn(2, 6), dropout=False)
    assert len(set(train_elsewhere(exported.folder, batches, 0.0)["loss"].tolist())) == 1


class Mixed(nn.Module):
    """The mean of a layer's results for float32[3, 4, 8]."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inputs = (x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else (x,)
        found = self.layer(*inputs)
        return (found[0] if isinstance(found, tuple) else found).square().mean()


@pytest.mark.parametrize(
    "layer",
    [
        nn.MultiheadAttention(8, 2, dropout=0.5),
        nn.TransformerEncoderLayer(8, 2, 16, 0.5),
        nn.LSTM(8, 8, 2, dropout=0.5),
        nn.GRU(8, 8, 2, dropout=0.5, bidirectional=True),
        nn.Sequential(nn.Dropout1d(0.5), nn.Linear(8, 8)),
        nn.Sequential(nn.AlphaDropout(0.5), nn.Linear(8, 8)),
    ],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("dropout", [True, False])
def test_dropout_can_be_left_out(layer: nn.Module, dropout: bool) -> None:
    step = Step(Mixed(layer), torch.randn(3, 4, 8), dropout)
    losses = []
    for seed in range(2):
        with SeededRandom(torch.tensor(seed)):
            losses.append(step(*step.batch).loss.item())
    assert (losses[0] != losses[1]) == dropout


@pytest.mark.parametrize("draw", [lambda r: r.uniform([100_000]), lambda r: r.normal([100_000])])
def test_draws_are_independent(draw: Any) -> None:
    """Between seeds, draws of one step, and positions; with the moments of their distribution."""
    random = SeededRandom(torch.tensor(3))
    first, second, other = draw(random), draw(random), draw(SeededRandom(torch.tensor(4)))
    for a, b in ((first, second), (first, other), (first[1:], first[:-1])):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.015
    expected = (0.5, 1 / 12) if float(first.min()) >= 0 else (0.0, 1.0)
    torch.testing.assert_close((float(first.mean()), float(first.var())), expected, rtol=0.02, atol=0.01)


@pytest.mark.slow
def test_frozen_parts_and_buffers(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1), Mean())
    settings: dict[str, Any] = dict(optimizer="sgd", optimizer_settings={"momentum": 0.9}, trainable=["2.*"])
    exported = lit_ort.export_training(module, tmp_path / "step", torch.randn(4, 6), **settings)
    assert exported.trainable == ("2.weight", "2.bias")
    (size,) = exported.fixed_sizes
    assert size.startswith("input has 6 in dimension 1")
    assert f"which the module uses as a constant: {size}." in (exported.folder / "README.md").read_text()
    train_elsewhere(exported.folder, [{"input": torch.randn(4, 6)}] * 3, 0.1)
    before = copy.deepcopy(module.state_dict())
    loaded = lit_ort.load_training_checkpoint(module, exported.folder)
    changed = {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == set(loaded) == {"2.weight", "2.bias"} | {n for n in before if "running" in n or "num_b" in n}
    file, loop = exported.folder / "parameters.safetensors", runpy.run_path(str(exported.folder / "train.py"))
    steps = loop["train"]([{"input": torch.randn(4, 6).numpy()}] * 3, 0.1)
    content = file.read_bytes()
    next(steps)
    steps.close()
    assert file.read_bytes() != content
    rates = (rate for rate in (0.1, 0.0))
    with pytest.raises(ValueError, match=r"learning_rate ends after 2 steps, before the batches\. Pass one for each"):
        list(loop["train"]([{"input": torch.randn(4, 6).numpy()}] * 3, rates))
    module[1].eval()
    lit_ort.export_training(module, tmp_path / "fixed", torch.randn(4, 6), **settings)
    assert set(read_tensors(tmp_path / "fixed" / "parameters.safetensors")) == set(exported.trainable)
