"""Public reports of checkpoints and copies of compiled modules, as programs of our own."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tests.lightning_models import Net, constant_loader, loader, trainer
from tests.reports.report import Compile, Strategy, row, steps, trainings

pytestmark = pytest.mark.filterwarnings("ignore:You .* Skipping val loop:UserWarning")


@trainings()
def test_a_checkpoint_has_the_names_of_the_module(strategy: Strategy) -> Any:
    """The weights of a compiled model are saved under other names, so that they can't be loaded without it.

    https://github.com/Lightning-AI/pytorch-lightning/issues/17415 and
    https://github.com/Lightning-AI/pytorch-lightning/issues/20233
    """
    seed_everything(1, verbose=False)
    with TemporaryDirectory() as folder:
        fitting = trainer(strategy(), Path(folder), max_epochs=1)
        fitting.fit(Net(), loader())
        path = Path(folder) / "last.ckpt"
        fitting.save_checkpoint(path)
        saved = torch.load(path, weights_only=False)
        loaded = Net.load_from_checkpoint(path)
        by_eager = trainer("auto", max_epochs=1).test(loaded, loader(), verbose=False)
    return list(saved["state_dict"]), saved["hyper_parameters"], by_eager


class Compiled(LightningModule):
    """A module that compiles a part of itself, as Lightning's documentation recommends."""

    def __init__(self, compiled: Compile[Any]) -> None:
        super().__init__()
        self.net = compiled(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@steps()
def test_a_compiled_part_is_tested_after_the_training(compiled: Compile[Any]) -> Any:
    """Testing a module with a compiled part raised that inference tensors have no version counter.

    https://github.com/Lightning-AI/pytorch-lightning/issues/17175
    """
    module = Compiled(compiled)
    fitting = trainer("auto")
    fitting.fit(module, loader())
    metrics = fitting.test(module, loader(), verbose=False)
    return metrics, [p.detach() for p in module.parameters()]


@pytest.mark.slow
@trainings()
def test_a_resumed_training_is_the_uninterrupted_one(strategy: Strategy) -> Any:
    """A training that is resumed from a checkpoint in the middle had other losses than one without interruption.

    https://github.com/Lightning-AI/pytorch-lightning/issues/18098
    """
    losses = []
    with TemporaryDirectory() as folder:
        for epochs, start in ((4, None), (2, None), (4, "half.ckpt")):
            seed_everything(3, verbose=False)
            module, path = Net(), start and Path(folder) / start
            fitting = trainer(strategy(), max_epochs=epochs)
            fitting.fit(module, constant_loader(), ckpt_path=path)
            fitting.save_checkpoint(Path(folder) / "half.ckpt")
            losses.append(module.losses)
    assert losses[0] == losses[1] + losses[2]
    return losses


@pytest.mark.slow
@trainings()
def test_the_best_checkpoint_is_tested(strategy: Strategy) -> Any:
    """After the training, `test(ckpt_path="best")` loads the weights of the best epoch into the trained module.

    https://github.com/Lightning-AI/pytorch-lightning/issues/17415
    """
    seed_everything(1, verbose=False)
    with TemporaryDirectory() as folder:
        best = ModelCheckpoint(folder, monitor="val_loss", mode="max")
        module = Net(learning_rate=0.5)
        fitting = trainer(strategy(), Path(folder), max_epochs=3, callbacks=[best])
        fitting.fit(module, loader(), loader())
        worst = fitting.test(module, loader(), ckpt_path="best", verbose=False)
        last = trainer("auto").validate(module, loader(), verbose=False)
    return worst, last, module


@pytest.mark.slow
@trainings()
def test_copies_of_a_module_that_was_trained(strategy: Strategy) -> Any:
    """A module could be neither copied nor pickled after it was compiled and trained.

    https://github.com/Lightning-AI/pytorch-lightning/issues/17758 and https://github.com/pytorch/pytorch/issues/101107
    """
    seed_everything(1, verbose=False)
    module = Net()
    trainer(strategy(), max_epochs=1).fit(module, loader())
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(saved, weights_only=False)]
    for twin in copies:
        trainer(strategy(), max_epochs=1).fit(twin, loader())
    return [twin.losses for twin in copies], [twin.state_dict() for twin in copies], module.losses


@steps()
def test_a_copy_of_a_compiled_module_is_compiled_again(compiled: Compile[Any]) -> Any:
    """The copy of a compiled module that had been trained could not be compiled and trained.

    https://github.com/pytorch/pytorch/issues/128121
    """
    model = compiled(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    model(row(2, 3)).square().sum().backward()
    twin = compiled(copy.deepcopy(model))
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(0.5)
    twin.zero_grad()
    losses = [net(row(2, 3)).square().sum() for net in (twin, model)]
    losses[0].backward()
    return losses, [p.grad for p in twin.parameters()], [p.grad for p in model.parameters()]


@steps()
def test_an_average_of_a_compiled_module(compiled: Compile[Any]) -> Any:
    """Averages of the weights are kept under the names of the module, which compilation changes.

    https://github.com/Vchitect/Latte/issues/81
    """
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    average = AveragedModel(net, use_buffers=True)
    step, optimizer = compiled(net), torch.optim.SGD(net.parameters(), 0.1)
    for k in range(3):
        optimizer.zero_grad()
        step(row(4, 3).cos() + k).square().mean().backward()
        optimizer.step()
        average.update_parameters(net)
    averaged = compiled(average)
    return averaged(row(4, 3)), average.state_dict(), net
