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

# Far from multiples of each other, whatever the ranks.
_BETWEEN_STREAMS = 0x9E3779B97F4A7C15

# The generator, None for torch's default one, and the stream.
_source: ContextVar[tuple[torch.Generator | None, int]] = ContextVar("lit_ort_source", default=(None, 0))


def seed_from_torch() -> None:
    """Seeds ONNX Runtime for one run from the generator in use, torch's default one unless `draw_from` is active."""
    C.set_seed(draw_seed())


def draw_seed(below: int = _SEEDS) -> int:
    """A seed from the generator in use, of its stream."""
    generator, stream = _source.get()
    return (int(torch.randint(below, (), generator=generator).item()) + stream * _BETWEEN_STREAMS) % below


@contextmanager
def draw_from(generator: torch.Generator, stream: int = 0) -> Iterator[None]:
    """Lets the sessions run inside draw their seeds from `generator`, whatever else draws from torch's default one.

    Streams of one generator differ: ranks that have the same generator, and save it as one, each take their own.
    """
    token = _source.set((generator, stream))
    try:
        yield
    finally:
        _source.reset(token)
