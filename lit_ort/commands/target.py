"""The user's module and batch, from a function that is named on the command line."""

from __future__ import annotations

import importlib
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from lit_ort.errors import LitOrtError, OptionsError


def parser_for(command: str, description: str | None) -> ArgumentParser:
    """A parser of a command's arguments, of which the first one is the function's name, `target`.

    Args:
        command: the name of the command, such as "explain".
        description: shown by `--help` as it is.
    """
    parser = ArgumentParser(
        prog=f"lit-ort {command}", description=description, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="has no arguments and returns a module and a batch")
    return parser


@contextmanager
def one_line_errors(parser: ArgumentParser) -> Iterator[None]:
    """Ends the process with an error of lit_ort's as a single line, without the usage."""
    try:
        yield
    except LitOrtError as error:
        parser.exit(2, f"error: {error}\n")


def module_and_batch(name: str) -> tuple[nn.Module, Any]:
    """Calls a function `package.module:function`, which can be in a module of the current folder.

    Raises:
        OptionsError: there is no such function, or it doesn't return a module and a batch.
    """
    module, _, function = name.partition(":")
    if not (module and function):
        raise OptionsError(f"{name} has no ':FUNCTION'. Write package.module:function, as in my_project.model:make.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        make = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise OptionsError(f"{module} can't be imported: {error}. Check its name and the current folder.") from error
    if make is None:
        raise OptionsError(f"{module} has no function {function}. Check its name.")
    result = make()
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module)):
        raise OptionsError(f"{name}() returned a {type(result).__name__}. Return a tuple of a module and its batch.")
    return result
