"""Trains one model: composes the configuration, builds its parts, fits and tests (`lit-ort train --help`)."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import hydra
import psutil
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from lit_ort import ORTOptions, explain, export_training, plan_memory
from lit_ort.backend.explanation import CompileLog
from lit_ort.callbacks import MIB, LastCheckpoint, StepStatistics, short_figure
from lit_ort.errors import LitOrtError, NonFiniteError
from lit_ort.files import whole_file
from lit_ort.strategies import CompiledStrategy
from lit_ort_tasks.commands.program import command_line, configuration_folder
from lit_ort_tasks.console import drop_known_messages, record_messages
from lit_ort_tasks.errors import InputError, require
from lit_ort_tasks.inference import write_inference
from lit_ort_tasks.overrides import require_usable
from lit_ort_tasks.records import final_figures, finish_wandb, hyperparameters, record_end, record_start
from lit_ort_tasks.rules import require_processes, require_rules, require_visible_gradients
from lit_ort_tasks.runs import RESULTS, checkpoint_to_resume, discard_refused, resume_command

# What `export=training` writes, and the folder for it.
TRAINING = "training"
# Of results.json, if an export failed.
EXPORT_ERROR = "export_error"


@dataclass(frozen=True)
class Run:
    """The parts of a configuration."""

    trainer: Trainer
    task: LightningModule
    data: LightningDataModule


def make(config: DictConfig) -> Run:
    missing = sorted(OmegaConf.missing_keys(config))
    require(not missing, f"{', '.join(missing)}: has no value, and this configuration needs one. Give it.")
    require_rules(config)
    require_visible_gradients(config)
    require_processes(config, os.environ)
    seed_everything(config.seed, workers=True, verbose=False)
    strategy = part_of(config.strategy)
    data = part_of(config.data)
    task = part_of(config.task, **data.task_arguments)
    callbacks = [part_of(callback) for callback in config.get("callbacks", {}).values()]
    for callback in callbacks:
        if isinstance(callback, LastCheckpoint):
            callback.resume = resume_command
    loggers = [part_of(logger) for logger in config.get("logger", {}).values()]
    trainer: Trainer = part_of(config.trainer, strategy=strategy, callbacks=callbacks, logger=loggers)
    return Run(trainer, task, data)


def part_of(config: DictConfig, **arguments: Any) -> Any:
    """Return the object that a part of a configuration describes, of lists and dicts of Python.

    Those of OmegaConf would be in the checkpoints, as an optimizer's `betas`, and torch refuses them with
    `weights_only=True`.
    """
    return instantiate(config, _convert_="all", **arguments)


def plan(config: DictConfig) -> None:
    """Prints the memory of a training step, and the largest batch for the memory that is free now."""
    run = make(config)
    options = getattr(run.trainer.strategy, "options", None)
    require(
        isinstance(options, ORTOptions),
        "plan_memory=true: only steps through ONNX Runtime are planned. Leave it out, or choose strategy=ort.",
    )
    run.data.prepare_data()
    run.data.setup("fit")
    batch = next(iter(run.data.train_dataloader()))
    run.task.configure_model()  # as fit does
    planned = plan_memory(run.task.train(), batch, options=options, batch_dim=getattr(run.data, "batch_dim", 0))
    free = psutil.virtual_memory().available
    largest = (
        f"{free / MIB:.0f} MiB are free: batches of up to {planned.largest_batch(free)}, without the optimizer's state"
    )
    Console(soft_wrap=True, highlight=False).print(f"{planned}\n{largest}")


def fit_and_test(config: DictConfig, folder: Path) -> dict[str, Any]:
    """Runs a configuration.

    Returns:
        The content of results.json: the last value of each metric, the names of the headline figures, the statistics of
        the steps, the checkpoint, and the error of an export that failed.
    """
    resumed = checkpoint_to_resume(config.ckpt_path, folder, config)
    run = make(config)
    trainer, task, data = run.trainer, run.task, run.data
    require_exportable(config, run)
    settings = HydraConfig.get()
    parameters = hyperparameters(config, settings.runtime.choices, settings.overrides.task)
    record_start(trainer, config, parameters)
    show_anomaly_note(config, trainer)
    trainer.fit(task, datamodule=data, ckpt_path=resumed, weights_only=True)
    metrics: dict[str, Any] = dict(trainer.callback_metrics)
    checkpoint = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if not checkpoint:  # a step or time limit came before the first validation
        metrics |= first(trainer.validate(task, datamodule=data, verbose=False))
        checkpoint = str(folder / "checkpoints" / "last.ckpt")
        trainer.save_checkpoint(checkpoint, weights_only=False)
    metrics |= first(trainer.test(task, datamodule=data, ckpt_path=checkpoint, verbose=False, weights_only=True))
    callbacks = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue] (set by a connector)
    exported, problem = None, {}
    try:
        exported = export_model(config, task, data, folder, checkpoint)
    except (InputError, LitOrtError, OSError) as error:  # the results of the training are kept
        problem = {EXPORT_ERROR: str(error)}
    statistics = next((part.summary() for part in callbacks if isinstance(part, StepStatistics)), None)
    results = {
        "headline": list(getattr(task, "headline", ("loss",))),
        "metrics": {name: finite(float(value)) for name, value in metrics.items()},
        "steps": asdict(statistics) if statistics else None,
        "planned_mib": planned_mib(trainer),
        "ran": ran(trainer),
        "checkpoint": checkpoint,
        "exported": exported,
        "folder": str(folder),
        **problem,
    }
    record_end(trainer, final_figures(results))
    return results


@rank_zero_only
def show_anomaly_note(config: DictConfig, trainer: Trainer) -> None:
    """Prints what an anomaly of a compiled step means, where anomalies are detected."""
    compiled = isinstance(trainer.strategy, CompiledStrategy) or _is_through_onnx_runtime(trainer)
    if config.trainer.detect_anomaly and compiled:
        eager = f"{command_line('train')} strategy=eager debug=anomaly"
        note = f"detect_anomaly: a compiled step is checked as one operator; `{eager}` names the operator of the model"
        Console(soft_wrap=True, highlight=False).print(note)


@rank_zero_only
def export_model(config: DictConfig, task: Any, data: Any, folder: Path, checkpoint: str) -> str | None:
    """Writes what `export=` selects to the folder of the run. Returns a description of it."""
    if config.get("export") is None:
        return None
    # Of the checkpoint that was tested, whose weights the task has now.
    if config.export.format == TRAINING:
        target, settings = folder / TRAINING, {n: config.export[n] for n in ("optimizer", "trainable", "clip_norm")}
        # An earlier one of this run, before it was resumed, stays until the new one is whole.
        with tempfile.TemporaryDirectory(dir=folder, prefix=f".{TRAINING}.") as unfinished:
            new = Path(unfinished) / TRAINING
            exported = export_training(task, new, next(iter(data.train_dataloader())), **settings)
            if target.exists():
                target.replace(Path(unfinished) / "old")
            new.replace(target)
        return str(replace(exported, folder=target))
    settings = {name: config.export[name] for name in ("half", "quantize", "tolerance")}
    return str(write_inference(task.inference(data), folder, checkpoint, settings))


def require_exportable(config: DictConfig, run: Run) -> None:
    """Refuses to train for an export that is impossible.

    Raises:
        InputError: the task or its data has no form for inference, or each process has a part of the model.
    """
    if config.get("export") is None:
        return
    target = Path(HydraConfig.get().runtime.output_dir) / TRAINING
    require(
        config.export.format != TRAINING or not target.exists() or (target / "train_step.json").is_file(),
        f"export={TRAINING}: {target} exists and is no earlier export, so that it isn't replaced. Move it, or choose "
        "another folder (hydra.run.dir).",
    )
    require(
        config.export.format == TRAINING or hasattr(run.task, "inference"),
        f"export={config.export.format}: {type(run.task).__name__} has no form for inference so far. Leave export out; "
        "lit_ort.export accepts any module.",
    )
    require(
        config.export.format == TRAINING or getattr(run.task, "tokenizer", run.task) is not None,
        f"export={config.export.format}: this data has ids and no tokenizer, which predicting needs. Leave export out, "
        "or use data=pretraining_text.",
    )
    name = getattr(run.trainer.strategy, "strategy_name", "")
    require(
        name not in ("ort_tensor", "ort_pipeline"),
        f"export={config.export.format}: with strategy={name} each process has a part of the model. Leave export out, "
        "and export a run of another strategy from the checkpoint.",
    )


def first(results: Sequence[Any]) -> dict[str, Any]:
    """The figures of an evaluation's only loader; none where it has no batches."""
    return dict(results[0]) if results else {}


