"""`optimizer_in_graph`: the same weights, state and checkpoints as torch's optimizer, and steps that are rejected."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor

import lit_ort
from lit_ort.errors import LitOrtWarning, OptionsError, SessionError, UnsupportedError
from lit_ort.options import ORTOptions
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.parameter_updates import Clipping, Updates, step_alone
from tests.lightning_models import Net, loader, trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*dataloader' does not have many workers:UserWarning",
    "ignore:The number of training batches .* is smaller than the logging interval:UserWarning",
    "ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint:UserWarning",
)

# As Any, since its declared type doesn't fit methods.
outside_of_graphs: Any = torch.compiler.disable
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, 1e-2, weight_decay=0.1),
    "fused adamw": lambda groups: torch.optim.AdamW(groups, 1e-2, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9),
}
CLIPPING: dict[str, dict[str, Any]] = {
    "no clipping": {},
    "by norm": {"gradient_clip_val": 0.05},
    "by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}


class Optimized(Net):
    """A module with an optimizer of two parameter groups and a learning rate that changes at every step."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.body.parameters()}, {"params": self.head.parameters(), "lr": 5e-3}]
        optimizer = OPTIMIZERS[str(self.hparams["optimizer"])](groups)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def strategy(**options: Any) -> lit_ort.ORTStrategy:
    return lit_ort.ORTStrategy(fallback="error", optimizer_in_graph=True, **options)


def fit(engine: Any, module: Net, **settings: Any) -> Any:
    runner = trainer(engine, **{"max_epochs": 10, **settings})
    runner.fit(module, loader(), loader(batch=10))
    return runner


def seeded(make: Callable[[], Net] = Optimized) -> Net:
    seed_everything(1, verbose=False)
    return make()


def state_of(runner: Any) -> dict[str, Tensor]:
    """Weights and optimizer state, by name."""
    tensors = dict(runner.lightning_module.state_dict())
    for index, entry in runner.optimizers[0].state_dict()["state"].items():
        tensors.update({f"{index} {name}": torch.as_tensor(value) for name, value in entry.items()})
    return tensors


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error = float((actual[name].double() - value.double()).norm())
        assert error <= tolerance * float(value.double().norm().clamp_min(1e-3)), name


NORMAL = {
    ("fused adamw", 2**20, "by norm"),
    ("fused adamw", 2**20, "by value"),
    ("sgd", 1, "no clipping"),
}
ALL = itertools.product(OPTIMIZERS, (2**20, 1), CLIPPING)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "batch_bytes", "name"),
    [case if case in NORMAL else pytest.param(*case, marks=pytest.mark.sweep) for case in ALL],
)
@pytest.mark.sampled(1)
def test_same_as_torch_over_50_steps(
    optimizer: str, batch_bytes: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clipping = CLIPPING[name]
    expected = fit(lit_ort.ORTStrategy(fallback="error"), seeded(lambda: Optimized(optimizer)), **clipping)
    steps = []
    monkeypatch.setattr(
        "lit_ort.runtime.parameter_updates.step_alone", lambda *args: steps.append(1) or step_alone(*args)
    )
    module = seeded(lambda: Optimized(optimizer))
    monkeypatch.setattr("lit_ort.runtime.parameter_updates._BATCH_BYTES", batch_bytes)
    runner = fit(strategy(), module, **clipping)
    assert runner.global_step == 50
    # The first run returns its gradients; if the clipping needs all at once, torch's own step uses them.
    count = len(list(module.parameters()))
    by_norm = name == "by norm"
    assert len(steps) == (49 if by_norm else count + 49 * (count if batch_bytes == 1 else 1))
    assert_same(state_of(runner), state_of(expected))
    torch.testing.assert_close(module.losses, expected.lightning_module.losses, rtol=1e-6, atol=1e-7)


def optimizers_of(package: Any) -> dict[str, type[torch.optim.Optimizer]]:
    kinds = {name: kind for name, kind in vars(package).items() if isinstance(kind, type)}
    return {name: kind for name, kind in kinds.items() if issubclass(kind, torch.optim.Optimizer)}


# Without those that are for matrices or sparse gradients only.
TORCHS = optimizers_of(torch.optim).keys() - {"Optimizer", "SparseAdam", "Muon"}
OF_OTHERS = ("SAM", "LookSAM", "Lookahead", "Lamb", "Lion", "AdaFactor", "ScheduleFreeAdamW")


class TwoPoints(torch.optim.SGD):
    """Adds the gradient at a second point."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        gradients = [parameter.grad.clone() for parameter in self.param_groups[0]["params"]]
        with torch.enable_grad():
            closure()
        for parameter, gradient in zip(self.param_groups[0]["params"], gradients, strict=True):
            parameter.grad += gradient
        super().step()
        return loss


class Renamed(torch.optim.AdamW):
    """Has torch's step."""


def made(name: str, parameters: Any) -> torch.optim.Optimizer:
    own = {"TwoPoints": TwoPoints, "Renamed": Renamed, **optimizers_of(torch.optim)}
    if name in own:
        return own[name](parameters, lr=1e-2)
    kind: Any = getattr(pytorch_optimizer, name)
    if name == "Lookahead":
        return kind(torch.optim.AdamW(parameters, lr=1e-2))
    return kind(parameters, torch.optim.AdamW, lr=1e-2) if "SAM" in name else kind(parameters, lr=1e-2)


class Made(Net):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh())
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        return made(str(self.hparams["optimizer"]), self.parameters())


