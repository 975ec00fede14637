"""Loads and stores of vectors: neighbours, any addresses, under masks; values of 16 bits and booleans are converted.

A place is the number of an element, in i64, from a pointer.
"""

from __future__ import annotations

from lit_ort.kernels.vector_math import cast
from lit_ort.kernels.vector_text import Text, Vector, suffix, type_text
from lit_ort.regions.element_types import size_of

# Integers that hold the bits of values in memory that are no LLVM values of their own.
_STORED_AS = {"bool": "uint8", "bfloat16": "int16"}
_ZERO = "lit_ort.zero"


def _memory_dtype(dtype: str) -> str:
    return _STORED_AS.get(dtype, dtype)


def _decoded(value: Vector, dtype: str) -> Vector:
    """The value of what is in memory."""
    if dtype == "bool":
        return value.ne(0)
    if dtype == "bfloat16":
        return value.convert("zext", "int32").shift_left(16).as_float()
    return cast(value, "float32") if dtype == "float16" else value


def _encoded(value: Vector, dtype: str) -> Vector:
    """What to write for a value."""
    if dtype == "bool":
        return cast(value, "uint8")
    if dtype == "bfloat16":
        bits = value.bits()
        even = bits.shift_right(16, signed=False) & 1
        rounded = (bits + 0x7FFF + even).shift_right(16, signed=False)
        return value.isnan().where(bits.like(0x7FC0), rounded).convert("trunc", "int16")
    return cast(value, dtype)


def address_of(text: Text, pointer: str, place: str | int, dtype: str) -> str:
    """The address of an element."""
    return text.value(f"getelementptr {type_text(_memory_dtype(dtype), 0)}, ptr {pointer}, i64 {place}")


def loaded(text: Text, pointer: str, place: str, dtype: str, lanes: int, mask: Vector | None) -> Vector:
    """Neighbouring elements from a place on, or one if `lanes` is 0; 0 where a mask is False."""
    memory = _memory_dtype(dtype)
    kind, align = type_text(memory, lanes), size_of(dtype)
    at = address_of(text, pointer, place, dtype)
    if mask is None:
        return _decoded(Vector(text, text.effect(f"load {kind}, ptr {at}, align {align}"), memory, lanes), dtype)
    if not lanes:
        text.declarations.setdefault(_ZERO, f"@{_ZERO} = internal constant i64 0")
        at = text.value(f"select i1 {mask.name}, ptr {at}, ptr @{_ZERO}")
        return _decoded(Vector(text, text.effect(f"load {kind}, ptr {at}, align {align}"), memory, 0), dtype)
    name = f"llvm.masked.load.{suffix(memory, lanes)}.p0"
    arguments = ("ptr", at), ("i32", str(align)), (mask.type, mask.name), (kind, "zeroinitializer")
    return _decoded(Vector(text, text.call(name, kind, *arguments, pure=False), memory, lanes), dtype)


def stored(text: Text, pointer: str, place: str, dtype: str, value: Vector, mask: Vector | None) -> None:
    """Write a value to neighbouring elements from a place on, where a mask is True."""
    value = _encoded(value, dtype)
    at, align = address_of(text, pointer, place, dtype), size_of(dtype)
    if mask is None:
        text.line(f"store {value.type} {value.name}, ptr {at}, align {align}")
        return
    name = f"llvm.masked.store.{suffix(value.dtype, value.lanes)}.p0"
    arguments = (value.type, value.name), ("ptr", at), ("i32", str(align)), (mask.type, mask.name)
    text.call(name, "void", *arguments)


def _pointers(text: Text, pointer: str, places: Vector, dtype: str) -> tuple[str, str]:
    kind = type_text(_memory_dtype(dtype), 0)
    name = text.value(f"getelementptr {kind}, ptr {pointer}, {places.type} {places.name}")
    return f"<{places.lanes} x ptr>", name


def _all(mask: Vector | None, text: Text, lanes: int) -> Vector:
    return text.literal(True, "bool", lanes) if mask is None else mask


def gathered(text: Text, pointer: str, places: Vector, dtype: str, mask: Vector | None) -> Vector:
    """The element at the place of each lane; 0 where a mask is False."""
    memory, lanes = _memory_dtype(dtype), places.lanes
    kind = type_text(memory, lanes)
    mask = _all(mask, text, lanes)
    name = f"llvm.masked.gather.{suffix(memory, lanes)}.v{lanes}p0"
    pointers = _pointers(text, pointer, places, dtype)
    arguments = pointers, ("i32", str(size_of(dtype))), (mask.type, mask.name), (kind, "zeroinitializer")
    return _decoded(Vector(text, text.call(name, kind, *arguments, pure=False), memory, lanes), dtype)


def scattered(text: Text, pointer: str, places: Vector, dtype: str, value: Vector, mask: Vector | None) -> None:
    """Write the lanes to their places, where a mask is True."""
    value = _encoded(value, dtype)
    mask = _all(mask, text, places.lanes)
    name = f"llvm.masked.scatter.{suffix(value.dtype, places.lanes)}.v{places.lanes}p0"
    pointers = _pointers(text, pointer, places, dtype)
    text.call(name, "void", (value.type, value.name), pointers, ("i32", str(size_of(dtype))), (mask.type, mask.name))
