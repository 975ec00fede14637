"""What a module's training steps draw from torch's generator, by one rule for steps in eager and compiled ones.

Dropout draws from a seed. A step that also has other random operators draws all of its numbers from the seed, and one
without dropout draws from torch's generator, as in eager PyTorch. So the order of data doesn't depend on dropout, nor
on when a step is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from lit_ort._compat.devices import generator_of
from lit_ort.runtime.random import SeededDropout, current_source, draw_seed, in_eager, note_dropout, seeded


class StepDraws:
    """What the training steps of a module have drawn so far.

    Args:
        device: returns the device of the module.

    Attributes:
        has_dropout: whether they have dropout; None if that is not known.
        has_others: whether they have other random operators.
    """

    def __init__(self, device: Callable[[], torch.device]) -> None:
        self._device = device
        self.has_dropout: bool | None = None
        self.has_others = False

    @property
    def kinds(self) -> tuple[bool | None, bool]:
        """What is known, for a checkpoint."""
        return self.has_dropout, self.has_others

    def resume(self, has_dropout: bool | None = None, has_others: bool = False) -> None:
        """Takes over what was known at a checkpoint."""
        self.has_dropout, self.has_others = has_dropout, has_others

    def in_eager(self) -> AbstractContextManager[None]:
        """The context of a step in eager."""
        if self.has_dropout is None:
            return self._first()
        return self._seeded() if self.has_dropout else self._without_dropout()

    @contextmanager
    def compiled(self, allows: Callable[[], bool] | None) -> Iterator[Callable[[], bool] | None]:
        """The context of a compiled step.

        Args:
            allows: whether a function is compiled, or None. If one is not, the rest of the step draws as in eager.

        Yields:
            The same, to be called in its place.
        """
        with ExitStack() as stack:
            is_seeded = bool(self.has_dropout and self.has_others)
            if is_seeded:
                stack.enter_context(self._seeded())

            def allowed() -> bool:
                nonlocal is_seeded
                assert allows is not None
                is_allowed = allows()
                if not is_allowed and not is_seeded:
                    is_seeded = True
                    stack.enter_context(self._declined())
                return is_allowed

            yield None if allows is None else allowed
        source = current_source()
        if source is not None:
            self.has_dropout = self.has_dropout or (source.drops or None)
            self.has_others = self.has_others or source.uses_torchs

    @contextmanager
    def _first(self) -> Iterator[None]:
        with SeededDropout(draw_seed(), self._device()) as dropout:
            yield
        self.has_dropout, self.has_others = dropout.found, self.has_others or dropout.found_others

    @contextmanager
    def _without_dropout(self) -> Iterator[None]:
        generator = generator_of(self._device())
        before = generator.get_state()
        with in_eager(self._device()):
            yield
        if not self.has_others and not torch.equal(before, generator.get_state()):
            # Something else is random now, such as dropout that begins after some epochs.
            self.has_dropout = None

    def _seeded(self) -> AbstractContextManager[None]:
        note_dropout()
        return seeded(draw_seed(), device=self._device())

    def _declined(self) -> AbstractContextManager[None]:
        if self.has_dropout:
            return self._seeded()
        return nullcontext() if self.has_dropout is None else self._without_dropout()
