"""Strategies have explicit, typed arguments for editors, type checkers and LightningCLI."""

from __future__ import annotations

import dataclasses
import inspect
import re
from datetime import timedelta
from typing import Any, get_type_hints

import pytest
from lightning.pytorch.cli import LightningCLI

import lit_ort
from lit_ort import ORTDDPStrategy, ORTOptions, ORTPipelineStrategy, ORTStrategy, ORTTensorStrategy, ORTZero1Strategy
from lit_ort.errors import OptionsError
from lit_ort.options import OptionArguments
from lit_ort.runtime.engines.choice import engine_of
from lit_ort.strategies import CompiledStrategy
from tests.lightning_models import Net, assert_same_weights
from tests.strategies.test_lightning_features import Rows
from tests.test_options import OTHERS

STRATEGIES = (ORTStrategy, ORTDDPStrategy, ORTZero1Strategy, ORTPipelineStrategy, ORTTensorStrategy)
PASS = "merge_equal"
# Several processes reduce gradients before the optimizer's step.
SINGLE_PROCESS = {"optimizer_in_graph"}
# jsonargparse deprecates how Lightning uses it.
ignore_jsonargparse = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def parameters(strategy: type[Any]) -> dict[str, inspect.Parameter]:
    named = dict(inspect.signature(strategy.__init__).parameters)
    del named["self"]
    return named


def test_every_option_is_an_argument_of_the_same_type() -> None:
    options = get_type_hints(ORTOptions)
    assert get_type_hints(OptionArguments) == {name: options[name] for name in options if name not in SINGLE_PROCESS}


@pytest.mark.parametrize("strategy", [*STRATEGIES, CompiledStrategy])
def test_every_argument_is_typed_and_documented(strategy: type[Any]) -> None:
    hints, text = get_type_hints(strategy.__init__), inspect.getdoc(strategy.__init__) or ""
    for name in parameters(strategy):
        assert hints[name] is not Any, name
        assert f"    {name}: " in text, name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_options_reach_the_engine(strategy: type[Any]) -> None:
    left_out = set() if strategy is ORTStrategy else SINGLE_PROCESS
    values = {name: value for name, (value, _) in OTHERS.items() if name not in left_out}
    # The other build isn't installed, and folders become absolute.
    values |= {"engine": engine_of("auto").name, "cache_dir": "/tmp/graphs", "dump_dir": "/tmp/stages"}
    options = dataclasses.asdict(strategy(**values).options)
    assert {name: options[name] for name in values} == values


@pytest.mark.parametrize(
    ("strategy", "argument", "nearest"),
    [
        (ORTStrategy, "verify_first", " Did you mean 'verify_first_step'?"),
        (ORTDDPStrategy, "optimizer_in_graph", ""),
        (ORTPipelineStrategy, "microbatches", " Did you mean 'micro_batches'?"),
        (ORTTensorStrategy, "time_out", " Did you mean 'timeout'?"),
    ],
)
def test_unknown_arguments_are_refused(strategy: type[Any], argument: str, nearest: str) -> None:
    with pytest.raises(OptionsError, match=rf"Unknown option '{argument}'\.{re.escape(nearest)} The options are "):
        strategy(**{argument: True})


def test_arguments_reach_distributed_data_parallel() -> None:
    strategy = ORTDDPStrategy(
        find_unused_parameters=True, bucket_cap_mb=0.5, broadcast_buffers=False, timeout=timedelta(minutes=2)
    )
    arguments = strategy._ddp_kwargs
    assert arguments["find_unused_parameters"] is True
    assert arguments["bucket_cap_mb"] == 0.5
    assert arguments["forward_sync_buffers"] is False
    assert strategy._timeout == timedelta(minutes=2)


def command_line(strategy: str, *init_args: str, run: bool = False) -> LightningCLI:
    """A LightningCLI with a strategy's class and its arguments."""
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    args = ["fit"] if run else []
    args += ["--trainer.accelerator=cpu", "--trainer.max_epochs=1", *(f"--trainer.{name}=false" for name in quiet)]
    args += [f"--trainer.strategy={strategy}", *(f"--trainer.strategy.{argument}" for argument in init_args)]
    return LightningCLI(Net, Rows, args=args, run=run, save_config_callback=None, seed_everything_default=1)


@ignore_jsonargparse
@pytest.mark.usefixtures("_no_arguments")
def test_lightning_cli_trains_with_a_strategys_arguments() -> None:
    init_args = ("init_args.fallback=error", "init_args.verify_first_step=true", "init_args.verify_every_n_steps=3")
    cli = command_line("lit_ort.ORTStrategy", *init_args, run=True)
    assert isinstance(cli.trainer.strategy, ORTStrategy)
    assert cli.trainer.strategy.options == ORTOptions(fallback="error", verify_first_step=True, verify_every_n_steps=3)
    assert {graph.kind for graph in lit_ort.explain(cli.trainer).graphs} == {"fused", "forward"}
    assert_same_weights(cli.model, command_line("auto", run=True).model)


@ignore_jsonargparse
@pytest.mark.usefixtures("_no_arguments")
def test_lightning_cli_converts_the_arguments_of_ort_ddp() -> None:
    arguments = ("overlap=true", "bucket_cap_mb=0.5", "timeout=0:05:00", f"disable_passes=[{PASS}]", "threads=2")
    cli = command_line("lit_ort.ORTDDPStrategy", *(f"init_args.{argument}" for argument in arguments))
    arguments = cli.config.trainer.strategy.init_args
    assert (arguments.overlap, arguments.bucket_cap_mb, arguments.timeout) == (True, 0.5, timedelta(minutes=5))
    strategy: Any = cli.trainer.strategy
    assert isinstance(strategy, ORTDDPStrategy)
    assert strategy.options == ORTOptions(disable_passes=(PASS,), threads=2)


@ignore_jsonargparse
@pytest.mark.usefixtures("_no_arguments")
@pytest.mark.parametrize(
    ("strategy", "argument", "message"),
    [
        ("ORTStrategy", "fallback=never", "'warn', 'error'"),
        ("ORTStrategy", "threads=two", "threads"),
        ("ORTStrategy", "falback=error", "falback"),
        ("ORTDDPStrategy", "optimizer_in_graph=true", "optimizer_in_graph"),
        ("ORTDDPStrategy", "overlap=7", "overlap"),
        ("ORTPipelineStrategy", "schedule=zigzag", "'1f1b', 'gpipe', 'interleaved'"),
    ],
)
def test_lightning_cli_rejects_invalid_arguments(
    strategy: str, argument: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command_line(f"lit_ort.{strategy}", f"init_args.{argument}")
    assert message in capsys.readouterr().err


@pytest.fixture
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI warns about command line arguments that it doesn't use."""
    monkeypatch.setattr("sys.argv", ["train.py"])
