"""Training files in onnxruntime.training.api beside eager, step by step; and what can't be trained on a device."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import lit_ort
from lit_ort.errors import ExportError, LitOrtWarning
from lit_ort.runtime.engines.choice import installed_kind
from tests.export.test_export import Convolutions
from tests.lightning_models import Net
from tests.scripts import run_code

pytestmark = [
    pytest.mark.usefixtures("one_thread", "forked_sessions"),
    pytest.mark.skipif(installed_kind() != "training", reason="needs the training build of ONNX Runtime"),
]
STEPS, LR = 20, 1e-2

# As on a device: nothing of torch's. Trains, evaluates, saves the checkpoint and leaves a model for inference.
DEVICE = """
import sys
import numpy
from onnxruntime.training.api import CheckpointState, Module, Optimizer
folder, given, taken, lr, outputs = sys.argv[1:]
batches = numpy.load(given)
state = CheckpointState.load_checkpoint(folder + "/checkpoint")
module = Module(folder + "/training_model.onnx", state, folder + "/eval_model.onnx")
optimizer = Optimizer(folder + "/optimizer_model.onnx", module)
optimizer.set_learning_rate(float(lr))
losses = []
steps = sorted({int(key.split("/")[0]) for key in batches.files})
for step in steps:
    module.train()
    feeds = [batches[f"{step}/{name}"] for name in module.input_names()]
    found = module(*feeds)
    losses.append(float(found[0] if isinstance(found, tuple) else found))
    optimizer.step()
    module.lazy_reset_grad()
module.eval()
found = module(*feeds)
found = found if isinstance(found, tuple) else (found,)
CheckpointState.save_checkpoint(state, folder + "/trained")
if outputs:
    module.export_model_for_inferencing(folder + "/inference.onnx", outputs.split(","))
results = {f"eval/{name}": value for name, value in zip(module.output_names(), found)}
numpy.savez(taken, losses=losses, **results)
"""


class LanguageModel(nn.Module):
    """Predicts each next word of int64[batch, length]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(30, 32), nn.Linear(32, 30)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits = self.head(self.layer(self.embedding(tokens), src_mask=mask))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}


class Classifier(LightningModule):
    """Images of three channels into four classes, logged as Lightning's users do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Convolutions()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), LR)


def bert() -> nn.Module:
    sizes: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    config = BertConfig(vocab_size=30, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    config.num_labels = 3
    return BertForSequenceClassification(config)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What training on a device left."""

    losses: list[float]
    results: dict[str, np.ndarray]
    folder: Path


def train_on_device(folder: Path, batches: list[dict[str, Tensor]], outputs: str) -> Trained:
    given, taken = folder / "given.npz", folder / "taken.npz"
    arrays = {f"{k}/{name}": value.numpy() for k, batch in enumerate(batches) for name, value in batch.items()}
    np.savez(given, **arrays)  # pyright: ignore[reportArgumentType] - names of arrays
    command = [sys.executable, "-c", DEVICE, str(folder), str(given), str(taken), str(LR), outputs]
    run_code(command).check_returncode()
    with np.load(taken) as found:
        results = {name.removeprefix("eval/"): found[name] for name in found.files if name.startswith("eval/")}
        return Trained(found["losses"].tolist(), results, folder)


def words(*names: str) -> list[dict[str, Tensor]]:
    """Batches of two lengths."""
    return [{name: torch.randint(30, (2 + k % 2, 6 + k % 3)) for name in names} for k in range(STEPS)]


def classified_words() -> list[dict[str, Tensor]]:
    batches = words("input_ids")
    for batch in batches:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, 4:] = 0
        batch["labels"] = torch.randint(3, batch["input_ids"].shape[:1])
    return batches


def images() -> list[dict[str, Tensor]]:
    return [{"batch_0": torch.randn(4, 3, 8, 8), "batch_1": torch.randint(4, (4,))} for _ in range(STEPS)]


