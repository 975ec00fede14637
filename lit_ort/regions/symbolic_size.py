"""Sizes that are known only when a region runs: polynomials of the symbols of a trace.

Equality and divisibility hold for all values of the symbols, so what is decided by them is right for every size. Order
is that of the sizes of the trace: it may decide what is faster, and the order of sizes that divide each other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

import sympy
import torch

from lit_ort._compat.torch_sizes import expression_of, hint_of, symbolic_size

# The symbols of a product with their powers, in the order of their names.
_Monomial = tuple[tuple[sympy.Expr, int], ...]


@dataclass(frozen=True)
class Size:
    """A polynomial that isn't a number.

    Args:
        terms: its monomials and their coefficients, none of which is 0.
        hint: its value in the trace.
        origin: a size of the trace, whose symbols these are.
    """

    terms: frozenset[tuple[_Monomial, int]]
    hint: int = field(compare=False)
    origin: torch.SymInt = field(compare=False, repr=False)

    def __add__(self, other: Number) -> Number:
        terms = dict(self.terms)
        for monomial, factor in _terms_of(other).items():
            terms[monomial] = terms.get(monomial, 0) + factor
        return self._made(terms, self.hint + value_of(other))

    def __mul__(self, other: Number) -> Number:
        terms: dict[_Monomial, int] = {}
        for left, factor in self.terms:
            for right, other_factor in _terms_of(other).items():
                product = _multiplied(left, right)
                terms[product] = terms.get(product, 0) + factor * other_factor
        return self._made(terms, self.hint * value_of(other))

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Number:
        return self * -1

    def __sub__(self, other: Number) -> Number:
        return self + other * -1

    def __rsub__(self, other: Number) -> Number:
        return -self + other

    def __lt__(self, other: Number) -> bool:
        return self.hint < value_of(other)

    def __le__(self, other: Number) -> bool:
        return self.hint <= value_of(other)

    def __gt__(self, other: Number) -> bool:
        return self.hint > value_of(other)

    def __ge__(self, other: Number) -> bool:
        return self.hint >= value_of(other)

    def __str__(self) -> str:
        return str(self.expression)

    @property
    def expression(self) -> sympy.Expr:
        products = (factor * math.prod(atom**power for atom, power in monomial) for monomial, factor in self.terms)
        return sympy.sympify(sum(products))

    @property
    def traced(self) -> torch.SymInt:
        """The size as torch's symbolic number."""
        return symbolic_size(self.origin, self.expression, self.hint)

    def _made(self, terms: Mapping[_Monomial, int], hint: int) -> Number:
        kept = {monomial: factor for monomial, factor in terms.items() if factor}
        if set(kept) <= {()}:
            return kept.get((), 0)
        return Size(frozenset(kept.items()), hint, self.origin)


Number = int | Size


def number_of(size: int | torch.SymInt) -> Number:
    """A size of a trace as a number, or as a polynomial."""
    if not isinstance(size, torch.SymInt):
        return size
    terms = _terms_of_expression(expression_of(size))
    if set(terms) <= {()}:
        return terms.get((), 0)
    return Size(frozenset(terms.items()), hint_of(size), size)


def numbers_of(sizes: Iterable[int | torch.SymInt]) -> tuple[Number, ...]:
    return tuple(number_of(size) for size in sizes)


def shape_numbers(shape: Iterable[int | torch.SymInt]) -> tuple[Number, ...]:
    """The sizes of a value in a trace.

    Sizes of 0 and 1 are numbers, and guards are added for them: sizes that divide each other are in the order of their
    hints, which none of 1 would have.
    """
    return tuple(number_of(size) if value_of(number_of(size)) > 1 else int(size) for size in shape)


def traced(number: Number) -> int | torch.SymInt:
    """A number as torch has it in traces."""
    return number.traced if isinstance(number, Size) else number


def value_of(number: Number) -> int:
    """The value in the trace."""
    return number.hint if isinstance(number, Size) else number


def product(numbers: Iterable[Number]) -> Number:
    result: Number = 1
    for number in numbers:
        result = result * number
    return result


def divides(divisor: Number, number: Number) -> bool:
    """Whether a number is a multiple of another one, whatever the values of symbols."""
    return _quotient(number, divisor) is not None


def quotient(number: Number, divisor: Number) -> Number:
    """The quotient of a number that the other divides."""
    result = _quotient(number, divisor)
    assert result is not None, f"{divisor} doesn't divide {number}"
    return result


def _quotient(number: Number, divisor: Number) -> Number | None:
    if isinstance(number, int) and isinstance(divisor, int):
        return number // divisor if divisor and number % divisor == 0 else None
    if not isinstance(number, Size):
        return 0 if number == 0 else None
    if value_of(divisor) == 0:
        return None
    divisors = _terms_of(divisor)
    shares = _shares(number, *divisors.items()) if len(divisors) == 1 else _whole_quotient(number, divisor)
    return None if shares is None else number._made(shares, number.hint // value_of(divisor))


def _shares(number: Size, divisor: tuple[_Monomial, int]) -> dict[_Monomial, int] | None:
    """The terms of a number divided by a monomial; None if one isn't a multiple of it."""
    monomial, factor = divisor
    inverse = tuple((atom, -power) for atom, power in monomial)
    shares = {_multiplied(term, inverse): own // factor for term, own in number.terms if own % factor == 0}
    is_whole = len(shares) == len(number.terms) and all(power > 0 for term in shares for _, power in term)
    return shares if is_whole else None


def _whole_quotient(number: Size, divisor: Number) -> dict[_Monomial, int] | None:
    assert isinstance(divisor, Size)
    result, rest = (cast(sympy.Expr, part) for part in sympy.div(number.expression, divisor.expression))
    is_whole = rest == 0 and all(factor == int(factor) for factor in result.as_coefficients_dict().values())
    return dict(_terms_of_expression(result)) if is_whole else None


def _terms_of(number: Number) -> dict[_Monomial, int]:
    if isinstance(number, Size):
        return dict(number.terms)
    return {(): number} if number else {}


def _multiplied(left: _Monomial, right: _Monomial) -> _Monomial:
    powers = dict(left)
    for atom, power in right:
        powers[atom] = powers.get(atom, 0) + power
    return tuple(sorted(((atom, power) for atom, power in powers.items() if power), key=lambda pair: str(pair[0])))


@functools.lru_cache(maxsize=4096)
def _terms_of_expression(expression: sympy.Expr) -> Mapping[_Monomial, int]:
    """The terms of a polynomial; what is no sum, product or power, such as a quotient, is a symbol itself."""
    if expression.is_number:
        return {(): int(expression)} if expression else {}
    polynomial = sympy.Poly(expression)
    terms: dict[_Monomial, int] = {}
    for powers, factor in polynomial.terms():
        pairs = [(atom, int(power)) for atom, power in zip(polynomial.gens, powers, strict=True) if power]
        terms[tuple(sorted(pairs, key=lambda pair: str(pair[0])))] = int(factor)
    return terms
