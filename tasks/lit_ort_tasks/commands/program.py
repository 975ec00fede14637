"""How a command was started, and where its configuration is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import lit_ort_tasks

_PACKAGE = Path(lit_ort_tasks.__file__).parent
# Programs at the top of a clone.
_PROGRAMS = ("train.py", "compare.py", "predict.py")


def configuration_folder() -> Path:
    """The folder of the configuration groups: in the package, or `conf/` at the top of a clone."""
    packaged = _PACKAGE / "conf"
    return packaged if packaged.is_dir() else _PACKAGE.parents[1] / "conf"


def command_line(name: str) -> str:
    """How to start a command such as "train" in the way in which this process was started.

    Returns:
        `python train.py`, with the path from the working directory, in a process of such a program; elsewhere
        `lit-ort train`.
    """
    program = Path(sys.argv[0])
    if program.name in _PROGRAMS and _PACKAGE not in program.absolute().parents:
        return f"python {os.path.relpath(program.with_name(f'{name}.py'))}"
    return f"lit-ort {name}"
