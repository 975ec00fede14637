"""Pairs of bfloat16 numbers, each as one number of 32 bits, whose products are added in float32.

Source: `VDPBF16PS` of Intel's manual, volume 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from lit_ort.kernels.vector_memory import loaded
from lit_ort.kernels.vector_text import Text, Vector, type_text

_DOT_PRODUCT = "llvm.x86.avx512bf16.dpbf16ps.512"


def multiply_add_pairs(left: Vector, right: Vector, total: Vector) -> Vector:
    """The total, float32, and the two products of each pair."""
    kind = f"<{2 * total.lanes} x bfloat>"
    pairs = [(kind, total.text.value(f"bitcast {one.type} {one.name} to {kind}")) for one in (right, left)]
    return total.made_of_call(_DOT_PRODUCT, total.type, (total.type, total.name), *pairs)


def as_pairs(elements: Vector) -> Vector:
    """Neighbours, int16, as pairs, float32."""
    return _as_floats(elements.text, elements, elements.lanes // 2)


def loaded_pairs(
    text: Text,
    sources: Sequence[str],
    place: str,
    lanes: int,
    masks: Sequence[Vector | None] = (None, None),
    has_second: str = "true",
) -> Vector:
    """Pairs, float32, of the elements of two arrays of bfloat16.

    Args:
        text: that is being written.
        sources: the addresses of the arrays.
        place, lanes: the first element of each, and their number.
        masks: which elements are read; others are 0.
        has_second: whether there are those of the second array; they are 0 otherwise.
    """
    pairs = zip(sources, masks, strict=True)
    first, second = (loaded(text, source, place, "int16", lanes, mask) for source, mask in pairs)
    if has_second != "true":
        second = second & Vector(text, text.value(f"sext i1 {has_second} to i16"), "int16", 0)
    kind, order = first.type, ", ".join(f"i32 {k % 2 * lanes + k // 2}" for k in range(2 * lanes))
    joined = f"shufflevector {kind} {first.name}, {kind} {second.name}, <{2 * lanes} x i32> <{order}>"
    return _as_floats(text, Vector(text, text.value(joined), "int16", 2 * lanes), lanes)


def _as_floats(text: Text, elements: Vector, lanes: int) -> Vector:
    name = text.value(f"bitcast {elements.type} {elements.name} to {type_text('float32', lanes)}")
    return Vector(text, name, "float32", lanes)
