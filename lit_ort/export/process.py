"""Runs programs with onnxruntime's Python module in a separate process, since this one can use another copy of it."""

from __future__ import annotations

import re
import subprocess
import sys

from lit_ort.errors import ExportError

# Errors at interpreter shutdown would be printed after the relevant one.
_QUIET_END = "import sys\nsys.unraisablehook = lambda _: None\n"
# The first line of an exception's message.
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*: ")
# Locations in ONNX Runtime's source in error messages.
_ORIGIN = re.compile(r"/onnxruntime_src/\S+ .*?(?=\[ONNXRuntimeError\])|/onnxruntime_src/\S+ .*? was false\. ")


def run_python(source: str, *arguments: str, problem: str, remedy: str) -> None:
    """Runs a program.

    Args:
        source: the source of the program.
        arguments: its command line arguments.
        problem, remedy: the text of the error if the program fails.

    Raises:
        ExportError: the program failed; the error has the message at the end of its stderr.
    """
    command = [sys.executable, "-c", f"{_QUIET_END}{source}", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        first = next((k for k in reversed(range(len(lines))) if _EXCEPTION.match(lines[k])), len(lines) - 1)
        message = " ".join(line.strip() for line in lines[first:])
        raise ExportError(f"{problem}: {_ORIGIN.sub('', message).rstrip('. ')}. {remedy}")
