"""Randomness of runs: each draws one seed from torch's generators, and everything random in it is a function of that.

`seed_everything` makes runs reproducible, every step differs, a repeated forward draws the same numbers again, and the
generator's state is all there is to save and restore.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from lit_ort._compat.devices import CPU, generator_of

# How many there are.
SEEDS = 2**63 - 1
# With this seed the project's own operators drop nothing, for comparison with eager.
DROPOUT_OFF = -1

# Far from multiples of each other, whatever the ranks and streams.
_BETWEEN_STREAMS = 0x9E3779B97F4A7C15

# The generator, None for torch's default one, and the stream.
_source: ContextVar[tuple[torch.Generator | None, int]] = ContextVar("lit_ort_source", default=(None, 0))
_dropout: ContextVar[bool] = ContextVar("lit_ort_dropout", default=True)


def draw_seed() -> int:
    """A seed from the generator in use, of its stream; `DROPOUT_OFF` inside `without_dropout`."""
    generator, stream = _source.get()
    seed = int(torch.randint(SEEDS, (), generator=generator).item())
    return (seed + stream * _BETWEEN_STREAMS) % SEEDS if _dropout.get() else DROPOUT_OFF


@contextmanager
def draw_from(generator: torch.Generator, stream: int = 0) -> Iterator[None]:
    """Lets the runs inside draw their seeds from `generator`, whatever else draws from torch's default one.

    Streams of one generator differ: ranks that have the same generator, and save it as one, each take their own.
    """
    token = _source.set((generator, stream))
    try:
        yield
    finally:
        _source.reset(token)


@contextmanager
def without_dropout() -> Iterator[None]:
    """Lets dropout in the runs inside keep everything."""
    token = _dropout.set(False)
    try:
        yield
    finally:
        _dropout.reset(token)


@contextmanager
def seeded(seed: int, stream: int, device: torch.device = CPU) -> Iterator[None]:
    """Lets torch's operators draw from a stream of a run's seed, and leaves torch's own generator where it was.

    Only one device's generator: `torch.manual_seed` also queues a call, with its stack, for each device that may come.
    """
    generator = generator_of(device)
    state = generator.get_state()
    generator.manual_seed((seed + (stream + 1) * _BETWEEN_STREAMS) % SEEDS)
    try:
        yield
    finally:
        generator.set_state(state)
