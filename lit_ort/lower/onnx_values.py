"""Values of model-local ONNX functions, with the operators and methods by which the table of operators writes formulas.

A formula of `regions.pointwise_table` on values of `kernels.vector_text` is machine code; on these it is ONNX nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from lit_ort.regions.counter_random import philox
from lit_ort.regions.element_types import MEMORY_DTYPES, is_float
from lit_ort.runtime.elements import ELEMENTS

FUNCTION_DOMAIN = "lit_ort"
OPSET = 18
# ONNX Runtime has few kernels for these, so that they are computed as int64; stores wrap them around.
_NARROW = ("bool", "int8", "int16", "uint8")
# ONNX Runtime has these for float32 alone.
_SINGLE = frozenset(
    {"Erf", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh", "ReduceProd"}
)
_UNIFORM = "uniform"


class FunctionNodes:
    """The nodes of a model-local function, in the order in which they run."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._constants: dict[tuple[object, ...], str] = {}
        self._count = 0

    def op(self, operator: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Adds a node with one output and returns the output's name."""
        name = self._unique(operator)
        self.nodes.append(helper.make_node(operator, list(inputs), [name], name=name, domain=domain, **attributes))
        return name

    def constant(self, array: np.ndarray) -> str:
        """The name of a constant; equal ones are shared."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.op("Constant", value=numpy_helper.from_array(array))
        return self._constants[key]

    def integers(self, numbers: Sequence[int]) -> str:
        """An int64 vector."""
        return self.constant(np.array(numbers, dtype=np.int64))

    def number(self, value: float, dtype: str, rank: int = 0) -> OnnxValue:
        """A number as a value of this rank; integers wrap around."""
        is_whole = not is_float(dtype) and dtype != "bool"
        array = np.array(int(value), dtype=np.int64) if is_whole else np.array(value)
        return OnnxValue(self, self.constant(array.astype(dtype).reshape([1] * rank)), dtype)

    def function(self, name: str, inputs: Sequence[str], outputs: Sequence[str], text: str = "") -> onnx.FunctionProto:
        """The function of these nodes."""
        domains = dict.fromkeys(["", *(node.domain for node in self.nodes)])
        opsets = [helper.make_opsetid(domain, 1 if domain else OPSET) for domain in domains]
        function = helper.make_function(FUNCTION_DOMAIN, name, list(inputs), list(outputs), self.nodes, opsets)
        function.doc_string = text
        return function

    def _unique(self, name: str) -> str:
        self._count += 1
        return f"{name.lower()}_{self._count}"


@dataclass(frozen=True, eq=False)
class OnnxValue:
    """A value of a function.

    Args:
        nodes: those of the function, to which operators on the value are added.
        name: of the value.
        dtype: that it is computed in.
    """

    nodes: FunctionNodes
    name: str
    dtype: str

    @property
    def is_float(self) -> bool:
        return is_float(self.dtype)

    def like(self, value: OnnxValue | float) -> OnnxValue:
        """A number as a value of this dtype."""
        return value if isinstance(value, OnnxValue) else self.nodes.number(value, self.dtype)

    def op(self, operator: str, *others: OnnxValue | float, dtype: str | None = None, **attributes: Any) -> OnnxValue:
        """An operator on this value and others of its dtype."""
        given = [self, *map(self.like, others)]
        computed = "int64" if self.dtype in _NARROW else "float32" if operator in _SINGLE and self.is_float else None
        if computed is not None and computed != self.dtype:
            made = (
                given[0].cast(computed).op(operator, *(x.cast(computed) for x in given[1:]), dtype=dtype, **attributes)
            )
            return made if dtype is not None else made.cast(self.dtype)
        name = self.nodes.op(operator, *(value.name for value in given), **attributes)
        return OnnxValue(self.nodes, name, dtype or self.dtype)

    def logical(self, operator: str, *others: OnnxValue) -> OnnxValue:
        """An operator on booleans or, of its bits, on integers."""
        names = [value.name for value in (self, *others)]
        return OnnxValue(self.nodes, self.nodes.op(operator, *names), self.dtype)

    def cast(self, dtype: str) -> OnnxValue:
        if dtype == self.dtype:
            return self
        return OnnxValue(self.nodes, self.nodes.op("Cast", self.name, to=ELEMENTS[MEMORY_DTYPES[dtype]]), dtype)

    # Arithmetic

    def __add__(self, other: OnnxValue | float) -> OnnxValue:
        return self.op("Add", other)

    def __sub__(self, other: OnnxValue | float) -> OnnxValue:
        return self.op("Sub", other)

    def __mul__(self, other: OnnxValue | float) -> OnnxValue:
        return self.op("Mul", other)

    def __truediv__(self, other: OnnxValue | float) -> OnnxValue:
        return self.op("Div", other)

    def __radd__(self, other: float) -> OnnxValue:
        return self.like(other) + self

    def __rsub__(self, other: float) -> OnnxValue:
        return self.like(other) - self

    def __rmul__(self, other: float) -> OnnxValue:
        return self.like(other) * self

    def __rtruediv__(self, other: float) -> OnnxValue:
        return self.like(other) / self

    def __neg__(self) -> OnnxValue:
        return self.op("Neg")

    def maximum(self, other: OnnxValue | float) -> OnnxValue:
        return self.op("Max", other)

    def minimum(self, other: OnnxValue | float) -> OnnxValue:
        return self.op("Min", other)

    def abs(self) -> OnnxValue:
        return self.op("Abs")

    def reduce(self, operator: str, axes: str) -> OnnxValue:
        """A reduction over axes, which stay with size 1."""
        computed = (
            "int64" if self.dtype in _NARROW else "float32" if operator in _SINGLE and self.is_float else self.dtype
        )
        value = self.cast(computed)
        return OnnxValue(self.nodes, self.nodes.op(operator, value.name, axes, keepdims=1), computed).cast(self.dtype)

    def scattered(self, places: OnnxValue, values: OnnxValue, *, add: bool) -> OnnxValue:
        """This vector with values written, or added, at places."""
        names = [value.name for value in (self, places, values)]
        reduction = "add" if add else "none"
        return OnnxValue(self.nodes, self.nodes.op("ScatterElements", *names, axis=0, reduction=reduction), self.dtype)

    # Comparisons and choices

    def eq(self, other: OnnxValue | float) -> OnnxValue:
        if self.dtype == "bool" and not isinstance(other, OnnxValue):
            return self if other else ~self
        return self.op("Equal", other, dtype="bool")

    def ne(self, other: OnnxValue | float) -> OnnxValue:
        return ~self.eq(other)

    def lt(self, other: OnnxValue | float) -> OnnxValue:
        return self.op("Less", other, dtype="bool")

    def le(self, other: OnnxValue | float) -> OnnxValue:
        return self.op("LessOrEqual", other, dtype="bool")

    def gt(self, other: OnnxValue | float) -> OnnxValue:
        return self.op("Greater", other, dtype="bool")

    def ge(self, other: OnnxValue | float) -> OnnxValue:
        return self.op("GreaterOrEqual", other, dtype="bool")

    def isnan(self) -> OnnxValue:
        return self.op("IsNaN", dtype="bool") if self.is_float else self.ne(self)

    def isinf(self) -> OnnxValue:
        return self.op("IsInf", dtype="bool") if self.is_float else self.ne(self)

    def require(self, test: OnnxValue) -> OnnxValue:
        """ONNX has no errors: NaN where `test` isn't met, of floats."""
        return test.where(self, math.nan) if self.is_float else self

    def copysign(self, sign: OnnxValue) -> OnnxValue:
        is_negative = sign.lt(0.0) | (1.0 / sign).lt(0.0)
        size = self.abs()
        return is_negative.where(-size, size)

    def where(self, chosen: OnnxValue | float, other: OnnxValue | float) -> OnnxValue:
        known = chosen if isinstance(chosen, OnnxValue) else other
        assert isinstance(known, OnnxValue), "one of two choices is a value"
        left, right, dtype = known.like(chosen), known.like(other), known.dtype
        if dtype in _NARROW:
            left, right = left.cast("int64"), right.cast("int64")
        made = OnnxValue(self.nodes, self.nodes.op("Where", self.name, left.name, right.name), left.dtype)
        return made.cast(dtype)

    # Bits

    def __and__(self, other: OnnxValue | int) -> OnnxValue:
        return self.logical("And" if self.dtype == "bool" else "BitwiseAnd", self.like(other))

    def __or__(self, other: OnnxValue | int) -> OnnxValue:
        return self.logical("Or" if self.dtype == "bool" else "BitwiseOr", self.like(other))

    def __xor__(self, other: OnnxValue | int) -> OnnxValue:
        return self.logical("Xor" if self.dtype == "bool" else "BitwiseXor", self.like(other))

    def __invert__(self) -> OnnxValue:
        return self.logical("Not" if self.dtype == "bool" else "BitwiseNot")

    def __lshift__(self, bits: int) -> OnnxValue:
        return self * 2**bits

    def __rshift__(self, bits: int) -> OnnxValue:
        """The bits of an int64, with zeros from the left."""
        return self._unsigned_shift(self.like(bits), "RIGHT")

    def lshift(self, count: OnnxValue) -> OnnxValue:
        """Zero for a negative count or one of all bits or more."""
        x, count = self.cast("int64"), count.cast("int64")
        inside = count.ge(0) & count.lt(self._bits)
        return inside.where(x._unsigned_shift(inside.where(count, 0), "LEFT"), 0).cast(self.dtype)

    def rshift(self, count: OnnxValue) -> OnnxValue:
        """The sign for a negative count or one of all bits or more."""
        x, count = self.cast("int64"), count.cast("int64")
        negative, last = x.lt(0), self._bits - 1
        inside = count.ge(0) & count.le(last)
        shifted = negative.where(~x, x)._unsigned_shift(inside.where(count, last), "RIGHT")
        found = negative.where(~shifted, shifted)
        return (found if self.dtype != "uint8" else inside.where(found, 0)).cast(self.dtype)

    @property
    def _bits(self) -> int:
        return 8 * MEMORY_DTYPES[self.dtype].itemsize

    def _unsigned_shift(self, count: OnnxValue, direction: str) -> OnnxValue:
        """ONNX has shifts of unsigned integers alone."""
        to = onnx.TensorProto.UINT64
        words = [self.nodes.op("Cast", value.name, to=to) for value in (self, count)]
        shifted = self.nodes.op("BitShift", *words, direction=direction)
        return OnnxValue(self.nodes, self.nodes.op("Cast", shifted, to=onnx.TensorProto.INT64), "int64")

    # Rounding, and division with a remainder

    def floor(self) -> OnnxValue:
        return self.op("Floor") if self.is_float else self

    def ceil(self) -> OnnxValue:
        return self.op("Ceil") if self.is_float else self

    def round(self) -> OnnxValue:
        return self.op("Round") if self.is_float else self

    def trunc(self) -> OnnxValue:
        return self.lt(0.0).where(self.ceil(), self.floor()) if self.is_float else self

    def fmod(self, divisor: OnnxValue) -> OnnxValue:
        # ONNX Runtime's remainder of large integers is that of float64.
        return self.op("Mod", divisor, fmod=1) if self.is_float else self - self / divisor * divisor

    def remainder(self, divisor: OnnxValue) -> OnnxValue:
        rest = self.fmod(divisor)
        return rest._differs_in_sign(divisor).where(rest + divisor, rest)

    def trunc_divide(self, divisor: OnnxValue) -> OnnxValue:
        return (self / divisor).trunc()

    def floor_divide(self, divisor: OnnxValue) -> OnnxValue:
        rest = self.fmod(divisor)
        if not self.is_float:
            quotient = self / divisor
            return rest._differs_in_sign(divisor).where(quotient - 1, quotient)
        quotient = (self - rest) / divisor
        whole = rest._differs_in_sign(divisor).where(quotient - 1.0, quotient).round()
        return divisor.eq(0.0).where(self / divisor, whole)

    def _differs_in_sign(self, other: OnnxValue) -> OnnxValue:
        return self.ne(0) & (self.lt(0) ^ other.lt(0))

    # Functions of a float

    def expm1(self) -> OnnxValue:
        half = (self * 0.5).tanh()
        return self.abs().lt(1.0).where(2.0 * half / (1.0 - half), self.exp() - 1.0)

    def log1p(self) -> OnnxValue:
        """Source: W. Kahan's form, which keeps the digits of small numbers."""
        shifted = self + 1.0
        exact = shifted.log() * self / (shifted - 1.0)
        return shifted.eq(1.0).where(self, shifted.eq(math.inf).where(shifted, exact))

    def exp2(self) -> OnnxValue:
        return self.like(2.0).pow(self)

    def log2(self) -> OnnxValue:
        return self.log() * (1 / math.log(2))

    def log10(self) -> OnnxValue:
        return self.log() * (1 / math.log(10))

    def rsqrt(self) -> OnnxValue:
        return self.sqrt().op("Reciprocal")

    def erfc(self) -> OnnxValue:
        return 1.0 - self.erf()

    def pow(self, exponent: OnnxValue) -> OnnxValue:
        return self.op("Pow", exponent)

    def hypot(self, other: OnnxValue) -> OnnxValue:
        return (self * self + other * other).sqrt()

    def atan2(self, x: OnnxValue) -> OnnxValue:
        """The angle of (x, self), by that of the smaller of the two over the larger."""
        y, size, width = self, self.abs(), x.abs()
        is_steep = size.gt(width)
        ratio = is_steep.where(width, size) / is_steep.where(size, width)
        angle = (size + width).eq(0.0).where(0.0, ratio).atan()
        angle = is_steep.where(math.pi / 2 - angle, angle)
        angle = x.lt(0.0).where(math.pi - angle, angle)
        return y.lt(0.0).where(-angle, angle)

    def lgamma(self) -> OnnxValue:
        """Stirling's series after six steps of its recurrence, and the reflection for small numbers."""
        is_small = self.lt(0.5)
        positive = is_small.where(1.0 - self, self)
        between = positive.log()
        for step in range(1, 6):
            between = between + (positive + float(step)).log()
        z = positive + 6.0
        inverse = 1.0 / (z * z)
        series = (1 / 12 - (1 / 360 - inverse * (1 / 1260)) * inverse) / z
        found = (z - 0.5) * z.log() - z + (0.5 * math.log(2 * math.pi) + series) - between
        angle = (self - self.round()) * math.pi
        return is_small.where(math.log(math.pi) - angle.sin().abs().log() - found, found)

    def digamma(self) -> OnnxValue:
        """The derivative of `lgamma`, by the derivatives of its formulas."""
        is_small = self.lt(0.5)
        positive = is_small.where(1.0 - self, self)
        between = 1.0 / positive
        for step in range(1, 6):
            between = between + 1.0 / (positive + float(step))
        z = positive + 6.0
        inverse = 1.0 / (z * z)
        series = (1 / 12 - (1 / 120 - inverse * (1 / 252)) * inverse) * inverse
        found = z.log() - 0.5 / z - series - between
        rest = self - self.round()
        angle = rest * math.pi
        reflected = found - angle.cos() / angle.sin() * math.pi
        return is_small.where((rest.eq(0.0) & self.lt(0.0)).where(math.nan, reflected), found)

    def __getattr__(self, name: str) -> Callable[[], OnnxValue]:
        """The functions that ONNX has operators of."""
        if name not in _OPERATORS:
            raise AttributeError(name)
        return lambda: self.op(_OPERATORS[name])

    # Random numbers

    def random(self, stream: OnnxValue, row: OnnxValue, column: OnnxValue) -> OnnxValue:
        """float32 in [0, 1), as `regions.counter_random` has it, of this seed; a call of `uniform_function`."""
        names = [value.name for value in (self, stream, row, column)]
        return OnnxValue(self.nodes, self.nodes.op(_UNIFORM, *names, domain=FUNCTION_DOMAIN), "float32")


_OPERATORS = {
    name: name.capitalize()
    for name in ("exp", "log", "sqrt", "sin", "cos", "tan", "tanh", "sigmoid", "erf", "atan", "asin", "acos")
    + ("sinh", "cosh", "asinh", "acosh", "atanh")
}


def uniform_function() -> onnx.FunctionProto:
    """The function by which others draw random numbers: uniform(seed, stream, row, column)."""
    inputs = ("seed", "stream", "row", "column")
    nodes = FunctionNodes()
    seed, stream, row, column = (OnnxValue(nodes, name, "int64") for name in inputs)
    word = 0xFFFFFFFF
    counter = (column >> 6) * 16 + (column & 15)
    words = philox((seed & word, seed >> 32 & word), (counter, row & word, row >> 32 & word, stream & word))
    chosen, number = words[3], column >> 4 & 3
    for position in (2, 1, 0):
        chosen = number.eq(position).where(words[position], chosen)
    (chosen >> 8).cast("float32").op("Mul", 2.0**-24)
    nodes.nodes[-1].output[0] = "random"
    return nodes.function(_UNIFORM, inputs, ["random"], "Random numbers in [0, 1) by Philox 4x32-10.")