def eager_losses(module: nn.Module, batches: list[dict[str, Tensor]], optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for batch in batches:
        if isinstance(module, Classifier):
            loss = F.cross_entropy(module(batch["batch_0"]), batch["batch_1"])
        else:
            loss = module(**batch)["loss"]
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("make", "batches"),
    [
        pytest.param(LanguageModel, lambda: words("tokens", "targets"), id="transformer"),
        pytest.param(bert, classified_words, id="bert"),
        pytest.param(Classifier, images, id="convolutions"),
    ],
)
def test_twenty_steps_are_those_of_eager(make: Any, batches: Any, optimizer: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, given = make(), batches()
    first = tuple(given[0].values()) if isinstance(module, Classifier) else given[0]
    exported = lit_ort.export_training(module, tmp_path, first, optimizer=optimizer)
    assert max(one.error for one in exported.checked) < 1e-5
    outputs = exported.outputs[1:]
    trained = train_on_device(tmp_path, given, ",".join(outputs))
    module.train()
    made: Any = torch.optim.AdamW if optimizer == "adamw" else torch.optim.SGD
    losses = eager_losses(module, given, made(module.parameters(), LR))
    assert len(set(losses)) == STEPS
    np.testing.assert_allclose(trained.losses, losses, rtol=1e-4, atol=1e-4)

    session = onnxruntime.InferenceSession(str(tmp_path / "inference.onnx"), providers=["CPUExecutionProvider"])
    last = {value.name: given[-1][value.name].numpy() for value in session.get_inputs()}
    for name, value in zip(outputs, session.run(list(outputs), last), strict=True):
        np.testing.assert_allclose(value, trained.results[name], rtol=1e-5, atol=1e-5)

    fresh = make()
    assert set(lit_ort.load_training_checkpoint(fresh, tmp_path / "trained")) == dict(fresh.named_parameters()).keys()
    if not isinstance(module, Classifier):  # whose running statistics are those of before
        with torch.no_grad():
            found = fresh.eval()(**given[-1])
        for name, value in trained.results.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_what_is_left_in_the_folder(tmp_path: Path) -> None:
    module = Classifier().eval()
    exported = lit_ort.export_training(module, tmp_path / "device", (torch.randn(4, 3, 8, 8), torch.randint(4, (4,))))
    assert sorted(os.listdir(tmp_path / "device")) == [
        "checkpoint",
        "eval_model.onnx",
        "optimizer_model.onnx",
        "training_model.onnx",
    ]
    assert not any(part.training for part in module.modules())
    assert exported.outputs == ("loss", "output")
    assert list(exported.inputs) == ["batch_0", "batch_1"]
    assert "6 parameters are trainable, 0 are frozen" in str(exported)
    # Eval mode: dropout and statistics of the batch belong to training.
    assert {one.output.split(" ")[0] for one in exported.checked} >= {"loss"}


@pytest.mark.sweep
def test_frozen_parts_stay_frozen(tmp_path: Path) -> None:
    module = bert()
    before = {name: value.clone() for name, value in module.named_parameters()}
    batches = classified_words()
    exported = lit_ort.export_training(module, tmp_path, batches[0], trainable=["classifier.*", "*.query.*"])
    trained = train_on_device(tmp_path, batches, "")
    lit_ort.load_training_checkpoint(module, trained.folder / "trained")
    changed = {name for name, value in module.named_parameters() if not torch.equal(value, before[name])}
    assert changed == set(exported.trainable)
    assert len(changed) == 2 + 2 * 2
    assert set(exported.frozen) == before.keys() - changed


@pytest.mark.slow
def test_a_module_after_fit_and_parts_in_eval_mode(tmp_path: Path) -> None:
    module = Classifier()
    items: Any = [(torch.randn(3, 8, 8), 1)] * 4
    loader = torch.utils.data.DataLoader(items, batch_size=4)
    settings: dict[str, Any] = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, **settings)
    trainer.fit(module, loader)
    norm: Any = module.net[1].eval()
    statistics = norm.running_mean.clone()
    lit_ort.export_training(module, tmp_path, next(iter(loader)))
    assert module.trainer is trainer
    assert [part.training for part in module.net] == [True, False, *[True] * 4]
    assert torch.equal(norm.running_mean, statistics)


@pytest.mark.sweep
def test_dropout_is_in_the_training_model_alone(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), Mean())
    batch = torch.randn(2, 6)
    exported = lit_ort.export_training(module, tmp_path, batch)
    assert {one.output.split(" ")[0] for one in exported.checked} == {"loss"}
    losses = train_on_device(tmp_path, [{"input": batch}] * 4, "").losses
    assert len(set(losses)) == 4


