"""How a command was started, and where its configuration lies."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import lit_ort_tasks

_PACKAGE = Path(lit_ort_tasks.__file__).parent


def configuration_folder() -> Path:
    """The folder of the configuration groups: in the package or, of a clone, `conf/` at its top."""
    packaged = _PACKAGE / "conf"
    return packaged if packaged.is_dir() else _PACKAGE.parents[1] / "conf"


def command_line(name: str) -> str:
    """How to start a command such as "train" the way this process was started.

    Returns:
        `lit-ort train`, or `python train.py` with the path to the program from the working directory.
    """
    program = Path(sys.argv[0])
    if program.name not in ("train.py", "compare.py") or _PACKAGE in program.absolute().parents:
        return f"lit-ort {name}"
    return f"python {os.path.relpath(program.with_name(f'{name}.py'))}"
