"""Values of LLVM's text form: Python operators on a `Vector` append instructions to a `Text`.

The text is built directly, not by `llvmlite.ir`, whose objects cost several times as much as all of LLVM's own work on
a region. Equal instructions in scope are emitted once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from lit_ort.regions.element_types import is_float

_SCALARS = {
    "float32": "float",
    "float64": "double",
    "float16": "half",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "i8",
    "bool": "i1",
}
BITS = {
    "float32": 32,
    "float64": 64,
    "float16": 16,
    "int64": 64,
    "int32": 32,
    "int16": 16,
    "int8": 8,
    "uint8": 8,
    "bool": 1,
}
INTEGER_OF_SIZE = {"float32": "int32", "float64": "int64"}
_UNSIGNED = ("uint8", "bool")
POINTER = "ptr"

Number = float | int | bool


class Text:
    """The text of a module: functions, the declarations that they need, and the function that is being written."""

    def __init__(self) -> None:
        self.declarations: dict[str, str] = {}
        self.functions: dict[str, str] = {}
        # Functions that all modules share, each a text of its own; `declarations` has them too.
        self.library: dict[str, Text] = {}
        # Whether mathematical functions are written where they are used, rather than called from the library: code that
        # runs for few elements is better short.
        self.inline = True
        self.lines: list[str] = []
        self.block = "entry"
        # What to do where lanes meet a condition under which eager raises; a kernel sets a flag.
        self.report: Callable[[str, Vector], None] | None = None
        self._count = 0
        self._scopes: list[dict[str, str]] = [{}]

    def __str__(self) -> str:
        return "\n".join((*self.declarations.values(), *self.functions.values()))

    def name(self) -> str:
        self._count += 1
        return f"%v{self._count}"

    def value(self, instruction: str) -> str:
        """The name of an instruction's result; the instruction is appended unless it is known in this scope."""
        for scope in reversed(self._scopes):
            known = scope.get(instruction)
            if known is not None:
                return known
        name = self.effect(instruction)
        self._scopes[-1][instruction] = name
        return name

    def effect(self, instruction: str) -> str:
        """The name of the result of an instruction that isn't the same when repeated, as a load."""
        name = self.name()
        self.lines.append(f"{name} = {instruction}")
        return name

    def line(self, text: str) -> None:
        self.lines.append(text)

    def label(self, name: str) -> None:
        self.lines.append(f"{name}:")
        self.block = name

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What is emitted inside isn't known afterwards: a loop's body doesn't dominate what follows."""
        self._scopes.append({})
        try:
            yield
        finally:
            self._scopes.pop()

    @contextmanager
    def loop(self, start: str, end: str, step: int | str, carried: Sequence[Vector] = ()) -> Iterator[Loop]:
        """A loop over i64 values from `start` while below `end`; `carried` enter it, and `Loop.carry` sets the next."""
        number = self.name()[2:]
        before, head, body, after = self.block, f"head{number}", f"body{number}", f"after{number}"
        self.line(f"br label %{head}")
        self.label(head)
        index = self.name()
        current = [Vector(self, self.name(), vector.dtype, vector.lanes) for vector in carried]
        phis = len(self.lines)
        self.lines.extend([""] * (1 + len(current)))
        self.line(f"%test{number} = icmp slt i64 {index}, {end}")
        self.line(f"br i1 %test{number}, label %{body}, label %{after}")
        self.label(body)
        loop = Loop(index, current)
        with self.scope():
            yield loop
        following = self.effect(f"add nsw i64 {index}, {step}")
        self.lines[phis] = f"{index} = phi i64 [ {start}, %{before} ], [ {following}, %{self.block} ]"
        for at, (old, entry, new) in enumerate(zip(current, carried, loop.next, strict=True), phis + 1):
            phi = f"phi {old.type} [ {entry.name}, %{before} ], [ {new.name}, %{self.block} ]"
            self.lines[at] = f"{old.name} = {phi}"
        self.line(f"br label %{head}")
        self.label(after)

    def function(self, name: str, head: str, body: Callable[[], None], attributes: str = "") -> None:
        """Append a function whose lines `body` emits."""
        self.lines, self._scopes, self.block, self.report = [], [{}], "entry", None
        body()
        self.functions[name] = "\n".join((f"define {head} {attributes} {{", "entry:", *self.lines, "}"))

    def call(self, name: str, result: str, *arguments: tuple[str, str], pure: bool = True) -> str:
        """Call a function, declared if it isn't defined here; arguments are pairs of a type and a name."""
        types = ", ".join(kind for kind, _ in arguments)
        if name not in self.functions and name not in self.declarations:
            self.declarations[name] = f"declare {result} @{name}({types})"
        text = f"call {result} @{name}(" + ", ".join(f"{kind} {value}" for kind, value in arguments) + ")"
        if result == "void":
            self.line(text)
            return ""
        return self.value(text) if pure else self.effect(text)

    def literal(self, value: Number, dtype: str, lanes: int = 0) -> Vector:
        return Vector(self, literal_text(value, dtype, lanes), dtype, lanes)

    def indices(self, start: str, lanes: int, dtype: str = "int64") -> Vector:
        """start, start + 1, and so on."""
        if not lanes:
            return Vector(self, start, dtype, 0)
        kind = type_text(dtype, 0)
        steps = Vector(self, "<" + ", ".join(f"{kind} {lane}" for lane in range(lanes)) + ">", dtype, lanes)
        return steps if start == "0" else Vector(self, start, dtype, 0).splat(lanes) + steps


