"""The random numbers of training steps, and their state for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from lit_ort.runtime.random import SeedSource, draw_from

_TORCH = "torch"


class TrainingDraws:
    """Draws the seeds of dropout from a generator of its own, since dataloaders draw from torch's.

    Its state is the same in every process, and each rank uses a separate stream. All else that steps draw comes from
    torch's generator, as in eager. If anything does, a resumed run continues with the state of that generator as well
    (`resume_torchs_generator`), so that it draws what an uninterrupted one would have drawn.

    Args:
        rank: the rank that the random stream of this process depends on.
        resumed: the `state` of the run that is resumed, or None.
        is_inside_epoch: whether that run goes on inside of an epoch, whose order of data was drawn before.
    """

    def __init__(self, rank: int, resumed: Mapping[str, Any] | None, is_inside_epoch: bool) -> None:
        self._generator = torch.Generator()
        self._begin = torch.get_rng_state()
        self._source = SeedSource(self._generator, rank)
        # Whose generator has to be resumed once more.
        self._resumed: Mapping[str, Any] | None = None
        if resumed is None:
            # The seed is drawn from a copy of torch's state, so that the order of data is the same as in eager.
            twin = torch.Generator()
            twin.set_state(torch.get_rng_state())
            self._generator.manual_seed(int(torch.randint(2**62, (), generator=twin).item()))
            return
        self._generator.set_state(resumed["generator"])
        self._source.uses_torchs = _TORCH in resumed
        self._resumed = resumed if is_inside_epoch else None

    def step(self) -> AbstractContextManager[None]:
        """The context of a training step."""
        if self._resumed is not None:
            resume_torchs_generator(self._resumed)
            self._resumed = None
        return draw_from(self._source)

    def end(self) -> None:
        """Ends a run.

        Where neither its dropout nor its data has drawn from torch's generator, the next one would have the same masks.
        """
        if self._source.drops and torch.equal(self._begin, torch.get_rng_state()):
            torch.rand(())

    @property
    def state(self) -> dict[str, Any]:
        """The states of the generators, for a checkpoint."""
        state: dict[str, Any] = {"generator": self._generator.get_state()}
        if self._source.uses_torchs:
            state[_TORCH] = (torch.initial_seed(), torch.get_rng_state())
        return state


def resume_torchs_generator(state: Mapping[str, Any]) -> None:
    """Continues with a run's state of torch's generator, if its steps drew from it and the seed is the same.

    A run that is started with another seed is meant to draw other numbers.
    """
    seed, of_generator = state.get(_TORCH, (None, None))
    if seed == torch.initial_seed():
        torch.set_rng_state(of_generator)
