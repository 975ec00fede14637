"""What the strategies have in common whose steps run through ONNX Runtime."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import torch
from lightning.pytorch.plugins.precision import Precision

from lit_ort._compat.lightning import (
    in_package,
    is_from_lightning,
    is_inside_epoch,
    own_class_of,
)
from lit_ort._compat.torch_optim import note_step
from lit_ort.backend.backend import ORTBackend
from lit_ort.backend.cache.measured_steps import MeasuredStep, MeasuredSteps
from lit_ort.backend.cache.store import name_of
from lit_ort.backend.eager import autocast_for
from lit_ort.backend.explanation import CompileLog
from lit_ort.errors import LitOrtWarning, UnsupportedError
from lit_ort.options import (
    AUTO,
    BF16_MIXED,
    FLOAT32,
    NEVER,
    OptionArguments,
    ORTOptions,
    require_bool,
    require_known,
)
from lit_ort.runtime.fused_form import fused_form
from lit_ort.runtime.report import COMPILED, EAGER
from lit_ort.strategies.arguments import StrategyArguments
from lit_ort.strategies.calls_left import calls_left
from lit_ort.strategies.compiled_code import IDLE, CompiledCode, code_key, description_of
from lit_ort.strategies.compiled_mixin import CompiledMixin
from lit_ort.strategies.jit import StepChoice, operators_in
from lit_ort.strategies.old_gradients import are_cleared_unseen
from lit_ort.strategies.optimizer_in_graph import clipping_of, reason_against_updates
from lit_ort.strategies.setting_checks import (
    ALWAYS,
    PRECISIONS,
    argument_names,
    asks_for_graphs,
    require_accelerator,
    require_compile,
    require_precision,
)
from lit_ort.strategies.summary import FitSummary, show
from lit_ort.strategies.training_draws import TrainingDraws, resume_torchs_generator

# When steps are compiled by a strategy with `compile=None`.
COMPILE_VARIABLE = "LIT_ORT_COMPILE"

# Attributes that a copy or a pickle of a strategy leaves out: sessions, their memory and compiled code.
_OF_THIS_PROCESS = frozenset({"_code", "_code_key", "_fit", "_steps"})


class ORTMixin(CompiledMixin):
    """Runs steps through ONNX Runtime, and rejects unsupported settings when the Trainer is created."""

    strategy_name: str
    # The keyword arguments that it takes besides those of its own.
    arguments: ClassVar[Any] = StrategyArguments
    # The class names of the Lightning accelerators that it supports.
    accelerators: tuple[str, ...] = ("CPUAccelerator",)
    compile_log: CompileLog
    _draws: TrainingDraws | None = None
    _resumed_draws: Mapping[str, Any] | None = None
    # How steps run, by their names, as it was settled in the latest training and in the one that is resumed.
    _settled_ways: Mapping[str, str] = {}
    _resumed_ways: Mapping[str, str] = {}
    _fit: FitSummary | None = None
    # Whether what it compiles can be used by another strategy.
    hands_on_code: ClassVar[bool] = True
    # Set between setup and teardown, where the code can be handed on.
    _code_key: Hashable = None
    # What is measured of each step is kept under this description.
    _described: dict[str, str]

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        compile: str | None = ALWAYS,
        optimizer_in_graph: bool = False,
        **own: Any,
    ) -> None:
        """Takes the arguments apart.

        Args:
            arguments: of a strategy: options, `fused_optimizer`, and those of Lightning's strategy.
            compile: when steps are compiled.
            optimizer_in_graph: as in `ORTOptions`.
            own: the arguments of Lightning's strategy that this one has by itself.
        """
        options = {name: value for name, value in arguments.items() if name in OptionArguments.__annotations__}
        others = {name: value for name, value in arguments.items() if name not in options}
        fused_optimizer = others.pop("fused_optimizer", True)
        require_known(others, argument_names(type(self), self.arguments))
        require_bool("fused_optimizer", fused_optimizer)
        self.options = ORTOptions(**options, optimizer_in_graph=optimizer_in_graph)
        self.compile = require_compile(os.environ.get(COMPILE_VARIABLE, AUTO) if compile is None else compile)
        self._fused_optimizer = fused_optimizer
        self.compile_log = CompileLog()
        self._code = CompiledCode(self.options, self.compile_log)
        self._warned_of_updates = False
        self._strict = self.options.fallback == "error"
        # Creating a backend checks the options, such as the names of passes.
        self._code.backend("training_step")
        super().__init__(**own, **others)

    def backend_of(self, step: str) -> ORTBackend:
        return self._code.backend(step)

    def _log_of_steps(self) -> CompileLog:
        return self.compile_log

    def step_context(self, kind: str) -> AbstractContextManager[Any]:
        # Code that reads dtypes sees those of eager; graphs are compiled for the autocast around them.
        return _inside(self._autocast(), super().step_context(kind))

    def _autocast(self) -> AbstractContextManager[Any]:
        return autocast_for(self.options.precision, self.root_device)

    def setup(self, trainer: Any) -> None:
        self._fit = FitSummary(self.compile_log) if trainer.state.fn == "fit" else None
        self._described = {}
        super().setup(trainer)
        module, options = self.lightning_module, self.options
        # Code of these options also has what belongs to one fit.
        is_own = options.verifies or options.optimizer_in_graph or options.dump_dir is not None
        self._code_key = (
            None if is_own or not self.hands_on_code or self._code.count else code_key(module, type(self), options)
        )
        code = None if self._code_key is None else IDLE.take(self._code_key)
        if code is not None:
            self._code = code
            code.attach(self.compile_log)
        if self._fit is not None:
            self._warned_of_updates = False
            self._code.updates.start_fit()

    def teardown(self) -> None:
        ways = self._settled_ways if self._steps is None else self._steps.settled_ways
        self._keep_measured()
        super().teardown()
        self._resumed_draws, self._resumed_ways = None, {}
        if self._code_key is not None:
            self._code.detach(ways)
            IDLE.put(self._code_key, self._code)
            self._code, self._code_key = CompiledCode(self.options, self.compile_log), None

    def _chooser(self, trainer: Any) -> Callable[[str, int], StepChoice] | None:
        at_once = asks_for_graphs(self.options) or torch.are_deterministic_algorithms_enabled()
        if self.compile == ALWAYS or (self.compile == AUTO and at_once):
            return None
        return partial(self._choice, trainer)

    def _choice(self, trainer: Any, step: str, dataloader: int) -> StepChoice:
        name = step if dataloader == 0 else f"{step} of dataloader {dataloader}"
        return StepChoice(
            name,
            partial(calls_left, trainer, step, dataloader),
            operators_in(trainer.lightning_module),
            # Ranks have different numbers of other batches.
            self._agreed if step == "training_step" else bool,
            self._decided(name),
            has_code=self._code.ways.get(name) == COMPILED,
            measured=self._measured_before(name),
        )

    def _measured_before(self, step: str) -> MeasuredStep | None:
        if self._measured is None:
            return None
        # Parameters can be frozen on the way.
        self._described[step] = f"{step} of {type(self).__name__}, {description_of(self.lightning_module)}"
        return self._measured.read(self._described[step])

    @cached_property
    def _measured(self) -> MeasuredSteps | None:
        """What steps were measured to take, in the folder of compiled graphs."""
        if self.options.cache_dir is None:
            return None
        return MeasuredSteps(self.options, name_of(self.backend_of("training_step").engine))

    def _keep_measured(self) -> None:
        """Writes what the steps took that were compiled in this run."""
        if self._steps is None or self._measured is None or self.rank:
            return
        was_read = any(graph.cache == "read" for graph in self.compile_log.explanation().graphs)
        for step, measured in self._steps.measured.items():
            # A folder that can't be written to was reported with the first graph.
            with suppress(OSError):
                name = f"{step} of {type(self.lightning_module).__name__}"
                self._measured.write(self._described[step], name, replace(measured, from_cache=was_read))

    def _decided(self, step: str) -> tuple[str, str] | None:
        """The way of a step's calls, and the reason, if nothing has to be timed."""
        if self.compile == NEVER:
            return EAGER, "compile='never'"
        way = self._resumed_ways.get(step)
        return None if way is None else (way, "it was faster before the checkpoint from which the run goes on")

    def _agreed(self, decision: bool) -> bool:
        """One decision for all processes."""
        return decision

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._draws is not None:
            self._draws.end()
        if self._steps is not None:
            self._steps.stop()
            self._settled_ways = self._steps.settled_ways
        if self._fit is not None:
            trainer = self.lightning_module.trainer
            show(trainer, self._fit.lines(trainer.callbacks))
            self._fit.log(trainer)

    def on_train_start(self) -> None:
        if self.options.optimizer_in_graph and torch.is_anomaly_enabled():
            raise UnsupportedError(
                "detect_anomaly=True with optimizer_in_graph=True: gradients stay in the session, where no anomaly is "
                "detected. Leave one of them out."
            )
        super().on_train_start()
        trainer = self.lightning_module.trainer
        self._draws = TrainingDraws(self.rank, self._resumed_draws, is_inside_epoch(trainer))
        if self._steps is not None and self._resumed_draws is not None:
            self._steps.draws.resume(*self._resumed_draws.get("draws", ()))
        self._resumed_draws = None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        # A custom loop can run steps before on_train_start().
        drawing = nullcontext() if self._draws is None else self._draws.step()
        cleared = self.optimizers if are_cleared_unseen(self.lightning_module) else ()
        with drawing, self._code.old_gradients.freed_by_run("training_step", cleared):
            output = super().training_step(*args, **kwargs)
        if self._fit is not None and not self.lightning_module.automatic_optimization:
            self._fit.add(start)
        return output

    @property
    def rank(self) -> int:
        """The rank that the random stream of this process depends on."""
        return 0

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        loss = self._optimizer_step(optimizer, closure, *args, **kwargs)
        # With manual optimization it is a part of the training step.
        if self._fit is not None and self.lightning_module.automatic_optimization:
            self._fit.add(start)
        return loss

    def _optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        trainer = self.lightning_module.trainer
        if not self.options.optimizer_in_graph or self._warns_of_updates(trainer, optimizer):
            return self._step_after_backward(optimizer, closure, *args, **kwargs)
        with self._code.updates.step(optimizer, clipping_of(trainer), self._fused_optimizer) as step:
            loss = closure()
            step.keeps_gradients = self.compile_log.may_read_gradients("training_step")
            if self.compile_log.reads_gradients("training_step"):
                self._code.updates.require_gradients()
        if not step.updated:
            return self._step_after_backward(optimizer, lambda: loss, *args, **kwargs)
        # The run has used the gradients: there is nothing left to clip, and a second step must not be counted.
        # Schedulers check this mark for whether a step was taken.
        note_step(optimizer)
        return loss

    def _step_after_backward(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        with fused_form(self._own_optimizer(optimizer)) if self._fused_optimizer else nullcontext():
            return super().optimizer_step(optimizer, closure, *args, **kwargs)

    def _own_optimizer(self, optimizer: Any) -> Any:
        """The optimizer that updates this process's parameters."""
        return optimizer

    def _warns_of_updates(self, trainer: Any, optimizer: Any) -> bool:
        """Whether the optimizer can't step inside a run, which causes one warning."""
        reason = reason_against_updates(self.lightning_module, trainer, optimizer, self.compile_log)
        if reason is not None and not self._warned_of_updates:
            self._warned_of_updates = True
            message = f"optimizer_in_graph=True: the optimizer steps after the backward, because {reason}."
            warnings.warn(message, LitOrtWarning, stacklevel=2)
        return reason is not None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if self._draws is not None:
            ways = self._settled_ways if self._steps is None else self._steps.settled_ways
            kinds = () if self._steps is None else self._steps.draws.kinds
            checkpoint = {**checkpoint, "lit_ort": {**self._draws.state, "ways": ways, "draws": kinds}}
        # Frees memory for the file, which Lightning builds in memory; no step runs meanwhile.
        self._code.pool.trim()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        # pytorch_lightning before 2.6 has no such argument.
        arguments = () if weights_only is None else (weights_only,)
        checkpoint = super().load_checkpoint(checkpoint_path, *arguments)
        # Hooks such as on_load_checkpoint() receive only Lightning's entries.
        own = checkpoint.pop("lit_ort", None)
        # Weights that are validated, tested or predicted with resume nothing.
        if own is not None and self.lightning_module.trainer.state.fn == "fit":
            self._resumed_draws, self._resumed_ways = own, own.get("ways", {})
            # Before the loader draws the order of an epoch's data.
            resume_torchs_generator(own)
        return checkpoint

    # A Trainer can be copied and pickled, even during a run. A copy compiles its own graphs.

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in _OF_THIS_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._code, self._steps, self._fit = CompiledCode(self.options, self.compile_log), None, None

    # Checks of settings. Lightning's connector sets these attributes on every strategy when a Trainer is created.

    @property
    def accelerator(self) -> Any:
        return super().accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        require_accelerator(accelerator, self.strategy_name, self.accelerators)
        super(ORTMixin, type(self)).accelerator.fset(self, accelerator)

    @property
    def precision_plugin(self) -> Any:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Any) -> None:
        precision = getattr(precision_plugin, "precision", FLOAT32)
        require_precision(precision, self.strategy_name)
        engine_precision = PRECISIONS[precision]
        if own_class_of(precision_plugin).__name__ == "MixedPrecision":
            if is_from_lightning(type(precision_plugin)):
                # Lightning's plugin rejects clipping with fused optimizers, and `step_context` has its autocast.
                precision_plugin = in_package(Precision, self.package)()
                precision_plugin.precision = precision
            else:
                # A derived plugin can have its own autocast.
                engine_precision = FLOAT32
        if engine_precision == BF16_MIXED:
            # For code of hooks.
            precision_plugin.forward_context = self._autocast
        super(ORTMixin, type(self)).precision_plugin.fset(self, precision_plugin)
        # Float32 is Lightning's default: the precision of the options stays.
        if precision != FLOAT32 and engine_precision != self.options.precision:
            self.options = replace(self.options, precision=engine_precision)
            self.__dict__.pop("_measured", None)
            self._code = CompiledCode(self.options, self.compile_log)


@contextmanager
def _inside(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
