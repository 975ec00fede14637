"""What was made for the latest sizes of inputs."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

# A graph for any sizes can see a new one at nearly every step.
MOST_SIZES = 64


class Latest(dict[K, V]):
    """The latest entries: a new one takes the place of the oldest.

    Args:
        most: the number of entries.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        if key not in self:
            # Other threads can add and remove entries meanwhile.
            for oldest in list(self)[: max(0, len(self) - self._most + 1)]:
                self.pop(oldest, None)
        super().__setitem__(key, value)
