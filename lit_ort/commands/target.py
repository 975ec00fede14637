"""A module and a batch of the user's, by the name of a function that makes them."""

from __future__ import annotations

import importlib
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from torch import nn

from lit_ort.errors import OptionsError


def add_target(parser: ArgumentParser) -> None:
    """Adds the argument that `made` takes."""
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="takes no arguments and returns a module and a batch")


def made(name: str) -> tuple[nn.Module, Any]:
    """What a function returns, by `package.module:function`, the current folder's modules among them.

    Raises:
        OptionsError: there is none of that name, or it returns something else than a module and a batch.
    """
    module, _, function = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionsError(
            f"{name} names no function: {error}. Write package.module:function, as in my_project.model:make."
        ) from error
    result = make()
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module)):
        raise OptionsError(f"{name}() returned a {type(result).__name__}. Return a tuple of a module and its batch.")
    return result
