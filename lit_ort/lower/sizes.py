"""Converts symbolic sizes to plain terms, and guards on sizes to conditions under which a graph is valid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch

from lit_ort._compat.torch_sizes import FUNCTIONS, expression_of, guards_of, range_of
from lit_ort.capture.examples import Examples
from lit_ort.errors import CaptureError
from lit_ort.runtime.sizes import SIZE

# For each symbol, the position of an input and the dimension that has this size.
Places = Mapping[sympy.Expr, tuple[int, int]]

_TERMS: dict[Any, str] = {
    sympy.Add: "add",
    sympy.Mul: "multiply",
    sympy.Pow: "power",
    **FUNCTIONS,
    sympy.Eq: "equal",
    sympy.Ne: "unequal",
    sympy.Lt: "below",
    sympy.Le: "at most",
    sympy.Gt: "above",
    sympy.Ge: "at least",
    sympy.And: "all",
    sympy.Or: "any",
    sympy.Not: "not",
}


def places_of(examples: Examples) -> Places:
    """The input and dimension whose size each symbol is."""
    places: dict[sympy.Expr, tuple[int, int]] = {}
    for position, value in enumerate(examples.tensors):
        for dimension, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt) and expression_of(size).is_symbol:
                places.setdefault(expression_of(size), (position, dimension))
    return places


def conditions_of(examples: Examples) -> tuple[Any, ...]:
    """The conditions on sizes under which a graph is valid, from the guards that were added while it was traced.

    Raises:
        CaptureError: a guard can't be written as a term.
    """
    environment = examples.mode.shape_env
    places = places_of(examples)
    if environment is None:
        return ()
    conditions = [term_of(guard, places) for guard in guards_of(environment)]
    conditions += [term for symbol in places for term in _range(symbol, environment, places)]
    for position, dimensions in examples.changing.items():
        for dimension in dimensions:
            # Tracing can replace a symbol by a number or by another symbol.
            size = examples.tensors[position].shape[dimension]
            place = places.get(expression_of(size)) if isinstance(size, torch.SymInt) else None
            if place != (position, dimension):
                conditions.append(("equal", (SIZE, position, dimension), term_of(size, places)))
    return tuple(dict.fromkeys(conditions))


def term_of(expression: Any, places: Places) -> Any:
    """Convert an expression of sizes to a term.

    Raises:
        CaptureError: the expression can't be written as a term.
    """
    if isinstance(expression, (torch.SymInt, torch.SymFloat)):
        expression = expression_of(expression)
    if isinstance(expression, (sympy.Integer, int)):
        return int(expression)
    if isinstance(expression, (sympy.Float, float)):
        return float(expression)
    if expression in (sympy.true, sympy.false):
        return int(bool(expression))
    if expression in places:
        return (SIZE, *places[expression])
    name = _TERMS.get(expression.func)
    if name is None or (name == "power" and not _is_whole(expression.args[1])):
        raise CaptureError(
            f"the graph is valid for some sizes only, but the condition {expression} can't be checked at run time",
            remedy="Each size is compiled separately.",
        )
    return (name, *(term_of(part, places) for part in expression.args))


def terms_of(sizes: Sequence[Any], places: Places) -> tuple[Any, ...]:
    """Convert the sizes of a shape to terms."""
    return tuple(term_of(size, places) for size in sizes)


def _range(symbol: sympy.Expr, environment: Any, places: Places) -> Iterator[Any]:
    smallest, largest = range_of(environment, symbol)
    yield ("at least", (SIZE, *places[symbol]), smallest)
    if largest is not None:
        yield ("at most", (SIZE, *places[symbol]), largest)


def _is_whole(exponent: Any) -> bool:
    return isinstance(exponent, sympy.Integer) and int(exponent) >= 0