class Loop:
    """A loop that is being written: its index, the current values of what it carries, and the next ones."""

    def __init__(self, index: str, current: list[Vector]) -> None:
        self.index = index
        self.current = current
        self.next = current

    def carry(self, values: list[Vector]) -> None:
        self.next = values


class Vector:
    """A value in LLVM's text: a scalar (`lanes` is 0) or a vector of a dtype."""

    __slots__ = ("dtype", "lanes", "name", "text")

    def __init__(self, text: Text, name: str, dtype: str, lanes: int) -> None:
        self.text, self.name, self.dtype, self.lanes = text, name, dtype, lanes

    @property
    def type(self) -> str:
        return type_text(self.dtype, self.lanes)

    @property
    def is_float(self) -> bool:
        return is_float(self.dtype)

    def like(self, value: Vector | Number) -> Vector:
        """A number, or a scalar, as a value of this dtype and as many lanes."""
        if not isinstance(value, Vector):
            return self.text.literal(value, self.dtype, self.lanes)
        assert value.dtype == self.dtype, (value.dtype, self.dtype)
        return value.splat(self.lanes)

    def splat(self, lanes: int) -> Vector:
        """A scalar in all lanes; a vector as it is."""
        if self.lanes or not lanes:
            return self
        kind = type_text(self.dtype, lanes)
        if not self.name.startswith("%"):
            return Vector(self.text, f"splat ({self.type} {self.name})", self.dtype, lanes)
        single = self.text.value(f"insertelement {kind} poison, {self.type} {self.name}, i64 0")
        name = self.text.value(f"shufflevector {kind} {single}, {kind} poison, <{lanes} x i32> zeroinitializer")
        return Vector(self.text, name, self.dtype, lanes)

    def made(self, instruction: str, dtype: str | None = None) -> Vector:
        return Vector(self.text, self.text.value(instruction), dtype or self.dtype, self.lanes)

    def binary(self, instruction: str, other: Vector | Number) -> Vector:
        left, right = self._pair(other)
        return left.made(f"{instruction} {left.type} {left.name}, {right.name}")

    def _pair(self, other: Vector | Number) -> tuple[Vector, Vector]:
        right = self.like(other)
        return self.splat(right.lanes), right

    def intrinsic(self, name: str, *others: Vector | Number, flags: str = "") -> Vector:
        """An intrinsic on values of one type, as llvm.fma."""
        values: list[Vector] = [self, *(self.like(other) for other in others)]
        lanes = max(value.lanes for value in values)
        values = [value.splat(lanes) for value in values]
        kind = values[0].type
        full = f"llvm.{name}.{suffix(self.dtype, lanes)}"
        if flags:
            return values[0]._flagged(full, values, flags)
        return values[0].made_of_call(full, kind, *((kind, value.name) for value in values))

    def _flagged(self, full: str, values: list[Vector], flags: str) -> Vector:
        kind = self.type
        self.text.declarations.setdefault(full, f"declare {kind} @{full}({', '.join([kind] * len(values))})")
        return self.made(f"call {flags} {kind} @{full}({', '.join(f'{kind} {value.name}' for value in values)})")

    def made_of_call(self, name: str, result: str, *arguments: tuple[str, str]) -> Vector:
        return Vector(self.text, self.text.call(name, result, *arguments), self.dtype, self.lanes)

    # Arithmetic. Booleans add as `or` and multiply as `and`, as in torch.

    def __add__(self, other: Vector | Number) -> Vector:
        return self.binary("or" if self.dtype == "bool" else "fadd" if self.is_float else "add", other)

    def __mul__(self, other: Vector | Number) -> Vector:
        return self.binary("and" if self.dtype == "bool" else "fmul" if self.is_float else "mul", other)

    def __sub__(self, other: Vector | Number) -> Vector:
        return self.binary("fsub" if self.is_float else "sub", other)

    def __truediv__(self, other: Vector | Number) -> Vector:
        return self.binary("fdiv", other)

    def __radd__(self, other: Number) -> Vector:
        return self + other

    def __rmul__(self, other: Number) -> Vector:
        return self * other

    def __rsub__(self, other: Number) -> Vector:
        return self.like(other) - self

    def __rtruediv__(self, other: Number) -> Vector:
        return self.like(other) / self

    def __neg__(self) -> Vector:
        return self.made(f"fneg {self.type} {self.name}") if self.is_float else self.like(0) - self

    def fma(self, factor: Vector | Number, addend: Vector | Number) -> Vector:
        """self · factor + addend, rounded once."""
        return self.intrinsic("fma", factor, addend)

    def abs(self) -> Vector:
        if self.is_float:
            return self.intrinsic("fabs")
        return self if self.dtype in _UNSIGNED else self.lt(0).where(-self, self)

    def sqrt(self) -> Vector:
        return self.intrinsic("sqrt")

    def floor(self) -> Vector:
        return self.intrinsic("floor") if self.is_float else self

    def ceil(self) -> Vector:
        return self.intrinsic("ceil") if self.is_float else self

    def trunc(self) -> Vector:
        return self.intrinsic("trunc") if self.is_float else self

    def round(self) -> Vector:
        """To the nearest integer, halves to the even one."""
        return self.intrinsic("roundeven") if self.is_float else self

    def copysign(self, sign: Vector) -> Vector:
        return self.intrinsic("copysign", sign)

    # NaN wins; the sign of a zero result is not specified, as in torch.

    def maximum(self, other: Vector | Number) -> Vector:
        return self._extreme("maximum", "max", other)

    def minimum(self, other: Vector | Number) -> Vector:
        return self._extreme("minimum", "min", other)

    def _extreme(self, of_floats: str, of_integers: str, other: Vector | Number) -> Vector:
        if self.is_float:
            return self.intrinsic(of_floats, other, flags="nsz")
        return self.intrinsic(("u" if self.dtype in _UNSIGNED else "s") + of_integers, other)

    # Comparisons, which are False for NaN apart from `ne`.

    def _compare(self, relation: str, other: Vector | Number) -> Vector:
        left, right = self._pair(other)
        if self.is_float:
            kind = "fcmp " + ("une" if relation == "ne" else f"o{relation}")
        elif relation in ("eq", "ne"):
            kind = f"icmp {relation}"
        else:
            kind = f"icmp {'u' if self.dtype in _UNSIGNED else 's'}{relation}"
        return left.made(f"{kind} {left.type} {left.name}, {right.name}", "bool")

    def eq(self, other: Vector | Number) -> Vector:
        return self._compare("eq", other)

    def ne(self, other: Vector | Number) -> Vector:
        return self._compare("ne", other)

    def lt(self, other: Vector | Number) -> Vector:
        return self._compare("lt", other)

    def le(self, other: Vector | Number) -> Vector:
        return self._compare("le", other)

    def gt(self, other: Vector | Number) -> Vector:
        return self._compare("gt", other)

    def ge(self, other: Vector | Number) -> Vector:
        return self._compare("ge", other)

    def isnan(self) -> Vector:
        if not self.is_float:
            return self.text.literal(False, "bool", self.lanes)
        return self.made(f"fcmp uno {self.type} {self.name}, {literal_text(0.0, self.dtype, self.lanes)}", "bool")

    def isinf(self) -> Vector:
        if not self.is_float:
            return self.text.literal(False, "bool", self.lanes)
        return self.abs().eq(float("inf"))

    # Bits.

    def __and__(self, other: Vector | Number) -> Vector:
        return self.binary("and", other)

    def __or__(self, other: Vector | Number) -> Vector:
        return self.binary("or", other)

    def __xor__(self, other: Vector | Number) -> Vector:
        return self.binary("xor", other)

    def __invert__(self) -> Vector:
        return self.binary("xor", True if self.dtype == "bool" else -1)

    def shift_left(self, count: Vector | int) -> Vector:
        return self.binary("shl", count)

    def shift_right(self, count: Vector | int, *, signed: bool = True) -> Vector:
        return self.binary("ashr" if signed else "lshr", count)

    def bits(self) -> Vector:
        """The bits of a float, as an integer of its size."""
        dtype = INTEGER_OF_SIZE[self.dtype]
        return self.made(f"bitcast {self.type} {self.name} to {type_text(dtype, self.lanes)}", dtype)

    def as_float(self) -> Vector:
        """The float of an integer's bits."""
        dtype = {"int32": "float32", "int64": "float64"}[self.dtype]
        return self.made(f"bitcast {self.type} {self.name} to {type_text(dtype, self.lanes)}", dtype)

    def require(self, test: Vector) -> Vector:
        """This value; where `test` isn't met, the run reports an error."""
        assert self.text.report is not None
        self.text.report("value", ~test)
        return self

    def where(self, chosen: Vector | Number, other: Vector | Number) -> Vector:
        """`chosen` where this bool is True, and `other` elsewhere."""
        first = chosen if isinstance(chosen, Vector) else other
        assert isinstance(first, Vector)
        left, right = first.like(chosen), first.like(other)
        lanes = max(self.lanes, left.lanes, right.lanes)
        test, left, right = self.splat(lanes), left.splat(lanes), right.splat(lanes)
        return left.made(f"select {test.type} {test.name}, {left.type} {left.name}, {right.type} {right.name}")

    def convert(self, instruction: str, dtype: str) -> Vector:
        return self.made(f"{instruction} {self.type} {self.name} to {type_text(dtype, self.lanes)}", dtype)

    def total(self, name: str, flags: str = "", start: Number | None = None) -> Vector:
        """All lanes in one by llvm.vector.reduce; a scalar is its own total."""
        if not self.lanes:
            return self
        kind, full = type_text(self.dtype, 0), f"llvm.vector.reduce.{name}.{suffix(self.dtype, self.lanes)}"
        first = [] if start is None else [f"{kind} {literal_text(start, self.dtype, 0)}"]
        types = ", ".join(([kind] if first else []) + [self.type])
        self.text.declarations.setdefault(full, f"declare {kind} @{full}({types})")
        arguments = ", ".join([*first, f"{self.type} {self.name}"])
        return Vector(self.text, self.text.value(f"call {flags} {kind} @{full}({arguments})"), self.dtype, 0)

    def __getattr__(self, name: str) -> Any:
        """The functions of `vector_math`, as methods."""
        from lit_ort.kernels.vector_math import FUNCTIONS

        if name not in FUNCTIONS:
            raise AttributeError(name)
        return lambda *others: FUNCTIONS[name](self, *others)


@lru_cache(maxsize=256)
def type_text(dtype: str, lanes: int) -> str:
    scalar = _SCALARS[dtype]
    return f"<{lanes} x {scalar}>" if lanes else scalar


def suffix(dtype: str, lanes: int) -> str:
    """A type as a part of an intrinsic's name."""
    word = f"{'f' if is_float(dtype) else 'i'}{BITS[dtype]}"
    return f"v{lanes}{word}" if lanes else word


def literal_text(value: Number, dtype: str, lanes: int) -> str:
    word = _float_text(float(value), dtype) if is_float(dtype) else _integer_text(value, dtype)
    return f"splat ({type_text(dtype, 0)} {word})" if lanes else word


def _float_text(value: float, dtype: str) -> str:
    if dtype == "float32":
        try:
            value = struct.unpack("<f", struct.pack("<f", value))[0]
        except OverflowError:
            value = float("inf") if value > 0 else float("-inf")
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


def _integer_text(value: Number, dtype: str) -> str:
    if dtype == "bool":
        return "true" if value else "false"
    bits = BITS[dtype]
    wrapped = int(value) & ((1 << bits) - 1)
    return str(wrapped - (1 << bits) if wrapped >> (bits - 1) else wrapped)
