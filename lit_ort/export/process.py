"""Work with onnxruntime's Python module in a process of its own: in this one it may be a second copy of the library."""

from __future__ import annotations

import re
import subprocess
import sys

from lit_ort.errors import ExportError

# An error of an object that goes at the end would stand behind the one that matters.
_QUIET_END = "import sys\nsys.unraisablehook = lambda _: None\n"
# Where in ONNX Runtime's own source an error was raised.
_ORIGIN = re.compile(r"/onnxruntime_src/\S+ .*?(?=\[ONNXRuntimeError\])|/onnxruntime_src/\S+ .*? was false\. ")


def run_python(source: str, *arguments: str, problem: str, remedy: str) -> None:
    """Runs a program.

    Args:
        problem, remedy: of the error, where the program fails.

    Raises:
        ExportError: with the last line of what the program said.
    """
    command = [sys.executable, "-c", f"{_QUIET_END}{source}", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        said = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise ExportError(f"{problem}: {_ORIGIN.sub('', said[-1]).rstrip('. ')}. {remedy}")
