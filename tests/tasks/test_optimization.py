"""Schedules and parameter groups."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lit_ort_tasks.errors import InputError
from lit_ort_tasks.optimization import Schedule, configure_optimizers, step_schedule, weight_decay_groups
from torch import nn


def rates(schedule: Schedule, steps: int, trainer_steps: float = 10) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = schedule(optimizer, trainer_steps)
    values = []
    for _ in range(steps):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(shape="constant"), [1, 1, 1, 1]),
        (dict(shape="constant", warmup=2), [0, 0.5, 1, 1]),
        (dict(shape="linear"), [1, 0.9, 0.8, 0.7]),
        (dict(shape="linear", warmup=0.2), [0, 0.5, 1, 7 / 8]),
        (dict(shape="linear", warmup=2, total_steps=4), [0, 0.5, 1, 0.5]),
        (dict(shape="cosine", total_steps=4), [1, 0.5 + 0.125**0.5, 0.5, 0.5 - 0.125**0.5]),
        (dict(shape="polynomial", power=0.5, total_steps=4), [1, 0.75**0.5, 0.5**0.5, 0.5]),
        (dict(shape="polynomial", power=1.0, total_steps=4, end_rate=0.2), [1, 0.8, 0.6, 0.4]),
    ],
)
def test_shapes(options: dict[str, Any], expected: list[float]) -> None:
    assert rates(Schedule(**options), 4) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(shape="sine"), "scheduler.shape=sine: no such schedule. Choose from constant, linear"),
        (dict(shape="linear", warmup=-0.1), "scheduler.warmup=-0.1: must be a share"),
        (dict(shape="linear", warmup=1.5), "scheduler.warmup=1.5: must be a share"),
        (dict(shape="linear", total_steps=0), "scheduler.total_steps=0: must be a whole number of at least 1"),
        (dict(shape="linear", total_steps="all"), "scheduler.total_steps=all: must be a whole number"),
        (dict(shape="linear", warmup=None), "scheduler.warmup=null: must be a share"),
        (dict(shape="linear", warmup="long"), "scheduler.warmup=long: must be a share"),
        (dict(shape="polynomial", power=0), "scheduler.power=0: must be a number above 0"),
        (dict(shape="polynomial", end_rate=None), "scheduler.end_rate=null: must be a number of at least 0"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Schedule(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(shape="linear", warmup=10), "scheduler.warmup=10: must be below the number of all steps, 10, after"),
        (
            dict(shape="polynomial", warmup=4, total_steps=4),
            "scheduler.warmup=4: must be below the number of all steps",
        ),
        (dict(shape="polynomial", end_rate=1.0), "scheduler.end_rate=1.0: must be below optimizer.lr=1.0"),
    ],
)
def test_a_rate_without_room_to_decrease_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        rates(Schedule(**options), 1)
    assert len(rates(Schedule("constant", warmup=10), 12)) == 12


def test_a_fast_run_can_be_shorter_than_the_warm_up() -> None:
    module = LightningModule()
    module.trainer = SimpleNamespace(fast_dev_run=1, estimated_stepping_batches=1)  # pyright: ignore[reportAttributeAccessIssue]
    parameters = [nn.Parameter(torch.zeros(1))]
    factory = partial(torch.optim.SGD, lr=1.0)
    assert configure_optimizers(module, parameters, factory, Schedule("polynomial", warmup=500))


@pytest.mark.parametrize("options", [dict(shape="linear"), dict(shape="constant", warmup=0.1)])
def test_a_schedule_with_an_end_needs_a_number_of_steps(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="the trainer has no last step"):
        rates(Schedule(**options), 1, float("inf"))
    assert rates(Schedule(shape="constant", warmup=4), 3, float("inf")) == [0, 0.25, 0.5]


def test_biases_norms_and_frozen_weights_do_not_decay() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 4), nn.Linear(4, 4))
    module[3].requires_grad_(False)
    decayed, others = weight_decay_groups(module)
    assert [tuple(p.shape) for p in decayed["params"]] == [(4, 3), (5, 4)]
    assert [tuple(p.shape) for p in others["params"]] == [(4,), (4,), (4,)]
    assert (decayed.get("weight_decay"), others["weight_decay"]) == (None, 0.0)
    optimizer = torch.optim.AdamW(weight_decay_groups(module), weight_decay=0.3)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_size": 0, "gamma": 0.5}, "scheduler.step_size=0: must be a whole number of at least 1"),
        ({"step_size": 2, "gamma": "half"}, "scheduler.gamma='half': must be a number above 0"),
        ({"step_size": 2, "gamma": 0.0}, "scheduler.gamma=0.0: must be a number above 0"),
    ],
)
def test_torchs_schedule_is_checked_before_training(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        step_schedule(**options)
