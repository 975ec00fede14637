"""An order of steps in which each comes after those that it needs, kept up to date while steps are joined.

A step that joins another must not need it through a third one. Such a path only has steps between the two, so that few
are visited, however many there are. Source: Pearce and Kelly, "A dynamic topological sort algorithm for directed
acyclic graphs", ACM Journal of Experimental Algorithmics 11 (2006).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)


class StepOrder(Generic[S]):
    """The order of steps.

    Args:
        needs: the steps that a step needs.
    """

    def __init__(self, needs: Callable[[S], Iterable[S]]) -> None:
        self._needs = needs
        # None stands for a step that has become a part of an earlier one.
        self._steps: list[S | None] = []
        self._at: dict[S, int] = {}

    def append(self, step: S) -> None:
        """Add a step that no other needs yet."""
        self._at[step] = len(self._steps)
        self._steps.append(step)

    def later(self, step: S, needs: Iterable[S]) -> set[S] | None:
        """The later steps that a step has to come after if it gets these needs; None if one of them needs the step."""
        found: set[S] = set()
        left, first = list(needs), self._at[step]
        while left:
            need = left.pop()
            if need is step:
                return None
            if self._at[need] > first and need not in found:
                found.add(need)
                left.extend(self._needs(need))
        return found

    def move(self, steps: set[S], before: S) -> None:
        """Put what `later` found before the step."""
        if not steps:
            return
        start, end = self._at[before], max(map(self._at.__getitem__, steps)) + 1
        part = self._steps[start:end]
        self._steps[start:end] = sorted(part, key=lambda step: step not in steps)
        self._at.update((step, at) for at, step in enumerate(self._steps[start:end], start) if step is not None)

    def replace(self, first: S, second: S, joined: S) -> None:
        """Put one step in the place of two, that of the first one."""
        at = self._at[joined] = self._at.pop(first)
        self._steps[at] = joined
        self._steps[self._at.pop(second)] = None
