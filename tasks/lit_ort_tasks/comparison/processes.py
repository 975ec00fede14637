"""Runs strategies, each in a separate process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import ListConfig
from rich.console import Console
from rich.status import Status

from lit_ort_tasks.comparison.outcome import Outcome
from lit_ort_tasks.errors import InputError, require
from lit_ort_tasks.overrides import override_of
from lit_ort_tasks.runs import RESULTS

TRAIN = ("-m", "lit_ort_tasks.commands.train")
# Keys that a comparison sets, with the reason.
OWN_KEYS = {
    "strategy": "it runs each of strategies=[...]",
    "logger": "it reads TensorBoard's events",
    "ckpt_path": "every strategy starts from the seed",
    "hparams_search": "it runs each strategy once",
}


def strategies_of(value: Any) -> list[str]:
    """Return the names of `strategies=[...]`.

    Raises:
        InputError: it is no list.
    """
    if not isinstance(value, ListConfig):
        shown, example = ("null", "eager,ort") if value is None else (value, value)
        raise InputError(f"strategies={shown}: must be a list. Write strategies=[{example}], or leave it out.")
    return [str(name) for name in value]


def require_comparable(strategies: Sequence[str], overrides: Sequence[str]) -> None:
    """Checks the strategies and the overrides of a comparison.

    Raises:
        InputError: there is no strategy, a strategy doesn't exist or is repeated, or an override sets a key that the
            comparison sets.
    """
    valid = ", ".join(GlobalHydra.instance().config_loader().get_group_options("strategy"))
    require(len(strategies) > 0, f"strategies=[]: at least one is needed. Choose from {valid}.")
    for name in strategies:
        require(name in valid.split(", "), f"strategies: {name!r} is not a strategy. Choose from {valid}.")
        require(
            strategies.count(name) == 1, f"strategies: {name!r} is repeated, and each has one folder. Name it once."
        )
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0].partition(".")[0]
        if key in OWN_KEYS:
            raise InputError(f"{override}: a comparison sets {key} itself ({OWN_KEYS[key]}). Leave it out.")


def run(strategy: str, overrides: Sequence[str], folder: Path, console: Console) -> Outcome:
    """Trains with one strategy in a separate process, whose output goes to `output.log` in the strategy's folder."""
    run_folder = folder / strategy
    run_folder.mkdir(parents=True, exist_ok=True)
    log = run_folder / "output.log"
    command = [sys.executable, *TRAIN, *overrides, f"strategy={strategy}", override_of("hydra.run.dir", run_folder)]
    start_s = time.monotonic()
    with log.open("wb") as output, console.status(f"{strategy}: starts") as status:
        # What is compared is compiled from the first step on.
        environment = {"LIT_ORT_COMPILE": "always", **os.environ}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            code = follow(process, log, f"{strategy}: ", status, console.width)
        finally:
            process.kill()
            process.wait()
    duration = f"{time.monotonic() - start_s:.0f} s"
    results_file = run_folder / RESULTS
    if code == 0 and results_file.exists():
        console.print(f"{strategy}: done in {duration}")
        return Outcome(strategy, log, json.loads(results_file.read_text(encoding="utf-8")), None)
    console.print(f"{strategy}: failed after {duration}")
    return Outcome(strategy, log, None, f"exit code {code}: {last_error(log)}")


def follow(process: subprocess.Popen[bytes], log: Path, label: str, status: Status, width: int) -> int:
    """Shows the last line of a log until the process ends. Returns its exit code."""
    while (code := process.poll()) is None:
        lines = tail(log)
        if lines:
            status.update((label + lines[-1])[: width - 4].replace("[", r"\["))
        time.sleep(0.2)
    return code


def tail(log: Path, size: int = 8192) -> list[str]:
    """The last lines of a log without empty ones. Each state of a progress bar is a line."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - size))
        text = file.read().decode("utf-8", errors="replace")
    return [line.strip() for line in text.replace("\r", "\n").split("\n") if line.strip()]


def last_error(log: Path) -> str:
    """The last line that begins with an error, or else the last line: Hydra adds a hint below the error."""
    lines = tail(log)
    errors = [line for line in lines if re.match(r"error\b|Error (?!executing)|[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["no output"])[-1]
