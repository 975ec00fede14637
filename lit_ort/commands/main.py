"""The program `lit-ort`: trains, compares, benchmarks, explains and exports models, and manages the cache."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence

from lit_ort.commands import benchmark, cache, explain, export, export_training
from lit_ort.extras import install_command, is_installed
from lit_ort.version import __version__

COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "benchmark": benchmark.main,
    "explain": explain.main,
    "export": export.main,
    "export-training": export_training.main,
    "cache": cache.main,
}
# Programs of the `tasks` extra. They run as the main module, because Lightning starts the other processes of a run by
# the name of the main module.
PROGRAMS = {name: f"lit_ort_tasks.commands.{name}" for name in ("train", "compare", "predict")}

HELP = f"""lit-ort {__version__}: train PyTorch Lightning models through ONNX Runtime

  lit-ort train strategy=ort               train a task; NAME=VALUE sets the configuration  [tasks]
  lit-ort compare strategies=[eager,ort]   train a task with each strategy and report       [tasks]
  lit-ort predict run=FOLDER text="..."    predict with the exported model of a run         [tasks]
  lit-ort benchmark MODULE:FUNCTION        time your own step in eager, inductor and ort
  lit-ort explain MODULE:FUNCTION          run your own step once and show what ran where
  lit-ort export MODULE:FUNCTION FILE      write your own module as an ONNX file            [export]
  lit-ort export-training MODULE:FUNCTION FOLDER
                                           write its training step for any onnxruntime      [export]
  lit-ort cache list|clear FOLDER          list or clear a folder of compiled graphs

MODULE:FUNCTION, such as my_project.model:make, names a function without arguments that returns a module and a batch.
Each command has --help. [NAME] is the extra that a command needs; without it, the command says what to install."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command line.

    Args:
        arguments: the arguments without the program's name; None uses those of this process.
    """
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("--help", "-h"):
        print(HELP)
    elif command == "--version":
        print(__version__)
    elif command in COMMANDS:
        COMMANDS[command](rest)
    elif command in PROGRAMS:
        run_program(command, rest)
    else:
        known = ", ".join((*PROGRAMS, *COMMANDS))
        sys.exit(f"error: lit-ort {command}: no such command. Use one of {known}; see `lit-ort --help`.")


def run_program(command: str, arguments: Sequence[str]) -> None:
    """Runs a command of the `tasks` extra as this process's main module."""
    if not is_installed("tasks"):
        sys.exit(f"error: lit-ort {command} needs the tasks extra. Install it: {install_command('tasks')}")
    sys.argv[1:] = arguments
    runpy.run_module(PROGRAMS[command], run_name="__main__", alter_sys=True)
