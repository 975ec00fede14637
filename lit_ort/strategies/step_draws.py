"""What a module's training steps draw from torch's generator, by one rule for steps in eager and compiled ones.

Dropout draws from a seed. A step that also has other random operators draws all of its numbers from the seed, and one
without dropout draws from torch's generator, as in eager PyTorch. So the order of data doesn't depend on dropout, nor
on when a step is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lit_ort._compat.devices import generator_of
from lit_ort.runtime.random import SeededDropout, current_source, draw_seed, in_eager, note_dropout, seeded

_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# Whether a step of random operators has dropout too is looked at again after so many calls.
_UNSEEN = 64


class StepDraws:
    """What the training steps of a module have drawn so far.

    Args:
        module: the LightningModule.

    Attributes:
        has_dropout: whether they have dropout; None if that is not known.
        has_others: whether they have other random operators; None if that is not known.
    """

    def __init__(self, module: Any) -> None:
        self._module, self._calls = module, 0
        self.has_dropout: bool | None = None
        self.has_others: bool | None = None

    def _device(self) -> torch.device:
        return self._module.device

    @property
    def kinds(self) -> tuple[bool | None, bool | None]:
        """What is known, for a checkpoint."""
        return self.has_dropout, self.has_others

    def resume(self, has_dropout: bool | None = None, has_others: bool | None = None) -> None:
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
            # Only before anything is known, as the modules are many.
            if self.kinds == (None, None) and _has_dropout_layer(self._module):
                self.has_dropout = True
            is_seeded = self.has_dropout is True and self.has_others is not False
            if is_seeded:
                stack.enter_context(self._seeded())

            def allowed() -> bool:
                nonlocal is_seeded
                assert allows is not None
                is_allowed = allows()
                if not is_allowed and not is_seeded:
                    is_seeded = True
                    stack.enter_context(self.in_eager())
                return is_allowed

            yield None if allows is None else allowed
        source = current_source()
        if source is not None:
            if source.drops:
                self.has_dropout = True
            self.has_others = bool(self.has_others) or source.uses_torchs

    @contextmanager
    def _first(self) -> Iterator[None]:
        # An activation checkpoint keeps the state of the generator from before its first dropout.
        begins_seeded = _has_dropout_layer(self._module)
        with SeededDropout(draw_seed(), self._device(), begins_seeded) as dropout:
            yield
        self.has_dropout, self.has_others = dropout.found, bool(self.has_others) or dropout.found_others

    @contextmanager
    def _without_dropout(self) -> Iterator[None]:
        generator = generator_of(self._device())
        before = generator.get_state()
        with in_eager(self._device()):
            yield
        # Something else can be random now, such as dropout that begins after some epochs.
        self._calls += 1
        if not torch.equal(before, generator.get_state()) and (not self.has_others or self._calls % _UNSEEN == 0):
            self.has_dropout = None

    def _seeded(self) -> AbstractContextManager[None]:
        note_dropout()
        return seeded(draw_seed(), device=self._device())


def _has_dropout_layer(module: nn.Module) -> bool:
    """Whether a module has layers with dropout in training mode; functions of dropout are seen when they run."""
    return any(part.training and _drops(part) for part in module.modules())


def _drops(part: nn.Module) -> bool:
    if isinstance(part, _LAYERS):
        return part.p > 0
    return isinstance(part, nn.RNNBase | nn.MultiheadAttention) and part.dropout > 0
