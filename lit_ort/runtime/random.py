"""Random numbers of runs: operators draw from torch's generator as in eager, but dropout's draws depend on a seed.

So `seed_everything` makes training reproducible, every step draws different numbers, and a repeated forward draws the
same numbers again. The seed comes from torch's generator, or from one that the caller names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from lit_ort._compat.devices import CPU, generator_of
from lit_ort._compat.torch import TorchDispatchMode
from lit_ort._compat.torch_ops import OpOverload
from lit_ort.regions.counter_random import DROPOUT_OFF

# The number of seeds.
SEEDS = 2**63 - 1
# torch's operators of dropout, and what they compute without dropout: they keep every value. Their draws are the
# probability by which the kept values are divided.
WITHOUT_DROPOUT: Mapping[object, Callable[..., Any]] = {
    torch.ops.aten.bernoulli_.float: lambda x, p=0.5, **_: x.fill_(p),
    torch.ops.aten.bernoulli.p: lambda x, p, **_: torch.full_like(x, p),
    torch.ops.aten.native_dropout.default: lambda x, *_: (x.clone(), torch.ones_like(x, dtype=torch.bool)),
}

# The distance between the seeds of two streams: large and odd, so that streams and ranks don't share seeds.
_BETWEEN_STREAMS = 0x9E3779B97F4A7C15


@dataclasses.dataclass
class SeedSource:
    """Where runs draw their seeds.

    Different streams of one generator yield different seeds, so that ranks with equal generators, which are saved as
    one, can each use a separate stream.

    Args:
        generator: torch's default one if it is None.
        stream: the stream of the seeds.
        uses_torchs: whether an operator has drawn from torch's default generator since.
        drops: whether dropout has drawn from a seed.
    """

    generator: torch.Generator | None = None
    stream: int = 0
    uses_torchs: bool = False
    drops: bool = False


_source: ContextVar[SeedSource | None] = ContextVar("lit_ort_source", default=None)
_dropout: ContextVar[bool] = ContextVar("lit_ort_dropout", default=True)
_latest: ContextVar[RandomNumbers | None] = ContextVar("lit_ort_latest_numbers", default=None)


def draw_seed() -> int:
    """Draw a seed from the current generator and stream; returns `DROPOUT_OFF` inside `without_dropout`."""
    source = _source.get() or SeedSource()
    seed = int(torch.randint(SEEDS, (), generator=source.generator).item())
    return (seed + source.stream * _BETWEEN_STREAMS) % SEEDS if _dropout.get() else DROPOUT_OFF


def current_source() -> SeedSource | None:
    """Where runs draw their seeds; None if that is torch's default generator."""
    return _source.get()


def note_draw() -> None:
    """Notes that an operator of a step draws from torch's default generator."""
    source = _source.get()
    if source is not None:
        source.uses_torchs = True


def note_dropout() -> None:
    """Notes that dropout of a step draws from a seed."""
    source = _source.get()
    if source is not None:
        source.drops = True


@contextmanager
def draw_from(source: SeedSource) -> Iterator[None]:
    """Make the runs inside this context draw their seeds from `source` instead of torch's default generator."""
    token = _source.set(source)
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
def seeded(seed: int, stream: int = 0, device: torch.device = CPU) -> Iterator[None]:
    """Seed the device's default generator with a stream of a seed, and restore its state afterwards.

    Only this generator is seeded: `torch.manual_seed` would also queue a call, with its stack trace, for every device
    that is not initialized yet.
    """
    generator = generator_of(device)
    with _in_state(generator):
        generator.manual_seed((seed + (stream + 1) * _BETWEEN_STREAMS) % SEEDS)
        yield


