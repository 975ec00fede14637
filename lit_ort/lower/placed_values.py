"""The large values of a native session, and when each is in use: their memory is laid out before a run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import onnx
import torch

from lit_ort._compat.torch_sizes import hint_of
from lit_ort.capture.symbolic_terms import SymbolSources, terms_of
from lit_ort.runtime.buffers import SMALL_BYTES
from lit_ort.runtime.engines.engine_interface import (
    DOMAIN,
    IN_PLACE_OPERATOR,
    KERNEL_DOMAIN,
    KERNEL_OPERATORS,
    MICROSOFT,
    OPERATOR,
)
from lit_ort.runtime.program import PlacedValue

# Each placed value takes part of a microsecond of a run; below this size the memory that it saves is worth less.
_FEWEST_BYTES = 2**16
_FEWEST_OF_ALL = SMALL_BYTES
# Operators whose results have memory of their own; those of others can be views of their inputs.
_OWNERS = frozenset(
    {
        *((KERNEL_DOMAIN, operator) for operator in KERNEL_OPERATORS),
        (DOMAIN, OPERATOR),
        ("", "MatMul"),
        ("", "Gemm"),
        (MICROSOFT, "FusedMatMul"),
    }
)
# The dtype and the symbolic shape of a value.
ValueType = tuple[torch.dtype, Sequence[int | torch.SymInt]]


def placed_values(
    nodes: Sequence[onnx.NodeProto],
    types: Mapping[str, ValueType],
    returned: Collection[str],
    gradients: Collection[str],
    sources: SymbolSources,
) -> tuple[PlacedValue, ...]:
    """The values whose memory is laid out, in the order in which they are computed; none if they are few bytes.

    Args:
        nodes: in the order in which they run.
        types: of the values that can be placed, by their names.
        returned: the names of all results.
        gradients: the results that no one is expected to keep beyond a step. Keeping another one would keep the memory
            of the whole run.
        sources: the input and dimension of each symbolic size.
    """
    found = _Uses(nodes, types)
    kept = frozenset(returned) - frozenset(gradients)
    placed = list[PlacedValue]()
    for name, (first, last) in found.uses.items():
        names = found.names[name]
        if name not in types or _bytes(*types[name]) < _FEWEST_BYTES or not kept.isdisjoint(names):
            continue
        end, position = last if frozenset(names).isdisjoint(returned) else len(nodes), len(placed)
        for value in names:
            dtype, shape = types[value]
            owner = None if value == name else position
            placed.append(PlacedValue(value, dtype, terms_of(shape, sources), first, end, owner))
    total = sum(_bytes(*types[value.name]) for value in placed if value.owner is None)
    return tuple(placed) if total >= _FEWEST_OF_ALL else ()


class _Uses:
    """The use of the memory of values that own it.

    Attributes:
        uses: the first and the last node that use the memory of each value.
        names: the values in this memory: the value itself first, then what nodes made of it by writing into it.
    """

    def __init__(self, nodes: Sequence[onnx.NodeProto], types: Mapping[str, ValueType]) -> None:
        self._types = types
        self.uses: dict[str, tuple[int, int]] = {}
        self.names: dict[str, list[str]] = {}
        # The values in whose memory a value can be.
        owners: dict[str, frozenset[str]] = {}
        for position, node in enumerate(nodes):
            read = frozenset[str]().union(*(owners.get(name, ()) for name in node.input))
            self.uses.update({name: (self.uses[name][0], position) for name in read if name in self.uses})
            operator, outputs = (node.domain, node.op_type), list(node.output)
            if operator == (DOMAIN, IN_PLACE_OPERATOR):
                written = owners.get(node.input[0], frozenset())
                owners[outputs[0]] = self._write(written, outputs[0])
                del outputs[0]
            elif operator not in _OWNERS:
                owners.update(dict.fromkeys(outputs, read))
                continue
            for name in outputs:
                owners[name], self.uses[name], self.names[name] = frozenset({name}), (position, position), [name]

    def _write(self, written: frozenset[str], result: str) -> frozenset[str]:
        """The owners of the memory of a value that is written into another's; none if its place is not known."""
        known = [name for name in written if name in self.uses]
        if len(written) == 1 and known and self._is_alike(known[0], result):
            self.names[known[0]].append(result)
            return written
        for name in known:
            del self.uses[name]
        return frozenset()

    def _is_alike(self, owner: str, value: str) -> bool:
        types = self._types
        return owner in types and value in types and _bytes(*types[owner]) == _bytes(*types[value])


def _bytes(dtype: torch.dtype, shape: Sequence[int | torch.SymInt]) -> int:
    return math.prod(map(hint_of, shape)) * dtype.itemsize
