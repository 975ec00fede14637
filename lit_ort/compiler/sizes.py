"""Sizes that change from step to step: what a pass may know of them, and which of them a graph is right for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import sympy
import torch
from torch.export import ExportedProgram
from torch.utils._sympy import functions as symbolic
from torch.utils._sympy.numbers import int_oo

from lit_ort.compiler.conditions import SIZE
from lit_ort.errors import CaptureError

_EXAMPLES = "lit_ort.example_sizes"


class Size(int):
    """A size that changes: an example of it, equal only to sizes that are the same in every run."""

    expression: str

    def __new__(cls, example: int, expression: str) -> Size:
        size = super().__new__(cls, example)
        size.expression = expression
        return size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self.expression == other.expression

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.expression)


def remember_examples(graph: ir.Graph, examples: Mapping[str, int]) -> None:
    """Keeps an example of every changing size with a graph, by the name it has in shapes."""
    graph.meta[_EXAMPLES] = dict(examples)


def copy_examples(source: ir.Graph, target: ir.Graph) -> None:
    remember_examples(target, source.meta.get(_EXAMPLES, {}))


def sizes_of(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape of a value; those of its sizes that change are each a `Size`. None where a dimension is unknown.

    What a pass writes into a model as a number must not come from a `Size`: it is an example.
    """
    if value is None or value.shape is None:
        return None
    examples = value.graph.meta.get(_EXAMPLES, {}) if value.graph is not None else {}
    sizes = [_size(dimension, examples) for dimension in value.shape]
    return None if None in sizes else tuple(size for size in sizes if size is not None)


def changes(size: int) -> bool:
    return isinstance(size, Size)


def reshape_to(sizes: Sequence[int]) -> list[int]:
    """What a Reshape is told for sizes of which at most one changes."""
    return [-1 if changes(size) else size for size in sizes]


def _size(dimension: int | ir.SymbolicDim, examples: Mapping[str, int]) -> int | None:
    if isinstance(dimension, int):
        return dimension
    if dimension.value is None or not examples:
        return None
    example = dimension.evaluate(examples)
    return Size(example, dimension.value) if isinstance(example, int) else None


def product_of(sizes: Iterable[int | ir.SymbolicDim]) -> int | ir.SymbolicDim:
    """The number of elements of a shape, as one dimension."""
    product: int | ir.SymbolicDim = 1
    for size in sizes:
        product = size * product if isinstance(size, ir.SymbolicDim) else product * size
    return product


def shape_environment(program: ExportedProgram) -> Any:
    """What torch knows of a program's sizes; None where none changes."""
    sizes = (size for value in _inputs(program) for size in value.shape if isinstance(size, torch.SymInt))
    first = next(sizes, None)
    return None if first is None else first.node.shape_env


def example_sizes(program: ExportedProgram, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
    """The changing sizes of a program by name, in one call."""
    places = _places(program)
    return {str(symbol): tensors[position].shape[dimension] for symbol, (position, dimension) in places.items()}


def conditions_of(program: ExportedProgram) -> tuple[Any, ...]:
    """For which sizes a program is right: what was decided by their examples on its way, as terms of `conditions`.

    Raises:
        CaptureError: a decision that has no such term.
    """
    environment = shape_environment(program)
    if environment is None:
        return ()
    places = _places(program)
    found = [_term(environment.replace(guard.expr), places) for guard in environment.guards]
    found += [term for symbol in places for term in _range(symbol, environment, places)]
    for position, value in enumerate(_inputs(program)):
        for dimension, size in enumerate(value.shape):
            place = (position, dimension)
            expression = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
            if places.get(expression) != place and isinstance(size, torch.SymInt):
                found.append(("equal", (SIZE, *place), _term(expression, places)))
    return tuple(dict.fromkeys(found))


def _inputs(program: ExportedProgram) -> list[torch.Tensor]:
    names = list(program.graph_signature.user_inputs)
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    return [values[name] for name in names]


def _places(program: ExportedProgram) -> dict[sympy.Expr, tuple[int, int]]:
    """Where each symbol is a size of an input: position of the input, dimension."""
    places: dict[sympy.Expr, tuple[int, int]] = {}
    for position, value in enumerate(_inputs(program)):
        for dimension, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                places.setdefault(size.node.expr, (position, dimension))
    return places


def _range(symbol: sympy.Expr, environment: Any, places: Mapping[sympy.Expr, tuple[int, int]]) -> Iterator[Any]:
    allowed = environment.var_to_range[symbol]
    yield ("at least", (SIZE, *places[symbol]), int(allowed.lower))
    if allowed.upper is not int_oo:
        yield ("at most", (SIZE, *places[symbol]), int(allowed.upper))


_TERMS: dict[type, str] = {
    sympy.Add: "add",
    sympy.Mul: "multiply",
    sympy.Pow: "power",
    symbolic.FloorDiv: "quotient",
    symbolic.CleanDiv: "quotient",
    symbolic.Mod: "remainder",
    symbolic.PythonMod: "remainder",
    symbolic.Max: "largest",
    symbolic.Min: "smallest",
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


def _term(expression: sympy.Basic, places: Mapping[sympy.Expr, tuple[int, int]]) -> Any:
    if isinstance(expression, (sympy.Integer, int)):
        return int(expression)
    if expression in (sympy.true, sympy.false):
        return int(bool(expression))
    if expression in places:
        return (SIZE, *places[expression])  # type: ignore[index]
    name = _TERMS.get(expression.func)
    if name is None or (name == "power" and not _is_whole(expression.args[1])):
        raise CaptureError(
            f"the graph is right for some sizes only, and {expression} is no rule that can be looked at in a run",
            remedy="Each size is compiled by itself.",
        )
    return (name, *(_term(part, places) for part in expression.args))


def _is_whole(exponent: sympy.Basic) -> bool:
    return isinstance(exponent, sympy.Integer) and int(exponent) >= 0