FAST = ("SGD", "SAM", "Renamed")
# Each is the only one of its kind: whole matrices, groups, norms of weights, two points, weights of its own.
SLOW = ("Adafactor", "AdamW", "Lamb", "LookSAM", "ScheduleFreeAdamW", "TwoPoints")
OTHERS = sorted({*TORCHS, *OF_OTHERS} - {*FAST, *SLOW})


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "optimizer",
    [
        *FAST,
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
        *(pytest.param(name, marks=pytest.mark.sweep) for name in OTHERS),
    ],
)
def test_optimizers_step_as_in_eager(optimizer: str) -> None:
    # In float32, the curvatures of LBFGS are mostly rounding.
    settings: Any = {"max_epochs": 2, "precision": "64-true" if optimizer == "LBFGS" else "32-true"}
    expected = fit("auto", seeded(lambda: Made(optimizer)), **settings)
    in_graph = optimizer in TORCHS - {"LBFGS"} or optimizer == "Renamed"
    line = f"the step of {optimizer} can need all gradients, the loss or another backward"
    with nullcontext() if in_graph else pytest.warns(LitOrtWarning, match=line):
        runner = fit(strategy(), seeded(lambda: Made(optimizer)), **settings)
    assert_same(dict(runner.lightning_module.state_dict()), dict(expected.lightning_module.state_dict()), 1e-5)


def test_checkpoints_are_torchs_own(tmp_path: Path) -> None:
    whole = fit(lit_ort.ORTStrategy(fallback="error"), seeded(), max_epochs=4)
    checkpoint = ModelCheckpoint(tmp_path, filename="half", every_n_epochs=2, save_top_k=1, monitor=None)
    fit(strategy(), seeded(), max_epochs=2, callbacks=checkpoint, enable_checkpointing=True)
    for engine in ("auto", strategy()):
        resumed = trainer(engine, max_epochs=4)
        resumed.fit(Optimized(), loader(), loader(batch=10), ckpt_path=str(tmp_path / "half.ckpt"))
        assert_same(state_of(resumed), state_of(whole), 1e-5)


class Scaled(Optimized):
    """Scales its loss outside of the graph, from the third step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.scaled(super().training_step(batch, batch_idx))

    @outside_of_graphs
    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.global_step < 2 else loss * 2


class Regularized(Optimized):
    """Adds a loss computed in eager code, from the third step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.regularized(super().training_step(batch, batch_idx))

    @outside_of_graphs
    def regularized(self, loss: Tensor) -> Tensor:
        return loss if self.global_step < 2 else loss + self.head.weight.square().sum()


