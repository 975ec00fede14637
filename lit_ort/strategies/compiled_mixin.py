"""What strategies have in common whose steps are compiled, by any Dynamo backend."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from lit_ort._compat.lightning import LIGHTNING, chosen_checkpoint_io, is_checkpoint_wrapper, is_compiled, uncompile
from lit_ort.backend.events import DISABLED
from lit_ort.backend.explanation import CompileLog
from lit_ort.checkpoint_io import AtomicCheckpointIO
from lit_ort.strategies.compile_progress import ProgressListener
from lit_ort.strategies.jit import StepChoice
from lit_ort.strategies.step_methods import CompiledSteps
from lit_ort.strategies.summary import show

# The mixin precedes an `EitherStrategy` in the bases of a strategy.
_Base: Any = object


class CompiledMixin(_Base):
    """A strategy whose training, validation, test and predict steps run through `torch.compile`."""

    _steps: CompiledSteps | None = None
    _strict = False

    def backend_of(self, step: str) -> Callable[..., Any] | str:
        """The Dynamo backend for a step."""
        raise NotImplementedError

    def _log_of_steps(self) -> CompileLog:
        """The log that records the compilation of steps."""
        return CompileLog()

    def step_context(self, kind: str) -> AbstractContextManager[Any]:
        """The context of a step of a kind: `train`, `val`, `test` or `predict`."""
        return getattr(self.precision_plugin, f"{kind}_step_context")()

    @property
    def checkpoint_io(self) -> Any:
        plugin = chosen_checkpoint_io(self)
        if plugin is None:
            self.checkpoint_io = _atomic_checkpoint_io(self.package)
        elif is_checkpoint_wrapper(plugin):
            # A wrapper, such as one that writes in the background; its setter keeps a plugin that is already set.
            plugin.checkpoint_io = _atomic_checkpoint_io(self.package)
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        super(CompiledMixin, type(self)).checkpoint_io.fset(self, io)

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        module = self.lightning_module
        assert module is not None
        if is_compiled(module):
            uncompile(module)
            show(trainer, [f"{type(module).__name__} was compiled by torch.compile; this strategy compiles its steps"])
        log = self._log_of_steps()
        log.watch.listener = ProgressListener(trainer)
        self._steps = CompiledSteps(module, self.backend_of, self._strict, log, self._chooser(trainer))

    def _chooser(self, trainer: Any) -> Callable[[str, int], StepChoice] | None:
        """Returns what chooses the way of a step's calls; None compiles every step at its first call."""
        return None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._in_context("train", "training_step", super().training_step, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._in_context("val", "validation_step", super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._in_context("test", "test_step", super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._in_context("predict", "predict_step", super().predict_step, *args, **kwargs)

    def post_backward(self, closure_loss: Any) -> None:
        super().post_backward(closure_loss)
        if self._steps is not None:
            self._steps.lap()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        # Manual optimization calls this within a step: code of an optimizer or of a hook does not belong in a graph.
        module = self.lightning_module
        is_manual = module is not None and not module.automatic_optimization
        call = _untraced if is_manual else _called
        return call(super().optimizer_step, *args, **kwargs)

    def teardown(self) -> None:
        self._steps = None
        super().teardown()

    def _in_context(self, kind: str, step: str, without_graphs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a step in the context of its kind; outside of setup and teardown, without graphs."""
        if self._steps is None:
            return without_graphs(*args, **kwargs)
        with self.step_context(kind):
            return self._run(step, *args, **kwargs)

    def _run(self, step: str, *args: Any, **kwargs: Any) -> Any:
        assert self._steps is not None, "steps are only compiled between setup and teardown"
        return self._steps.run(step, *args, **kwargs)


def _atomic_checkpoint_io(package: str) -> Any:
    if package == LIGHTNING:
        return AtomicCheckpointIO()
    # The program has imported `pytorch_lightning` by now.
    from lit_ort.strategies.pytorch_lightning_io import PyTorchLightningCheckpointIO

    return PyTorchLightningCheckpointIO()


def _called(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return method(*args, **kwargs)


@partial(torch.compiler.disable, reason=DISABLED)
def _untraced(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return method(*args, **kwargs)
