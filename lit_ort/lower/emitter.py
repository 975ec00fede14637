"""The interface for lowering one operator: names of values, constants, shapes, nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from lit_ort.lower.model import ModelBuilder
from lit_ort.runtime.elements import ELEMENTS
from lit_ort.runtime.program import MatmulNode

_NUMPY = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
}


class Emitter:
    """Writes the ONNX nodes of one FX node.

    Args:
        node: the FX node.
        builder: the model that receives the nodes.
        name_of: returns the ONNX value of an FX node.
        vector_of: returns the ONNX vector of symbolic sizes.
        matmul_of: adds a matmul on the threads of OpenMP, whose sizes can be symbolic, and returns its position; None
            if matmuls are ONNX Runtime's.
    """

    def __init__(
        self,
        node: fx.Node,
        builder: ModelBuilder,
        name_of: Callable[[fx.Node], str],
        vector_of: Callable[[Sequence[Any]], str],
        matmul_of: Callable[[MatmulNode], int] | None = None,
    ) -> None:
        self.node, self._builder = node, builder
        self._name_of, self._vector_of, self._matmul_of = name_of, vector_of, matmul_of

    @property
    def uses_openmp(self) -> bool:
        """Whether matmuls are custom operators, on the threads of OpenMP."""
        return self._matmul_of is not None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the node's result."""
        return self.node.meta["val"].dtype

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument of the node, by position or name."""
        node = self.node
        return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)

    def value(self, argument: Any, dtype: torch.dtype | None = None) -> str:
        """The ONNX value of a tensor or a number, cast to a dtype if one is given."""
        if not isinstance(argument, fx.Node):
            return self.scalar(argument, dtype or self.dtype)
        name = self._name_of(argument)
        original = argument.meta["val"].dtype
        return name if dtype is None or original == dtype else self.cast(name, dtype)

    def cast(self, name: str, dtype: torch.dtype) -> str:
        return self.op("Cast", name, to=ELEMENTS[dtype])

    def scalar(self, number: Any, dtype: torch.dtype) -> str:
        return self._builder.constant(np.array(number, dtype=_NUMPY[dtype]))

    def integers(self, numbers: Sequence[int]) -> str:
        """An int64 vector."""
        return self._builder.constant(np.array(numbers, dtype=np.int64))

    def sizes(self, sizes: Sequence[Any]) -> str:
        """An int64 vector of sizes, some of which can be dynamic."""
        values = [size.meta["val"] if isinstance(size, fx.Node) else size for size in sizes]
        if all(isinstance(size, int) for size in values):
            return self.integers(values)
        return self._vector_of(values)

    def op(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Adds a node with one output and returns the output's name."""
        return self._builder.node(operator, inputs, self.node.name, **attributes)

    def matmul(
        self,
        left: tuple[str, bool],
        right: tuple[str, bool],
        factors: torch.Tensor,
        added: tuple[str, bool] | None = None,
    ) -> str:
        """Adds a matmul on the threads of OpenMP and returns its output's name.

        Args:
            left, right: the name of each factor, and whether it is stored as its transpose.
            factors: an example of the left factor.
            added: the name of what is added to the matmul, and whether it has rows of its own.
        """
        assert self._matmul_of is not None
        shape = self.node.meta["val"].shape
        sizes = tuple([*(shape[:-2] or [1]), *shape[-2:], factors.shape[-1]])
        has_rows = None if added is None else added[1]
        index = self._matmul_of(MatmulNode(factors.dtype, sizes, (left[1], right[1]), has_rows, len(shape) == 3))
        inputs = [left[0], right[0], *([] if added is None else [added[0]])]
        fixed = [size if isinstance(size, int) else None for size in shape]
        return self._builder.matmul(index, inputs, (self.dtype, fixed), self.node.name)
