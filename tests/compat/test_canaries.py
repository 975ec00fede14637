"""One canary for each private symbol of Lightning, Dynamo, torch.distributed and torch.optim."""

from __future__ import annotations

import importlib
import logging
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import Unsupported

from tests.compare import SINCE_2_15
from tests.compat.canary import canary

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
LIGHTNING = "lightning"
DYNAMO = "torch_dynamo"
DISTRIBUTED = "torch_distributed"
OPTIM = "torch_optim"


def module_of(package: str) -> Any:
    """A LightningModule with one layer."""

    class Plain(importlib.import_module(package).LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    return Plain()


def trainer_of(package: str, **settings: Any) -> Any:
    return importlib.import_module(package).Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, **settings
    )


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


# Lightning


@pytest.mark.parametrize("package", PACKAGES)
def test_compiler_context(package: str) -> None:
    effect = "a module from torch.compile is not rejected and is compiled twice"
    with canary("LightningModule._compiler_ctx", LIGHTNING, effect) as lightning:
        module = module_of(package)
        assert not lightning.is_compiled(module)
        compiled: Any = torch.compile(module, backend="eager")
        from_compiled = importlib.import_module(f"{package}.utilities.compile").from_compiled
        assert lightning.is_compiled(from_compiled(compiled))


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("enabled", [True, False])
def test_layer_sync(package: str, enabled: bool) -> None:
    effect = "sync_batchnorm=True fails in the first step instead of being rejected"
    with canary("ParallelStrategy._layer_sync", LIGHTNING, effect) as lightning:
        strategy = trainer_of(package, strategy="ddp", sync_batchnorm=enabled).strategy
        assert lightning.synchronizes_layers(strategy) is enabled


@pytest.mark.parametrize("package", PACKAGES)
def test_launcher(package: str) -> None:
    effect = "a Trainer of pytorch_lightning does not end the processes of ort_ddp after an error"
    with canary("DDPStrategy._configure_launcher", LIGHTNING, effect) as lightning:
        strategy = trainer_of(package, strategy="ddp").strategy
        launchers = importlib.import_module(f"{package}.strategies.launchers")
        strategy._launcher = None
        lightning.configure_launcher(type(strategy), strategy)
        assert type(strategy.launcher) is launchers._SubprocessScriptLauncher


@pytest.mark.parametrize("package", PACKAGES)
def test_lightning_optimizer(package: str) -> None:
    effect = "checkpoints of ort_pipeline and ort_tensor contain the wrapper's state"
    with canary("LightningOptimizer._optimizer", LIGHTNING, effect) as lightning:
        wrapper = importlib.import_module(f"{package}.core.optimizer").LightningOptimizer
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
        assert lightning.plain_optimizer(wrapper(optimizer)) is optimizer
        assert lightning.plain_optimizer(optimizer) is optimizer


@pytest.mark.parametrize("package", PACKAGES)
def test_distributed_sampler(package: str) -> None:
    effect = "the processes of one pipeline read different batches"
    with canary("Trainer._accelerator_connector.use_distributed_sampler", LIGHTNING, effect) as lightning:
        trainer = trainer_of(package)
        assert trainer._accelerator_connector.use_distributed_sampler is True
        lightning.leave_samplers_alone(trainer)
        assert trainer._accelerator_connector.use_distributed_sampler is False