def finite(value: float) -> float | None:
    """The value, or None for NaN and infinity, which JSON lacks."""
    return value if math.isfinite(value) else None


def planned_mib(trainer: Trainer) -> float | None:
    """The planned memory of the largest training graph of a run through ONNX Runtime; None for other runs."""
    if not _is_through_onnx_runtime(trainer):
        return None
    planned = [graph.peak_bytes for graph in explain(trainer).graphs if graph.gradient_count and not graph.fallback]
    return max(planned) / MIB if planned else None


def ran(trainer: Trainer) -> str | None:
    """Which parts of a run went through ONNX Runtime; None for runs with other strategies."""
    return explain(trainer).summary if _is_through_onnx_runtime(trainer) else None


def _is_through_onnx_runtime(trainer: Trainer) -> bool:
    return isinstance(getattr(trainer.strategy, "compile_log", None), CompileLog)


@rank_zero_only
def report(results: dict[str, Any], folder: Path) -> None:
    show(results)
    try:
        with whole_file(folder / RESULTS) as file:
            file.write((json.dumps(results, indent=2, allow_nan=False) + "\n").encode())
    except OSError as error:
        sys.exit(f"error: {folder / RESULTS} can't be written: {error.strerror or error}. Its content is shown above.")


def show(results: dict[str, Any]) -> None:
    metrics, steps = results["metrics"], results["steps"]
    console = Console(soft_wrap=True, highlight=False)
    tested = {name.removeprefix("test/"): value for name, value in metrics.items() if name.startswith("test/")}
    shown = ", ".join(
        f"{name} {'not finite' if value is None else short_figure(value)}" for name, value in tested.items()
    )
    console.print(f"\ntest {shown}" if tested else "\nnothing was tested: there were no test batches")
    if steps and steps["step_ms_median"] is not None:
        rate = f"{steps['items_per_s']:.0f} {steps['item']}/s"
        console.print(f"{steps['step_ms_median']:.1f} ms/batch (median of {steps['steps']}), {rate}")
    if results["planned_mib"] is not None:
        plan = f"planned memory of a step: {results['planned_mib']:.0f} MiB"
        console.print(f"{plan}, in addition to parameters, optimizer and batch")
    if results["ran"] is not None:
        console.print(results["ran"])
    if results["exported"] is not None:
        console.print(results["exported"], markup=False)
    console.print(f"run folder {results['folder']}\ncheckpoint {results['checkpoint']}")


