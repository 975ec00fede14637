"""Callbacks that read checkpoints with hyperparameters that are objects."""

from __future__ import annotations

import enum
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lit_ort
from lit_ort._compat.plain_checkpoints import plain_values
from lit_ort.callbacks import BestCheckpoint, LastCheckpoint, NonFiniteLoss
from lit_ort.errors import NonFiniteError
from tests.lightning_models import Net, loader, trainer


class Kind(enum.Enum):
    SMALL = 1


class Own(Tensor):
    """A class that torch doesn't know."""


class WithObjects(Net):
    class Mode:
        """A class within a class."""

    def __init__(self, root: Path = Path("data"), kind: Kind = Kind.SMALL) -> None:
        super().__init__()
        self.save_hyperparameters({"root": root, "kind": kind})


class Diverging(WithObjects):
    def get_extra_state(self) -> dict[str, int]:
        return {"count": 1}

    def set_extra_state(self, state: Any) -> None: ...

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.current_epoch else loss


class Hostile:
    """Calls a function where it is read."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("called"),)


def test_only_plain_values_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    objects = {"path": Path("x"), "kind": Kind.SMALL, "hostile": Hostile(), "nested": WithObjects.Mode()}
    weights = {"w": torch.arange(3), "own": torch.arange(3).as_subclass(Own)}
    plain = {"step": 4, "ids": {1, 2}, "root": 1j, "bytes": bytearray(b"x")}
    torch.save({"weights": weights, "objects": objects, **plain}, "run.ckpt")
    values = plain_values(Path("run.ckpt"))
    assert all(torch.equal(value, torch.arange(3)) for value in values["weights"].values())
    assert {name: values[name] for name in plain} == plain
    assert values["objects"].keys() == objects.keys()
    assert not Path("called").exists()


def test_files_that_are_no_checkpoints_call_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.ckpt").write_bytes(pickle.dumps(Hostile(), 2))
    with pytest.raises((RuntimeError, pickle.UnpicklingError)):
        plain_values(Path("run.ckpt"))
    assert not Path("called").exists()


def test_a_later_run_in_the_folder(tmp_path: Path) -> None:
    def run(rate: float) -> BestCheckpoint:
        best = BestCheckpoint(tmp_path, "best", monitor="val_loss")
        module = WithObjects()
        module.hparams["learning_rate"] = rate
        trainer(lit_ort.ORTStrategy(compile="never"), callbacks=[best], enable_checkpointing=True).fit(
            module, loader(), loader()
        )
        return best

    first = run(0.1)
    again = run(0.0)
    assert again.best_model_score == first.best_model_score


def test_the_last_finite_checkpoint_is_kept(tmp_path: Path) -> None:
    callbacks = [LastCheckpoint(tmp_path), NonFiniteLoss()]
    fit = trainer(lit_ort.ORTStrategy(compile="never"), callbacks=callbacks, enable_checkpointing=True, max_epochs=3)
    with pytest.raises(NonFiniteError, match="finite weights is kept as"):
        fit.fit(Diverging(), loader(), loader())
    assert (tmp_path / "last_finite.ckpt").is_file()