class Forms(nn.Module):
    """What ONNX Runtime has no gradient for, or another one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 8, padding_idx=0)
        nn.init.normal_(self.words.weight)
        self.frozen = nn.BatchNorm1d(8).eval()
        self.norm, self.plain = nn.LayerNorm(8, bias=False), nn.LayerNorm(8, elementwise_affine=False)
        self.instances, self.out = nn.InstanceNorm1d(8, affine=True), nn.Linear(8, 1)
        self.groups = nn.GroupNorm(4, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.frozen(self.norm(self.words(ids)).transpose(1, 2))
        x = self.plain(F.hardswish(F.softplus(self.groups(self.instances(x)), 2.0)).transpose(1, 2))
        return F.hardsigmoid(self.out(x)).square().mean()


@pytest.mark.slow
def test_forms_with_gradients_as_torchs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Forms()
    ids = torch.tensor([[1, 2, 0, 3], [4, 0, 8, 5]])
    exported = lit_ort.export_training(module, tmp_path, ids, dynamic=False)
    assert exported.checked[-1].output.startswith("the gradient of")
    assert max(one.error for one in exported.checked) < 1e-5
    assert module.words.weight.grad is None
    torch.testing.assert_close(module.words(ids), F.embedding(ids, module.words.weight))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pool", "operator"),
    [
        (nn.MaxPool2d(2), "MaxPool"),
        pytest.param(nn.AvgPool2d(2), "AveragePool", marks=pytest.mark.sweep),
        (nn.AvgPool2d(3, 2, 1, count_include_pad=False), "AveragePool"),
        pytest.param(nn.AdaptiveAvgPool2d(2), "AveragePool", marks=pytest.mark.sweep),
    ],
)
def test_a_pool_of_changing_sizes(tmp_path: Path, pool: nn.Module, operator: str) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), pool, nn.Flatten(), nn.LazyLinear(1), Mean())
    batch = torch.randn(2, 3, 8, 8)
    module(batch)
    with pytest.warns(LitOrtWarning, match=f"the gradient of {operator} for fixed sizes only. All sizes are"):
        exported = lit_ort.export_training(module, tmp_path, batch)
    assert exported.inputs == {"input": (2, 3, 8, 8)}
    with pytest.raises(ExportError, match="Pass dynamic=False"):
        lit_ort.export_training(module, tmp_path, batch, dynamic={"input": {0: "batch"}})


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


class Softplus(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x * self.weight).sum()


class Cumulative(Softplus):
    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).cumsum(0).sum()


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "batch", "settings", "message"),
    [
        (Mean(), torch.randn(2), {}, "No parameter of Mean requires a gradient. Select some with trainable=."),
        (
            Softplus(),
            torch.randn(2, 6),
            {"optimizer": "adam"},
            "optimizer='adam' is unknown. Use one of adamw",
        ),
        (Softplus(), torch.randn(2, 6), {"trainable": ["bias"]}, "trainable='bias' matches no parameter of Softplus."),
        (Softplus(), torch.randn(2, 6), {"result": "net"}, "result='net' is not a submodule of Softplus."),
        pytest.param(
            *(Cumulative(), torch.randn(2, 6), {}, "ONNX Runtime has no gradient for CumSum at"), marks=pytest.mark.slow
        ),
        (Softplus(), torch.randn(2, 7), {}, "Softplus.forward rejects the batch: RuntimeError"),
        (nn.Linear(6, 2), torch.randn(2, 6), {}, "Linear.forward returns [2, 2] of torch.float32, but a loss is"),
        (Manual(), (torch.randn(2, 3, 8, 8), torch.ones(2)), {}, "Manual has automatic_optimization=False"),
        pytest.param(
            *(Softplus(), torch.randn(2, 6), {"tolerance": -1.0, "trainable": "*"}, "but tolerance=-1."),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_refused_leaves_nothing(
    module: nn.Module, batch: Any, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=re.escape(message)):
        lit_ort.export_training(module, tmp_path, batch, **settings)
    assert not os.listdir(tmp_path)


@pytest.mark.slow
def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    batch = {"x": torch.randn(2, 6)}
    lit_ort.export_training(Softened(6), tmp_path, batch, dynamic=False)
    checkpoint = tmp_path / "checkpoint"
    with pytest.raises(ExportError, match="has 'weight' of shape \\[6\\], but in Softened its shape is \\[7\\]"):
        lit_ort.load_training_checkpoint(Softened(7), checkpoint)
    with pytest.raises(ExportError, match="has a parameter 'weight', but Net has none. Pass the checkpoint"):
        lit_ort.load_training_checkpoint(Net(), checkpoint)
    with pytest.raises(ExportError, match="nothing does not exist"):
        lit_ort.load_training_checkpoint(Net(), tmp_path / "nothing")
    (tmp_path / "text").write_text("text")
    with pytest.raises(ExportError, match="text is not a checkpoint that ONNX Runtime can read"):
        lit_ort.load_training_checkpoint(Net(), tmp_path / "text")


class Softened(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).tanh().mean()


def test_stock_onnxruntime_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_ort.export import artifacts

    monkeypatch.setattr(artifacts, "installed_kind", lambda: "stock")
    with pytest.raises(ExportError, match="needs the training build of ONNX Runtime, but stock onnxruntime is"):
        lit_ort.export_training(Softened(6), tmp_path, torch.randn(2, 6))