@pytest.mark.parametrize("make", [Scaled, pytest.param(Regularized, marks=pytest.mark.slow)])
def test_code_outside_of_graphs_disables_it_with_a_warning(make: Callable[[], Net]) -> None:
    expected = fit("auto", seeded(make))
    line = f"{make.__name__}.training_step, or code that it calls outside of graphs, may read gradients"
    with pytest.warns(LitOrtWarning, match=line):
        runner = fit(strategy(), seeded(make))
    assert_same(state_of(runner), state_of(expected), 1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda loss, layer: loss * 2, "scaled by 2.0"),
        (lambda loss, layer: loss + layer.weight.square().sum(), "code outside of the graph"),
    ],
)
def test_a_step_that_is_no_longer_one_graph_is_rejected(change: Callable[..., Tensor], message: str) -> None:
    updates, layer, x = Updates(BufferPool()), torch.nn.Linear(4, 1), torch.randn(2, 4)
    engine = lit_ort.ORTBackend(ORTOptions(fallback="error", optimizer_in_graph=True), updates=updates)
    step = torch.compile(lambda x: layer(x).square().mean(), backend=engine)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    with updates.step(optimizer, Clipping()):
        step(x).backward()
    optimizer.zero_grad()
    with pytest.raises(SessionError, match=message) as raised, updates.step(optimizer, Clipping()):
        change(step(x), layer).backward()
    assert "resume from the last checkpoint, with optimizer_in_graph=False" in str(raised.value)


class Reader(Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.norms.append(float(pl_module.head.weight.grad.norm()))


@pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch:UserWarning")
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"callbacks": Reader}, "Reader.on_before_optimizer_step may read gradients"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches is 2"),
        ({"callbacks": partial(StochasticWeightAveraging, 0.1, 1)}, "gradients of an earlier epoch"),
    ],
)
@pytest.mark.sampled(1)
def test_code_that_reads_gradients_disables_it_with_a_warning(settings: dict[str, Any], reason: str) -> None:
    def arguments() -> dict[str, Any]:
        return {name: value() if callable(value) else value for name, value in settings.items()}

    expected = fit("auto", seeded(), **{**arguments(), "max_epochs": 2})
    with pytest.warns(LitOrtWarning, match=reason):
        runner = fit(strategy(), seeded(), **{**arguments(), "max_epochs": 2})
    assert_same(state_of(runner), state_of(expected), 1e-4)


def test_a_hook_on_a_gradient_is_called() -> None:
    module, shapes = seeded(), []
    module.head.weight.register_hook(lambda gradient: shapes.append(gradient.shape))
    with pytest.warns(LitOrtWarning, match="a parameter has a hook"):
        fit(strategy(), module, max_epochs=1)
    assert len(shapes) == 5


class Skips(Net):
    """Returns no loss for every second batch, but keeps it."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.kept = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
        return None if batch_idx % 2 else self.kept

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_a_skipped_batch_leaves_the_weights_or_is_rejected() -> None:
    expected = fit(lit_ort.ORTStrategy(fallback="error"), seeded(Skips), max_epochs=1)
    try:
        actual = fit(strategy(), seeded(Skips), max_epochs=1)
    except SessionError as error:
        assert "returned no loss" in str(error)  # noqa: PT017 - one of two outcomes
    else:
        assert_same(state_of(actual), state_of(expected))


def test_a_second_graph_after_an_update_is_rejected() -> None:
    updates, layer, x = Updates(BufferPool()), torch.nn.Linear(4, 1), torch.randn(2, 4)
    engine = lit_ort.ORTBackend(ORTOptions(fallback="error", optimizer_in_graph=True), updates=updates)
    first = torch.compile(lambda x: layer(x).square().mean(), backend=engine)
    second = torch.compile(lambda x: layer(x).exp().mean(), backend=engine)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    with updates.step(optimizer, Clipping()):
        first(x).backward()
    optimizer.zero_grad()
    with pytest.raises(SessionError, match="a second graph with gradients"), updates.step(optimizer, Clipping()):
        (first(x) + second(x)).backward()


def test_peak_memory_is_lower() -> None:
    def peak_bytes(options: dict[str, Any]) -> int:
        engine = lit_ort.ORTBackend(ORTOptions(fallback="error", **options), updates=Updates(BufferPool()))
        torch.compiler.reset()
        stack = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        torch.compile(lambda x: stack(x).square().mean(), backend=engine)(torch.randn(2, 64)).backward()
        return engine.compile_log.graphs[0].peak_bytes

    assert peak_bytes({"optimizer_in_graph": True}) < 0.5 * peak_bytes({})


def test_without_an_optimizer_the_option_is_rejected() -> None:
    with pytest.raises(OptionsError, match="needs an optimizer"):
        lit_ort.ORTBackend(ORTOptions(optimizer_in_graph=True))


def test_anomalies_are_not_detected_in_a_session() -> None:
    with pytest.raises(UnsupportedError, match="detect_anomaly=True with optimizer_in_graph=True"):
        fit(strategy(), seeded(), detect_anomaly=True)