class SeededDropout(TorchDispatchMode):
    """Lets eager's dropout draw from a seed, as in a session: from the first dropout on, `seeded` holds.

    Compiled functions and higher-order operators of the step run as without it.

    Args:
        seed: of the dropout.
        device: of the module.
        begins_seeded: whether all draws are seeded.

    Attributes:
        found: whether there was a dropout.
        found_others: whether there were other random operators.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: int, device: torch.device, begins_seeded: bool = False) -> None:
        super().__init__()
        self.found = self.found_others = False
        self._seed, self._device, self._stack = seed, device, ExitStack()
        self._begins_seeded = begins_seeded

    def __enter__(self) -> SeededDropout:
        super().__enter__()
        if self._begins_seeded:
            self._begin()
        return self

    def _begin(self) -> None:
        self.found = True
        note_dropout()
        self._stack.enter_context(seeded(self._seed, device=self._device))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in WITHOUT_DROPOUT:
            if not self.found:
                self._begin()
        # Higher-order operators have no tags.
        elif torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.found_others = True
            if not self.found:
                note_draw()
        return func(*args, **(kwargs or {}))

    def __exit__(self, exc_type, exc_val, exc_tb):
        self._stack.close()
        super().__exit__(exc_type, exc_val, exc_tb)


class RandomNumbers:
    """The random numbers of one run, which its backward and a repeated forward draw again.

    Args:
        seeded: whether dropout draws, from a seed.
    """

    __slots__ = ("_drops", "_states", "seed")

    def __init__(self, seeded: bool = False) -> None:
        _latest.set(self)
        self.seed = draw_seed() if seeded else 0
        if seeded:
            note_dropout()
        self._drops = _dropout.get()
        # The generator and its state when an operator drew first, by the operator's stream, in the order of the draws.
        self._states: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def draw(self, target: OpOverload, stream: int, device: torch.device, /, *args: Any, **kwargs: Any) -> Any:
        """Calls an operator that draws from the device's default generator, or from the seed if it is a dropout.

        A stream that has drawn before draws the same numbers again and leaves the generator as it is.
        """
        if target in WITHOUT_DROPOUT:
            if not self._drops:
                return WITHOUT_DROPOUT[target](*args, **kwargs)
            with seeded(self.seed, stream, device):
                return target(*args, **kwargs)
        if stream in self._states:
            with _in_state(*self._states[stream]):
                return target(*args, **kwargs)
        note_draw()
        self.begin(stream, device)
        return target(*args, **kwargs)

    def begin(self, stream: int, device: torch.device) -> torch.Generator:
        """Keeps the state of the device's default generator as that from which a stream draws."""
        generator = generator_of(device)
        self._states[stream] = generator, generator.get_state()
        return generator

    @contextmanager
    def again(self) -> Iterator[None]:
        """Lets torch draw what the run drew, from its beginning; afterwards the generators are as they were."""
        with ExitStack() as stack:
            for generator, state in self.first_states.items():
                stack.enter_context(_in_state(generator, state))
            yield

    @property
    def first_states(self) -> dict[torch.Generator, torch.Tensor]:
        """The states of generators before the run drew from them."""
        firsts: dict[torch.Generator, torch.Tensor] = {}
        for generator, state in self._states.values():
            firsts.setdefault(generator, state)
        return firsts


@contextmanager
def in_eager(device: torch.device) -> Iterator[None]:
    """A context in which operators draw from the device's generator without a run that notes it."""
    numbers = RandomNumbers()
    generator = numbers.begin(0, device)
    yield
    if not torch.equal(generator.get_state(), numbers.first_states[generator]):
        note_draw()


def rewind() -> None:
    """Sets generators to their states before the latest run, if it drew from them: its results are not used."""
    numbers = _latest.get()
    if numbers is not None:
        for generator, state in numbers.first_states.items():
            generator.set_state(state)


@contextmanager
def _in_state(generator: torch.Generator, state: torch.Tensor | None = None) -> Iterator[None]:
    """Sets a state, if one is given, and restores the former one afterwards."""
    before = generator.get_state()
    if state is not None:
        generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)