def objective(results: dict[str, Any]) -> float | None:
    """The value of a run for a search: the first headline figure in the last validation; None if it isn't finite."""
    return results["metrics"].get(f"val/{results['headline'][0]}")


def is_trial() -> bool:
    """Whether a search for hyperparameters started this run."""
    return HydraConfig.get().runtime.choices.get("hparams_search") is not None


@hydra.main(version_base="1.3", config_path=str(configuration_folder()), config_name="train")
def run_configured(config: DictConfig) -> float | None:
    drop_known_messages()
    record_messages()
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        if config.plan_memory:
            plan(config)
            return None
        results = fit_and_test(config, folder)
    except (InputError, LitOrtError, InstantiationException) as error:
        if isinstance(error, NonFiniteError) and is_trial():
            print(f"\nerror: {error}", file=sys.stderr)
            finish_wandb(1)
            return None
        # Hydra raises the error of a constructor as the cause of another one.
        for link in (error, error.__cause__):
            if isinstance(link, (InputError, LitOrtError)):
                discard_refused(folder)
                sys.exit(f"error: {link}")
        raise
    report(results, folder)
    finish_wandb(int(EXPORT_ERROR in results))
    if EXPORT_ERROR in results:
        message = f"error: {results[EXPORT_ERROR]}"
        if not is_trial():
            sys.exit(message)
        print(message, file=sys.stderr)  # the search goes on
    return objective(results)


def main() -> None:
    """Runs the command line of this process."""
    try:
        require_usable(sys.argv[1:], configuration_folder(), "train")
    except InputError as error:
        sys.exit(f"error: {error}")
    run_configured()


if __name__ == "__main__":
    main()
