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

# Where the value of each symbol is read: the position of an input, and its dimension.
SymbolSources = Mapping[sympy.Expr, tuple[int, int]]

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


def symbol_sources(examples: Examples) -> SymbolSources:
    """The input and dimension whose size each symbol is."""
    sources: dict[sympy.Expr, tuple[int, int]] = {}
    for position, value in enumerate(examples.tensors):
        for dimension, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt) and expression_of(size).is_symbol:
                sources.setdefault(expression_of(size), (position, dimension))
    return sources


def conditions_of(examples: Examples) -> tuple[Any, ...]:
    """The conditions on sizes under which a graph is valid, from the guards that were added while it was traced.

    Raises:
        CaptureError: a guard can't be written as a term.
    """
    environment = examples.mode.shape_env
    sources = symbol_sources(examples)
    if environment is None:
        return ()
    conditions = [term_of(guard, sources) for guard in guards_of(environment)]
    conditions += [term for symbol in sources for term in _range(symbol, environment, sources)]
    for position, dimensions in examples.changing.items():
        for dimension in dimensions:
            # Tracing can replace a symbol by a number or by another symbol.
            size = examples.tensors[position].shape[dimension]
            source = sources.get(expression_of(size)) if isinstance(size, torch.SymInt) else None
            if source != (position, dimension):
                conditions.append(("equal", (SIZE, position, dimension), term_of(size, sources)))
    return tuple(dict.fromkeys(conditions))


def term_of(expression: Any, sources: SymbolSources) -> Any:
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
    if expression in sources:
        return (SIZE, *sources[expression])
    name = _TERMS.get(expression.func)
    if name is None or (name == "power" and not _is_whole(expression.args[1])):
        raise CaptureError(
            f"the graph is valid for some sizes only, but the condition {expression} can't be checked at run time",
            remedy="Each size is compiled separately.",
        )
    return (name, *(term_of(part, sources) for part in expression.args))


def terms_of(sizes: Sequence[Any], sources: SymbolSources) -> tuple[Any, ...]:
    """Convert the sizes of a shape to terms."""
    return tuple(term_of(size, sources) for size in sizes)


def _range(symbol: sympy.Expr, environment: Any, sources: SymbolSources) -> Iterator[Any]:
    smallest, largest = range_of(environment, symbol)
    yield ("at least", (SIZE, *sources[symbol]), smallest)
    if largest is not None:
        yield ("at most", (SIZE, *sources[symbol]), largest)


def _is_whole(exponent: Any) -> bool:
    return isinstance(exponent, sympy.Integer) and int(exponent) >= 0
