"""Measures a step of your own in eager, inductor and ONNX Runtime.

python -m lit_ort.benchmark my_package.my_module:make --rounds 20

`make` takes no arguments and returns a module and a batch, as `lit_ort.benchmark` takes them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lit_ort.benchmark.result import BASELINES
from lit_ort.benchmark.run import benchmark
from lit_ort.errors import OptionsError
from lit_ort.options import BF16_MIXED, FLOAT32, ORTOptions


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lit_ort.benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("make", help="package.module:function, of what returns a module and a batch")
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each baseline")
    parser.add_argument("--baselines", nargs="+", default=list(BASELINES), choices=BASELINES)
    parser.add_argument("--precision", default=FLOAT32, choices=(FLOAT32, BF16_MIXED))
    parser.add_argument("--clip", type=float, help="the largest norm of the gradients")
    parser.add_argument("--json", type=Path, help="a file for everything that was measured")
    given = parser.parse_args(arguments)
    try:
        module, batch = found(given.make)()
        options = ORTOptions(precision=given.precision)
        result = benchmark(
            module, batch, rounds=given.rounds, baselines=given.baselines, options=options, clip=given.clip
        )
    except OptionsError as error:
        parser.error(str(error))
    print(result)
    if given.json is not None:
        given.json.write_text(json.dumps(result.as_dict()) + "\n")


def found(name: str) -> Callable[[], tuple[Any, Any]]:
    """A function by `package.module:function`, the current folder's modules among them.

    Raises:
        OptionsError: there is none of that name.
    """
    module, _, function = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionsError(
            f"{name} names no function: {error}. Write package.module:function, as in my_project.model:make."
        ) from error


if __name__ == "__main__":
    main()