@pytest.mark.parametrize("package", PACKAGES)
def test_sigterm_handler(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    effect = "a job that receives SIGTERM can hang with ranks that wait for each other"
    with canary("Trainer._signal_connector._sigterm_notifier_fn", LIGHTNING, effect) as lightning:
        trainer, registered = trainer_of(package), []
        connector = trainer._signal_connector
        assert callable(connector._sigterm_notifier_fn)
        connector_class: Any = type(connector)
        register = staticmethod(lambda _, handlers: registered.append(handlers))
        monkeypatch.setattr(connector_class, "_register_signal", register)
        calls: list[int] = []
        lightning.replace_sigterm_handler(trainer, lambda signum, _: calls.append(signum))
        connector.register_signal_handlers()
        registered[-1].signal_handlers[0](15, None)
        assert calls == [15]


@pytest.mark.parametrize("package", PACKAGES)
def test_received_sigterm(package: str) -> None:
    effect = "a job that receives SIGTERM continues"
    with canary("Trainer._signal_connector.received_sigterm", LIGHTNING, effect) as lightning:
        trainer = trainer_of(package)
        assert trainer.received_sigterm is False
        assert lightning.note_sigterm(trainer) is True
        assert trainer.received_sigterm is True
        assert lightning.note_sigterm(trainer) is False


def test_train_progress_bar() -> None:
    effect = "OneLineProgressBar prints an empty line before the first epoch"
    with canary("TQDMProgressBar._train_progress_bar", LIGHTNING, effect) as lightning:
        from lightning.pytorch.callbacks import TQDMProgressBar

        bar = TQDMProgressBar()
        assert lightning.training_bar(bar) is None
        bar.train_progress_bar = opened = bar.init_train_tqdm()
        assert lightning.training_bar(bar) is opened
        opened.close()


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`:UserWarning")
@pytest.mark.parametrize("package", PACKAGES)
def test_when_log_is_checked(package: str) -> None:
    effect = "log raises after a step, or records nothing, if Lightning would raise in the step"
    with canary("Trainer._results, _active_loop._data_fetcher", LIGHTNING, effect) as lightning:
        module = module_of(package)
        assert lightning.checks_logged_values_at_once(module)
        checks: list[bool] = []

        def step(_: Any, batch: Any, *__: Any) -> Any:
            checks.append(lightning.checks_logged_values_at_once(module))
            return module(torch.ones(1, 2)).sum()

        def iterator_step(_: Any, dataloader_iter: Any) -> Any:
            next(dataloader_iter)
            return step(None, None)

        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(2, 2)))
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.1)
        for training_step in (step, iterator_step):
            module.training_step = types.MethodType(training_step, module)
            trainer_of(package, max_steps=1, enable_model_summary=False).fit(module, loader)
        module.predict_step = types.MethodType(step, module)
        trainer_of(package).predict(module, loader)
        assert checks == [False, True, True, True]


# Dynamo


def test_step_settings() -> None:
    effect = "RNNs are skipped, counters recompile at every value, log calls break graphs, or the limit isn't reported"
    with canary("torch._dynamo.config", DYNAMO, effect) as dynamo:
        config = importlib.import_module("torch._dynamo.config")
        names = ("allow_rnn", "allow_unspec_int_on_nn_module", "recompile_limit", "suppress_errors")
        with dynamo.step_settings(3, True):
            assert [getattr(config, name) for name in names] == [True, True, 3, False]
            assert logging.Logger.info in config.ignore_logging_functions
        with dynamo.tracing_settings(False):
            assert [getattr(config, name) for name in names] == [True, False, 8, True]
            assert config.use_numpy_random_stream
            assert not config.skip_nnmodule_hook_guards


def test_traces_of_other_threads() -> None:
    effect = "a compiled function raises while another thread compiles"
    with canary("torch.fx._symbolic_trace.is_fx_symbolic_tracing", DYNAMO, effect):
        seen: list[Any] = []
        step = torch.compile(lambda x: x + 1, backend="eager")
        step(torch.ones(2))

        class Traced(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with lock:
                    thread = threading.Thread(target=lambda: seen.append(step(torch.ones(2))))
                    thread.start()
                    thread.join()
                return x

        lock = importlib.import_module("torch._dynamo.convert_frame").compile_lock
        torch.fx.symbolic_trace(Traced())
        assert len(seen) == 1
        with pytest.raises(RuntimeError, match="symbolically trace"):
            torch.fx.symbolic_trace(lambda x: step(x))


def recompiled() -> None:
    """Runs a function until it reaches the recompile limit."""
    dynamo = importlib.import_module("lit_ort._compat.torch_dynamo")

    @torch.compile(backend="eager", dynamic=False)
    def scaled(x: torch.Tensor, word: str) -> torch.Tensor:
        return x * len(word)

    with dynamo.step_settings(2, strict=False):
        for count in range(4):
            scaled(torch.ones(2), "x" * count)


def test_recompile_limit_log_line(caplog: pytest.LogCaptureFixture) -> None:
    effect = "a step that recompiles at every call falls back to eager without lit_ort's warning"
    with canary("the log line of torch._dynamo.convert_frame at the recompile limit", DYNAMO, effect) as dynamo:
        with recorded(dynamo.FRAME_LOGGER) as records:
            recompiled()
        assert any(dynamo.is_recompile_limit(record) for record in records)


@contextmanager
def recorded(name: str) -> Iterator[list[logging.LogRecord]]:
    """A context that collects the records of a logger instead of logging them."""
    records: list[logging.LogRecord] = []
    logger = logging.getLogger(name)
    collect: Callable[[logging.LogRecord], bool] = lambda record: bool(records.append(record))  # noqa: E731
    logger.addFilter(collect)
    try:
        yield records
    finally:
        logger.removeFilter(collect)


def test_suppressed_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    effect = "code that Dynamo can't trace ends a run, or runs in eager without lit_ort's warning"

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise AttributeError("nothing")

    with canary("torch._dynamo.config.suppress_errors and its log line", DYNAMO, effect) as dynamo:
        monkeypatch.setattr("torch._dynamo.convert_frame.trace_frame", broken)
        with recorded(dynamo.FRAME_LOGGER) as records, dynamo.step_settings(3, False):
            assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(())) == 2
        errors = [dynamo.suppressed_error(record) for record in records]
        assert any("nothing" in str(error) for error in errors if error is not None)


def test_scalar_advice() -> None:
    effect = "the first item() of a step logs thirteen lines of advice that does not apply to lit_ort"
    with canary("the log line of torch._dynamo.variables.tensor at item()", DYNAMO, effect) as dynamo:
        advice = importlib.import_module("torch._dynamo.variables.tensor").TensorVariable._warn_capture_scalar_outputs
        advice.cache_clear()
        with recorded(dynamo.SCALAR_LOGGER) as records:
            torch.compile(lambda x: x * x.sum().item(), backend="eager")(torch.ones(2))
        assert any(dynamo.is_scalar_advice(record) for record in records)


def test_untraced_packages() -> None:
    effect = "a step with metrics is compiled as many small graphs"
    with canary("torch._dynamo.trace_rules.add", DYNAMO, effect) as dynamo:
        dynamo.skip_package("torchmetrics")
        dynamo.skip_package("a package that is not installed")
        metric = importlib.import_module("torchmetrics").MeanMetric()
        graphs: list[Any] = []

        def backend(graph: Any, _: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        def step(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            metric.update(y)
            return y

        for _ in range(3):
            torch.compile(step, backend=backend)(torch.ones(2))
        assert len(graphs) == 1
        assert metric.compute() == 2


def test_optimize_ddp() -> None:
    effect = "ort_ddp splits every step's graph at buckets, or overlap=True never does"
    with canary("torch._dynamo.config.optimize_ddp", DYNAMO, effect) as dynamo:
        config = importlib.import_module("torch._dynamo.config")
        for enabled in (True, False):
            with dynamo.graphs_by_bucket(enabled):
                assert config.optimize_ddp is enabled


def test_detect_is_causal_mask() -> None:
    effect = "the graph of every step with an nn.Transformer breaks at the mask"
    with canary("torch.nn.modules.transformer._detect_is_causal_mask", DYNAMO, effect) as dynamo:
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0), 1, enable_nested_tensor=False)
        mask = nn.Transformer.generate_square_subsequent_mask(3)
        compiled = torch.compile(encoder, backend="eager", fullgraph=True)
        with dynamo.replaced_functions():
            torch.testing.assert_close(compiled(torch.ones(3, 1, 4), mask), encoder(torch.ones(3, 1, 4), mask))
        with torch.compiler.set_stance("fail_on_recompile"):
            compiled(torch.ones(3, 1, 4), mask)


@pytest.mark.skipif(torch.backends.cudnn.is_available(), reason="the flags of a build with cuDNN end a graph")
def test_flags_of_cudnn() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.backends.cudnn.flags(enabled=False):
            return x.exp()

    with canary("torch.backends.cudnn.flags", DYNAMO, "the loss of every model with CTC runs in eager") as dynamo:
        compiled = torch.compile(step, backend="eager", fullgraph=True)
        with dynamo.replaced_functions():
            torch.testing.assert_close(compiled(torch.ones(3)), step(torch.ones(3)))


class Tripled(torch.autograd.Function):
    """The identity, with three times its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 3 * gradient


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_autograd_functions() -> None:
    effect = "torch.func.grad in a step ignores the backward of an autograd.Function"
    with canary("AutogradFunctionVariable.call_apply", DYNAMO, effect) as dynamo:
        x = torch.ones(2)
        with dynamo.kept_backwards():
            plain = torch.compile(lambda x: torch.func.grad(gain)(x), backend="eager", fullgraph=True)
            if not SINCE_2_15:
                with pytest.raises(Unsupported, match="Tripled, which has its own backward"):
                    plain(x)
            else:
                torch.testing.assert_close(plain(x), torch.full((2,), 3.0))
            weighted = torch.compile(lambda x: torch.func.grad(weighted_gain)(x), backend="eager", fullgraph=True)
            torch.testing.assert_close(weighted(x), torch.full((2,), 6.0))


def gain(x: torch.Tensor) -> torch.Tensor:
    return Tripled.apply(x).sum()  # pyright: ignore[reportAttributeAccessIssue]


WEIGHT = nn.Parameter(torch.tensor(2.0))


def weighted_gain(x: torch.Tensor) -> torch.Tensor:
    return gain(x * WEIGHT)


class Choice:
    """An object that is compared by its identity."""


def test_identities() -> None:
    effect = "a step that compares objects with `is` takes the branch of the first call for other objects too"
    with canary("torch._dynamo.variables.builtin.vt_identity_compare", DYNAMO, effect) as dynamo:
        first, second = Choice(), Choice()
        chosen = {"choice": second}

        def step(x: torch.Tensor) -> torch.Tensor:
            return x if chosen["choice"] is first else x + 1

        compiled = torch.compile(step, backend="eager")
        with dynamo.guarded_identities():
            results = []
            for chosen["choice"] in (second, first, second):
                results.append(int(compiled(torch.ones(()))))
        assert results == [2, 1, 2]


# torch.distributed


def test_resolve_process_group(one_rank: dist.ProcessGroup) -> None:
    effect = "the collectives of ort_tensor have no process group"
    with canary("torch._C._distributed_c10d._resolve_process_group", DISTRIBUTED, effect) as distributed:
        assert distributed.group_named(one_rank.group_name) is one_rank


@pytest.mark.parametrize("enabled", [True, False])
def test_buffer_broadcast(one_rank: dist.ProcessGroup, enabled: bool) -> None:
    effect = "broadcast_buffers has no effect, or warns"
    with canary("DistributedDataParallel's forward_sync_buffers", DISTRIBUTED, effect) as distributed:
        wrapper = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), **distributed.buffer_broadcast(enabled))
        assert wrapper.broadcast_buffers is enabled


def test_first_bucket(one_rank: dist.ProcessGroup) -> None:
    effect = "overlap=True with a small bucket_cap_mb doesn't split graphs at the bucket boundaries"
    with canary("torch.distributed._DEFAULT_FIRST_BUCKET_BYTES", DISTRIBUTED, effect) as distributed:
        from torch._dynamo.backends.distributed import DDPOptimizer

        wrapper = nn.parallel.DistributedDataParallel(nn.Linear(64, 64), bucket_cap_mb=1e-2)
        with distributed.graphs_of_buckets(wrapper):
            splitter = DDPOptimizer(wrapper.bucket_bytes_cap, backend_compile_fn=lambda graph, _: graph)
        assert splitter.first_bucket_cap == wrapper.bucket_bytes_cap == int(1e-2 * 2**20)


def test_backward_sync(one_rank: dist.ProcessGroup) -> None:
    effect = "manual optimization under ort_ddp averages gradients twice, or never"
    with canary("DistributedDataParallel.require_backward_grad_sync", DISTRIBUTED, effect) as distributed:
        wrapper = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        for enabled in (False, True):
            distributed.prepare_backward_after_forward(wrapper, enabled)
            wrapper(torch.ones(1, 2))
            assert wrapper.require_forward_param_sync is enabled


def test_forward_cache(one_rank: dist.ProcessGroup) -> None:
    effect = "Pipeline.in_flight is always 0"
    with canary("PipelineStage.fwd_cache", DISTRIBUTED, effect) as distributed:
        from torch.distributed import pipelining

        stage = pipelining.PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"))
        sizes: list[int] = []
        stage.submod.register_forward_hook(lambda *_: sizes.append(len(distributed.saved_micro_batches(stage))))
        schedule = pipelining.ScheduleGPipe(stage, 2, loss_fn=lambda output, _: output.sum())
        schedule.step(torch.ones(4, 2), target=torch.ones(4))
        # At the end of a micro-batch's forward, the micro-batches before it are saved.
        assert sizes[-2:] == [0, 1]


def test_encoder_fast_path() -> None:
    effect = "an nn.TransformerEncoderLayer in evaluation uses sharded attention weights as if they were complete"
    with canary("MultiheadAttention._qkv_same_embed_dim", DISTRIBUTED, effect) as distributed:

        class Attention(nn.MultiheadAttention):
            def forward(self, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                return query, None

        calls: list[str] = []

        def fast_path(x: torch.Tensor, *_: Any) -> torch.Tensor:
            calls.append("fast")
            return x

        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
        layer.self_attn = Attention(4, 2, batch_first=True)
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "_transformer_encoder_layer_fwd", fast_path)
            layer(torch.ones(1, 3, 4))
            assert calls == ["fast"]
            distributed.refuse_fast_path(layer.self_attn)
            layer(torch.ones(1, 3, 4))
        assert calls == ["fast"]


# torch.optim


def test_opt_called() -> None:
    effect = "learning rate schedules warn with optimizer_in_graph and ort_zero1 that the optimizer made no step"
    with canary("Optimizer._opt_called", OPTIM, effect) as optim:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        optim.note_step(optimizer)
        schedule.step()  # a warning is an error in tests


def test_amp_scaling() -> None:
    effect = "tasks with a fused optimizer can't clip gradients in mixed precision"
    with canary("Optimizer._step_supports_amp_scaling", OPTIM, effect) as optim:
        optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters(), fused=True)
        assert optimizer._step_supports_amp_scaling is True
        optim.take_no_loss_scale(optimizer)
        assert optimizer._step_supports_amp_scaling is False


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_step_hooks(register: str) -> None:
    effect = "optimizer_in_graph ignores the hooks of an optimizer's step"
    with canary(f"Optimizer's hooks of {register}", OPTIM, effect) as optim:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
        assert not optim.has_step_hooks(optimizer)
        getattr(optimizer, register)(lambda *_: None)
        assert optim.has_step_hooks(optimizer)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks(register: str) -> None:
    effect = "optimizer_in_graph ignores the hooks of a parameter's gradient"
    with canary(f"Tensor's hooks of {register}", OPTIM, effect) as optim:
        parameter = nn.Parameter(torch.ones(2))
        assert not optim.has_gradient_hooks(parameter)
        getattr(parameter, register)(lambda gradient: None)
        assert optim.has_gradient_hooks(parameter)


# Patching


def test_replaced() -> None:
    from lit_ort._compat.patching import replaced, replaced_entry

    class Base:
        name = "base"

    class Derived(Base):
        pass

    for owner in (Base, Derived):
        with replaced(owner, "name", "other"):
            assert owner.name == "other"
        assert owner.name == "base"
    assert "name" not in vars(Derived)
    with pytest.raises(AttributeError, match="nam"), replaced(Base, "nam", 1):
        pass
    entries = {"own": 1}
    with replaced_entry(entries, "own", 2), replaced_entry(entries, "new", 3):
        assert entries == {"own": 2, "new": 3}
    assert entries == {"own": 1}


# torch's ONNX exporter


@pytest.mark.filterwarnings("ignore")
def test_traces_become_programs_of_the_exporter() -> None:
    pytest.importorskip("onnxscript")
    effect = "training steps can't be exported, or are traced a second time"
    with canary("_fx_passes.decompose_with_registry and ExportedProgram", "torch_export", effect) as export:
        constant = torch.arange(3.0)

        def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x * constant, x.addcmul(x, constant)

        table = export.decompositions_for_onnx()
        assert torch.ops.aten.addcmul.default not in table
        assert torch.ops.aten.squeeze.dims in table
        program = export.program_of(export.trace_of(function, [torch.ones(2, 3)], [(0,)], table))
        assert [spec.kind.name for spec in program.graph_signature.input_specs] == ["CONSTANT_TENSOR", "USER_INPUT"]
        with export.kept_operators():
            exported: Any = torch.onnx.export(program, dynamo=True, verbose=False, optimize=False)
        assert {node.op_type for node in exported.model_proto.graph.node} >= {"Mul", "Add"}
