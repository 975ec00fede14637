"""Work with onnxruntime's Python module in a process of its own: in this one it may be a second copy of the library."""

from __future__ import annotations

import subprocess
import sys

from lit_ort.errors import ExportError


def run_python(source: str, *arguments: str, problem: str, remedy: str) -> None:
    """Runs a program.

    Args:
        problem, remedy: of the error, where the program fails.

    Raises:
        ExportError: with the last line of what the program said.
    """
    ended = subprocess.run([sys.executable, "-c", source, *arguments], capture_output=True, text=True, check=False)
    if ended.returncode:
        said = ended.stderr.strip().splitlines()
        raise ExportError(f"{problem}: {said[-1] if said else f'exit code {ended.returncode}'}. {remedy}")
