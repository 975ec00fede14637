"""The kinds of recurrent layers, and the block of arguments that their loops over time read.

All arguments are 64-bit words: the header of `thread_pool.Runner`, sizes, and for each array its address and strides.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch

from lit_ort.kernels.kernel_arguments import BLOCK_FUNCTION, COLUMN_BLOCKS, FINISH_FUNCTION, ROW_BLOCKS, WORD


@dataclass(frozen=True)
class Cell:
    """A kind of recurrent layer.

    Args:
        gates: the number of blocks of rows in its weights.
        saved: the blocks that a step saves for the gradient besides its output: for an LSTM the gates (input, forget,
            cell, output) and the cell's state; for a GRU the reset and the update gate, the state's part of the new
            gate, and the new gate.
        gradients: the blocks of a step's gradients: those of the gates; for a GRU those of the matmuls with the state
            (new, reset, update), followed by that of the matmul of the new gate with the input.
    """

    gates: int
    saved: int
    gradients: int

    @property
    def turned(self) -> int:
        """The position of the first block of gradients in the weights."""
        return 2 if self.gradients > self.gates else 0


# By mode; "tanh" and "relu" are plain recurrent layers.
CELLS: Mapping[str, Cell] = MappingProxyType(
    {"lstm": Cell(4, 5, 4), "gru": Cell(3, 4, 4), "tanh": Cell(1, 0, 1), "relu": Cell(1, 0, 1)}
)


# The inputs of the loops of a layer and of its gradient, in the order of the operators' arguments. A call has some.
FORWARD_INPUTS = ("matmuls", "state", "cell", "weight", "input_bias", "bias", "mode", "reverse", "tables", "places")
BACKWARD_INPUTS = (
    *("grad", "of_last", "of_last_cell", "state", "cell", "weight", "output", "saved"),
    *("mode", "reverse", "tables"),
)


def loop_outputs(mode: str, is_forward: bool) -> dict[str, int]:
    """The outputs of a loop that are not empty: their positions among the operator's results, by their names."""
    cells = {"last_cell": 2} if mode == "lstm" else {}
    if is_forward:
        return {"output": 0, "last": 1} | cells | ({"saved": 3} if CELLS[mode].saved else {})
    return {"gradients": 0, "of_state": 1} | ({"of_cell": 2} if cells else {})


@dataclass(frozen=True)
class PackedSteps:
    """The steps of packed rows: sequences sorted by their lengths, of which each step has the first so many.

    Args:
        tables: int64[4, length + 2], the number of rows and the place of the first one of each step in the order in
            which the layer runs, then the same in the opposite order; with no rows at both ends.
        reverse: whether the layer's steps run from the last to the first.
    """

    tables: torch.Tensor
    reverse: bool

    @property
    def length(self) -> int:
        return self.tables.shape[1] - 2

    @cached_property
    def rows(self) -> list[int]:
        """The number of rows of each step in the order of time."""
        return self.tables[2 * self.reverse, 1:-1].tolist()

    @cached_property
    def starts(self) -> list[int]:
        """The place of each step's first row among all rows, in the order of time."""
        return self.tables[2 * self.reverse + 1, 1:-1].tolist()


@dataclass(frozen=True)
class Layer:
    """One direction of a layer while it runs. The last dimension of all tensors is contiguous.

    Args:
        mode: the kind, of `CELLS`.
        reverse: whether the steps run from the last to the first.
        weight: float[gates * hidden, hidden], of the state; contiguous.
        input_bias, bias: float[gates * hidden], of the matmuls with the input and with the state; None for zeros.
        state: float[batch, hidden], before the first step.
        cell: the same for an LSTM's cell.
        output: float[length, batch, hidden].
        saved: float[length, batch, blocks * hidden], see `Cell`; None for plain layers, which save their output alone.
        matmuls: float[length, batch, gates * hidden], of the weights with the input; None in the backward.
        packed: the steps of packed rows, whose arrays are [rows, columns]; None if every step has all rows.
    """

    mode: str
    reverse: bool
    weight: torch.Tensor
    input_bias: torch.Tensor | None
    bias: torch.Tensor | None
    state: torch.Tensor
    cell: torch.Tensor | None
    output: torch.Tensor
    saved: torch.Tensor | None
    matmuls: torch.Tensor | None = None
    packed: PackedSteps | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The number of steps, the rows of the largest one, and the width of the state."""
        steps = len(self.output) if self.packed is None else self.packed.length
        return steps, len(self.state), self.state.shape[1]


@dataclass(frozen=True)
class LayerGradients:
    """The gradients of a layer while they are computed.

    Args:
        grad: float[length, batch, hidden], of the output.
        gates: float[length, batch, blocks * hidden], to be computed; see `Cell`.
        state: float[batch, hidden], that of the last state besides the output; becomes that of the state before the
            first step.
        cell: the same for an LSTM's cell.
    """

    grad: torch.Tensor
    gates: torch.Tensor
    state: torch.Tensor
    cell: torch.Tensor | None


_SIZES = ("steps", "rows", "hidden")
_POINTERS = ("weight", "input_bias", "bias", "packed", "step_rows", "step_starts", "zeros")
_ARRAYS = ("saved", "output", "state", "cell", "matmuls", "grad", "gradients", "of_state", "of_cell")
_HEADER = 1 + max(ROW_BLOCKS, COLUMN_BLOCKS, BLOCK_FUNCTION, FINISH_FUNCTION)
_NAMES = (*_SIZES, *_POINTERS, *(f"{name}.{part}" for name in _ARRAYS for part in ("address", "step", "row")))
WORDS = _HEADER + len(_NAMES)
PLACES: Mapping[str, int] = MappingProxyType({name: _HEADER + at for at, name in enumerate(_NAMES)})


@dataclass(frozen=True)
class Strided:
    """The address of an array's first row in the first step, and the distances of steps and rows in elements."""

    address: int = 0
    step: int = 0
    row: int = 0


def of_steps(tensor: torch.Tensor | None, reverse: bool) -> Strided:
    """An array of packed rows, or [steps, rows, columns], whose steps run from the last to the first if `reverse`."""
    if tensor is None or tensor.dim() == 2:
        return of_rows(tensor)
    step, row = tensor.stride(0), tensor.stride(1)
    start = tensor.data_ptr()
    if reverse:
        return Strided(start + (tensor.shape[0] - 1) * step * tensor.itemsize, -step, row)
    return Strided(start, step, row)


def of_rows(tensor: torch.Tensor | None) -> Strided:
    """An array [rows, columns]."""
    return Strided() if tensor is None else Strided(tensor.data_ptr(), 0, tensor.stride(0))


def pack(
    block: int, blocks: int, sizes: tuple[int, int, int], pointers: Mapping[str, int], arrays: Mapping[str, Strided]
) -> bytearray:
    """The block of arguments.

    Args:
        block: the address of the function of a block.
        blocks: their number.
        sizes: of the layer.
        pointers, arrays: by their names; those that are missing are null.
    """
    words = bytearray(WORD * WORDS)
    missing = Strided()
    places = [word for name in _ARRAYS for word in _words(arrays.get(name, missing))]
    addresses = [pointers.get(name, 0) for name in _POINTERS]
    struct.pack_into(f"<{len(_NAMES)}q", words, WORD * _HEADER, *sizes, *addresses, *places)
    for position, value in ((ROW_BLOCKS, blocks), (COLUMN_BLOCKS, 1), (BLOCK_FUNCTION, block)):
        struct.pack_into("<q", words, WORD * position, value)
    return words


def _words(array: Strided) -> tuple[int, int, int]:
    return array.address, array.step, array.row
