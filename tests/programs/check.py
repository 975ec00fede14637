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

from lit_ort.backend.steps import dynamo_settings
from tests.compare import backend
from tests.programs.program import Program, program
from tests.steps.case import Values, assert_alike, values_of

RIGHT, FALLBACK, REFUSED = "right", "right, partly in eager", "refused by eager"


def check(given: Program) -> str:
    """What came of a program.

    Raises:
        AssertionError: another value than eager's, or an error that eager does not raise.
    """
    case, twin = given.case(), given.case()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = values_of(twin.module, twin.module, twin)
        # Such as a backward whose values were changed in place.
        except Exception:
            return REFUSED
        torch._dynamo.reset()
        engine = backend(fallback="warn")
        compiled = torch.compile(case.module, backend=engine)
        try:
            with dynamo_settings("step", strict=False):
                found = values_of(compiled, case.module, case)
        except Exception as error:
            raise AssertionError(
                f"raises, and eager does not:\n{given.source}{traceback.format_exc()[-3000:]}"
            ) from error
    assert_alike(found, _filled(expected, found))
    return FALLBACK if any(graph.fallback for graph in engine.compile_log.graphs) else RIGHT


def _filled(expected: list[Values], found: list[Values]) -> list[Values]:
    """Zeros where eager gives no gradient and the graph gives zeros, as under every backend with AOTAutograd."""
    filled = copy.copy(expected)
    for k, (own, other) in enumerate(zip(expected, found, strict=True)):
        missing = [name for name in own if name.startswith("gradient") and own[name] is None]
        zeros: dict[str, Any] = {name: torch.zeros_like(other[name]) for name in missing if other[name] is not None}
        filled[k] = {**own, **zeros}
    return filled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; each has its own")
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    for seed in range(given.seed, given.seed + given.count):
        drawn = program(random.Random(seed))
        try:
            outcome = check(drawn)
        except AssertionError as error:
            outcome = "wrong"
            print(f"seed {seed}\n{drawn.source}{drawn.rows} {str(error)[-2500:]}\n", flush=True)
        counts[outcome] += 1
    print(", ".join(f"{outcome}: {count}" for outcome, count in counts.most_common()))


if __name__ == "__main__":
    main()
