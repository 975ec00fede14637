"""For which sizes of its inputs a graph with changing sizes is right, as plain data that a cache entry can hold.

A term is a whole number, `["size", input, dimension]`, or the name of an operation and its terms.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

Shapes = Sequence[Sequence[int]]

SIZE = "size"
OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda *terms: sum(terms),
    "multiply": lambda *terms: math.prod(terms),
    "power": operator.pow,
    "quotient": operator.floordiv,
    "remainder": operator.mod,
    "largest": max,
    "smallest": min,
    "equal": operator.eq,
    "unequal": operator.ne,
    "below": operator.lt,
    "at most": operator.le,
    "above": operator.gt,
    "at least": operator.ge,
    "all": lambda *terms: all(terms),
    "any": lambda *terms: any(terms),
    "not": operator.not_,
}


def hold(conditions: Sequence[Any], shapes: Shapes) -> bool:
    """Whether inputs of these shapes meet every condition."""
    return all(_value(condition, shapes) for condition in conditions)


def _value(term: Any, shapes: Shapes) -> Any:
    if isinstance(term, int):
        return term
    name, *parts = term
    if name == SIZE:
        position, dimension = parts
        return shapes[position][dimension]
    return OPERATIONS[name](*map(functools.partial(_value, shapes=shapes), parts))
