"""Dynamic sizes as plain data: formulas over the sizes of inputs, and the conditions under which a graph is valid.

A term is a number, `["size", input, dimension]`, or a list of an operation's name and its terms.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any

Shapes = Sequence[Sequence[int]]

SIZE = "size"
OPERATIONS: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {
        "add": lambda *terms: sum(terms),
        "multiply": lambda *terms: math.prod(terms),
        "power": operator.pow,
        "quotient": operator.floordiv,
        "true quotient": operator.truediv,
        "float": float,
        "truncated": math.trunc,
        "floor": math.floor,
        "ceiling": math.ceil,
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
)


def hold(conditions: Sequence[Any], shapes: Shapes) -> bool:
    """Whether inputs of these shapes satisfy every condition."""
    return all(value_of(condition, shapes) for condition in conditions)


def inputs_in(terms: Iterable[Any]) -> tuple[int, ...]:
    """The positions of the inputs whose sizes terms depend on."""
    found, stack = set[int](), list(terms)
    while stack:
        term = stack.pop()
        if not isinstance(term, (int, float)):
            name, *parts = term
            if name == SIZE:
                found.add(parts[0])
            else:
                stack.extend(parts)
    return tuple(sorted(found))


def value_of(term: Any, shapes: Shapes) -> Any:
    """Evaluate a term for inputs of these shapes."""
    if isinstance(term, (int, float)):
        return term
    name, *parts = term
    if name == SIZE:
        position, dimension = parts
        return shapes[position][dimension]
    return OPERATIONS[name](*map(functools.partial(value_of, shapes=shapes), parts))


def values_of(terms: Sequence[Any], shapes: Shapes) -> list[Any]:
    """Evaluate several terms, such as those of a shape."""
    return [term if isinstance(term, (int, float)) else value_of(term, shapes) for term in terms]
