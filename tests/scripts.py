"""Runs scripts as main modules of processes that have torch, Lightning and ONNX Runtime imported already."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The imports take five seconds, which is most of the time of a small script. Not lit_ort, whose import registers the
# strategies: a script that forgets it must fail.
PRELOADED = ["lightning.pytorch", "onnxruntime", "torch._dynamo"]


def run_script(
    path: Path,
    arguments: Sequence[str],
    folder: Path,
    seconds: float,
    imports_from: Sequence[Path] = (),
    unset: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Runs a script like `python path arguments`, in a process that is forked after the imports.

    Args:
        path: the script.
        arguments: of its command line.
        folder: the working directory.
        seconds: after which the process is killed.
        imports_from: folders on the path of imports, after the script's own.
        unset: environment variables that the script doesn't have.

    Returns:
        Exit code, standard output and standard error.

    Raises:
        subprocess.TimeoutExpired: the script takes longer.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    output, errors = folder / ".stdout", folder / ".stderr"
    process = context.Process(target=_main, args=(path, arguments, folder, output, errors, imports_from, unset))
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise subprocess.TimeoutExpired([str(path), *arguments], seconds)
    texts = [file.read_text(encoding="utf-8") for file in (output, errors)]
    return subprocess.CompletedProcess([str(path), *arguments], process.exitcode, *texts)


def run_code(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run([python, "-c", code, *arguments], ...)`, in a process that is forked after the imports.

    Raises:
        subprocess.TimeoutExpired: it takes longer than two minutes.
    """
    code, *arguments = command[2:]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "code.py")
        path.write_text(code)
        return run_script(path, arguments, Path(folder), seconds=120)


def _main(
    path: Path,
    arguments: Sequence[str],
    folder: Path,
    output: Path,
    errors: Path,
    imports_from: Sequence[Path],
    unset: Sequence[str],
) -> None:
    for variable in unset:
        os.environ.pop(variable, None)
    for stream, file in ((sys.stdout, output), (sys.stderr, errors)):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, stream.fileno())
    os.chdir(folder)
    sys.argv = [str(path), *arguments]
    sys.path[:0] = map(str, (path.parent, *imports_from))
    if imports_from:  # for the processes that the script starts
        os.environ["PYTHONPATH"] = os.pathsep.join(map(str, imports_from))
    runpy.run_path(str(path), run_name="__main__")
