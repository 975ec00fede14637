"""Training steps as ONNX models: in an onnxruntime without torch they train as eager PyTorch does."""

from __future__ import annotations

import copy
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lit_ort
from tests.export.elsewhere import train_elsewhere
from tests.export.training_cases import CASES, Batch, TrainingCase

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:You are trying to `self.log"),
]
STEPS, RATE = 20, 1e-3
SIZES = (6, 4)
# Interpreters of environments with an onnxruntime of other versions, with colons between them.
PYTHONS = os.environ.get("LIT_ORT_TEST_PYTHONS", sys.executable).split(":")


def batches_of(case: TrainingCase) -> list[Batch]:
    return [case.batch(SIZES[k % 2], k) for k in range(STEPS)]


def loss_of(module: Any, batch: Batch) -> torch.Tensor:
    return module.training_step(batch, 0) if hasattr(module, "training_step") else module(**batch)[0]


def eager_losses(module: nn.Module, batches: list[Batch], optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(module, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", ["MLP", *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n != "MLP")])
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
    for k, python in enumerate(PYTHONS):
        folder = shutil.copytree(exported.folder, tmp_path / f"{k}")
        found = train_elsewhere(folder, batches, RATE, python)
        np.testing.assert_allclose(found["loss"], losses, rtol=1e-4, atol=1e-4)
        fresh = case.make()
        fresh.load_state_dict(before)
        lit_ort.load_training_checkpoint(fresh, folder)
        for key, value in module.state_dict().items():
            if not any(part in key for part in case.left_out):
                torch.testing.assert_close(fresh.state_dict()[key], value, rtol=1e-4, atol=1e-4, msg=f"{python}: {key}")
