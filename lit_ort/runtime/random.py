"""Random numbers of runs: each run draws one seed from torch's generator, and all its random numbers depend on it.

So `seed_everything` makes training reproducible, every step draws different numbers, a repeated forward draws the same
numbers again, and the generator's state is the only state to save and restore.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from lit_ort._compat.devices import CPU, generator_of

# The number of seeds.
SEEDS = 2**63 - 1
# With this seed lit_ort's operators apply no dropout, for comparison with eager.
DROPOUT_OFF = -1

# The distance between the seeds of two streams: large and odd, so that streams and ranks don't share seeds.
_BETWEEN_STREAMS = 0x9E3779B97F4A7C15

# The generator (None for torch's default one) and the stream.
_source: ContextVar[tuple[torch.Generator | None, int]] = ContextVar("lit_ort_source", default=(None, 0))
_dropout: ContextVar[bool] = ContextVar("lit_ort_dropout", default=True)


def draw_seed() -> int:
    """Draw a seed from the current generator and stream; returns `DROPOUT_OFF` inside `without_dropout`."""
    generator, stream = _source.get()
    seed = int(torch.randint(SEEDS, (), generator=generator).item())
    return (seed + stream * _BETWEEN_STREAMS) % SEEDS if _dropout.get() else DROPOUT_OFF


@contextmanager
def draw_from(generator: torch.Generator, stream: int = 0) -> Iterator[None]:
    """Make the runs inside this context draw their seeds from `generator` instead of torch's default one.

    Different streams of one generator yield different seeds, so that ranks with equal generators, which are saved as
    one, can each use a separate stream.
    """
    token = _source.set((generator, stream))
    try:
        yield
    finally:
        _source.reset(token)


@contextmanager
def without_dropout() -> Iterator[None]:
    """Disable dropout in the runs inside this context."""
    token = _dropout.set(False)
    try:
        yield
    finally:
        _dropout.reset(token)


@contextmanager
def seeded(seed: int, stream: int, device: torch.device = CPU) -> Iterator[None]:
    """Seed the device's default generator with a stream of a run's seed, and restore its state afterwards.

    Only this device's generator is seeded: `torch.manual_seed` would also queue a call, with its stack trace, for every
    device that is not initialized yet.
    """
    generator = generator_of(device)
    state = generator.get_state()
    generator.manual_seed((seed + (stream + 1) * _BETWEEN_STREAMS) % SEEDS)
    try:
        yield
    finally:
        generator.set_state(state)
