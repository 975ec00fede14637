"""Randomness of sessions, drawn from torch's generators.

ONNX Runtime has one seed for the process, and setting it restarts every stream. So each run of a graph that draws
random numbers first sets it to a number drawn from a torch generator: `seed_everything` makes runs reproducible, every
step differs, and the generator's state is all there is to save and restore.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from lit_ort.runtime.engine import C

RANDOM_OPERATORS = frozenset(
    {"Dropout", "BitmaskDropout", "BiasDropout", "BitmaskBiasDropout", "Bernoulli", "Multinomial"}
    | {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
_SEEDS = 2**31 - 1

_generator: ContextVar[torch.Generator | None] = ContextVar("lit_ort_generator", default=None)


def current_generator() -> torch.Generator | None:
    """The generator in use; None is torch's default one."""
    return _generator.get()


def seed_from_torch() -> None:
    """Seeds ONNX Runtime for one run from the generator in use, torch's default one unless `draw_from` is active."""
    C.set_seed(draw_seed())


def draw_seed() -> int:
    """A seed from the generator in use."""
    return int(torch.randint(_SEEDS, (), generator=_generator.get()).item())


@contextmanager
def draw_from(generator: torch.Generator) -> Iterator[None]:
    """Lets the sessions run inside draw their seeds from `generator`, whatever else draws from torch's default one."""
    token = _generator.set(generator)
    try:
        yield
    finally:
        _generator.reset(token)
