"""Compares generated programs with eager.

python -m tests.programs.check --count 1000 --seed 0
"""

from __future__ import annotations

import argparse
import copy
import random
import traceback
import warnings
from collections import Counter
from typing import Any

import torch

from lit_ort.backend.tracing_settings import dynamo_settings
from tests.compare import backend
from tests.programs.program import Program, draw_program
from tests.steps.case import Values, assert_alike, values_of

CORRECT, FALLBACK, REJECTED = "correct", "correct, partly in eager", "rejected by eager"


def check(program: Program) -> str:
    """Runs a program in eager and compiled, and returns the outcome.

    Raises:
        AssertionError: a value differs from eager's, or the compiled program raises an error and eager doesn't.
    """
    case, twin = program.case(), program.case()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = values_of(twin.module, twin.module, twin)
        # For example, the backward needs a value that was changed in place.
        except Exception:
            return REJECTED
        torch._dynamo.reset()
        engine = backend(fallback="warn")
        compiled = torch.compile(case.module, backend=engine)
        try:
            with dynamo_settings("step", strict=False):
                actual = values_of(compiled, case.module, case)
        except Exception as error:
            raise AssertionError(
                f"raises an error, but eager does not:\n{program.source}{traceback.format_exc()[-3000:]}"
            ) from error
    assert_alike(actual, _with_zeros(expected, actual))
    return FALLBACK if any(graph.fallback for graph in engine.compile_log.graphs) else CORRECT


def _with_zeros(expected: list[Values], actual: list[Values]) -> list[Values]:
    """Replaces gradients that are None in eager by zeros, as every backend with AOTAutograd returns them."""
    result = copy.copy(expected)
    for k, (values, other) in enumerate(zip(expected, actual, strict=True)):
        missing = [name for name in values if name.startswith("gradient") and values[name] is None]
        zeros: dict[str, Any] = {name: torch.zeros_like(other[name]) for name in missing if other[name] is not None}
        result[k] = {**values, **zeros}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="the number of programs")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first program")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        program = draw_program(random.Random(seed))
        try:
            outcome = check(program)
        except AssertionError as error:
            outcome = "wrong"
            print(f"seed {seed}\n{program.source}{program.rows} {str(error)[-2500:]}\n", flush=True)
        counts[outcome] += 1
    print(", ".join(f"{outcome}: {count}" for outcome, count in counts.most_common()))


if __name__ == "__main__":
    main()
