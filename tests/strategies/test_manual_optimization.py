"""Steps with manual optimization, by what they call: eager's weights, and graph breaks that say what runs outside."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lit_ort
from tests.compare import mostly

START = "opt = self.optimizers()\nloss = self.loss(batch)\nopt.zero_grad()\nself.manual_backward(loss)\n"
STEPS: dict[str, str] = {
    "step": START + "opt.step()",
    "log": START + "opt.step()\nself.log('loss', loss)",
    "log_dict": START + "opt.step()\ns = self.lr_schedulers()\ns.step()\nself.log_dict({'lr': s.get_last_lr()[0]})",
    "without Lightning's wrapper": START.replace("rs()", "rs(use_pl_optimizer=False)") + "opt.step()",
    "the optimizer itself": START.replace("opt.z", "opt.optimizer.z") + "opt.optimizer.step()",
    "the Trainer's optimizer": START.replace("self.optimizers()", "self.trainer.optimizers[0]") + "opt.step()",
    "the Trainer's strategy": START.replace("self.manual_backward(loss)", "self.trainer.strategy.backward(loss, None)")
    + "opt.step()",
    "backward": START.replace("self.manual_backward(loss)", "loss.backward()") + "opt.step()",
    "toggle": "opt = self.optimizers()\nself.toggle_optimizer(opt)\nloss = self.loss(batch)\n"
    "self.manual_backward(loss)\nopt.step()\nopt.zero_grad()\nself.untoggle_optimizer(opt)",
    "toggle_model": "opt = self.optimizers()\nwith opt.toggle_model():\n    loss = self.loss(batch)\n"
    "    self.manual_backward(loss)\n    opt.step()\n    opt.zero_grad()",
    "scheduler": START + "opt.step()\nself.lr_schedulers().step()",
    "scheduler at the end": START + "opt.step()\nif self.trainer.is_last_batch:\n    self.lr_schedulers().step()",
    "clip_gradients": START + "self.clip_gradients(opt, 0.5, 'norm')\nopt.step()",
    "clip_grad_norm_": START + "nn.utils.clip_grad_norm_(self.parameters(), 0.5)\nopt.step()",
    "closure": "opt = self.optimizers()\ndef closure():\n    loss = self.loss(batch)\n    opt.zero_grad()\n"
    "    self.manual_backward(loss)\n    return loss\nopt.step(closure=closure)",
    "accumulation": "opt = self.optimizers()\nloss = self.loss(batch) / 2\nself.manual_backward(loss)\n"
    "if (batch_idx + 1) % 2 == 0:\n    opt.step()\n    opt.zero_grad()",
    "numbers of the Trainer": START
    + "opt.step()\nself.log('n', float(self.trainer.num_training_batches + self.global_step))",
    "learning rate": START + "for group in opt.param_groups:\n    group['lr'] = 0.01 / (1 + batch_idx)\nopt.step()",
    "result": START + "opt.step()\nreturn loss",
    "dictionary": START + "opt.step()\nreturn {'loss': loss.detach()}",
    "method": "self.update(self.loss(batch))",
    "twice": "opt = self.optimizers()\nfor k in range(2):\n    loss = self.loss(batch)\n    opt.zero_grad()\n"
    "    self.manual_backward(loss)\n    opt.step()",
    "gradients": START + "for p in self.layer.parameters():\n    p.grad.mul_(0.5)\nopt.step()",
}
# Dynamo traces no code around a context manager of another library, and none that an optimizer calls.
WITHOUT_STEP = frozenset({"toggle_model", "closure"})


class Manual(LightningModule):
    training_step: Any

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.unused = nn.Linear(4, 1)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.layer(batch[0]) - batch[1]).square().mean()

    def update(self, loss: Tensor) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.layer.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3)}


def with_step(source: str) -> Manual:
    lines = "".join(f"    {line}\n" for line in source.splitlines())
    names: dict[str, Any] = {"nn": nn}
    exec(f"def training_step(self, batch, batch_idx):\n{lines}", names)
    return type("OfSource", (Manual,), {"training_step": names["training_step"]})()


def fit(module: Manual, strategy: Any, **settings: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    data: Any = [(torch.randn(6, 4), torch.randn(6, 1)) for _ in range(4)]
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(strategy=strategy, max_epochs=2, accelerator="cpu", **{**off, **settings})
    trainer.fit(module, DataLoader(data, batch_size=None))
    return module.state_dict()


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", mostly(pytest.mark.sweep, STEPS, 3))
def test_a_manual_step(name: str) -> None:
    strategy = lit_ort.ORTStrategy()
    actual, expected = fit(with_step(STEPS[name]), strategy), fit(with_step(STEPS[name]), "auto")
    torch.testing.assert_close(actual, expected)
    breaks = [graph_break.reason for graph_break in strategy.compile_log.breaks]
    assert not [reason for reason in breaks if "mro" in reason or "`Optimizer" in reason and "outside" not in reason]
    assert strategy.compile_log.graphs or name in WITHOUT_STEP


@pytest.mark.filterwarnings("ignore")
def test_what_runs_outside_of_graphs_is_named() -> None:
    strategy = lit_ort.ORTStrategy()
    fit(with_step(STEPS["gradients"]), strategy)
    reasons = {graph_break.reason for graph_break in strategy.compile_log.breaks}
    methods = ("LightningModule.manual_backward", "LightningOptimizer.step", "Optimizer.zero_grad")
    assert reasons <= {f"lit_ort runs `{method}` outside of graphs." for method in methods}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compile", ["never", "always"])
def test_weights_that_a_step_changes_are_cast_again(compile: Literal["never", "always"]) -> None:
    low: Any = {"precision": "bf16-mixed"}
    expected = fit(with_step(STEPS["twice"]), "auto", **low)
    actual = fit(with_step(STEPS["twice"]), lit_ort.ORTStrategy(compile=compile), **low)
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-6 if compile == "never" else 5e-3)


class LogsInHooks(Manual):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.update(self.loss(batch))

    def on_after_backward(self) -> None:
        self.log("after", float(self.trainer.global_step))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compile", ["never", "always"])
def test_what_hooks_log_within_a_step_keeps_its_hook(compile: Literal["never", "always"]) -> None:
    keys = set[str]()

    class Keys(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            keys.update(trainer._results)

    fit(LogsInHooks(), lit_ort.ORTStrategy(compile=compile), callbacks=[Keys()])
    assert keys == {"on_after_backward.after"}
