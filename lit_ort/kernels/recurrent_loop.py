"""Recurrent layers as loops over time in machine code, made when a kind of layer first runs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lit_ort.kernels.machine_code import Cpu, MachineCode, host_cpu
from lit_ort.kernels.packed_recurrent_text import backward_text, forward_text
from lit_ort.kernels.recurrent_arguments import CELLS, DTYPES, Layer, LayerGradients, Strided, of_rows, of_steps, pack
from lit_ort.kernels.recurrent_text import lanes_of, rows_at_once
from lit_ort.kernels.thread_pool import Runner, find_openmp

# In multiplications: below, threads cost more than they save. A cell counts as so many of each of its gates.
_ONE_BLOCK, _CELL = 300_000, 30


@dataclass(frozen=True)
class _Code:
    """The functions of a loop: `pack(arguments)`, and the address of `block(arguments, number)`."""

    code: MachineCode
    pack: Callable[[int], None]
    block: int


class RecurrentLoops:
    """The loops of this process. Thread-safe.

    Args:
        cpu: what to make code for; by default, the CPU of this machine.

    Raises:
        KernelError: there is no code for this CPU.
    """

    def __init__(self, cpu: Cpu | None = None) -> None:
        self.cpu = cpu or host_cpu()
        self._runner = Runner(self.cpu, find_openmp())
        self._codes: dict[tuple[str, torch.dtype, bool, bool], _Code] = {}
        self._lock = threading.Lock()

    def packed_elements(self, mode: str, hidden: int, dtype: torch.dtype) -> int:
        """The elements of the packed weights of a layer."""
        # The columns are padded to whole groups, of two vectors at most.
        columns = 2 * lanes_of(DTYPES[dtype], self.cpu.vector_bytes)
        return CELLS[mode].gates * hidden * (-(-hidden // columns) * columns)

    def forward(self, layer: Layer, packed: torch.Tensor) -> None:
        """Computes what a layer saves and its output, in place; `packed` is memory for its packed weights."""
        self._call(layer, packed, [*_arrays(layer, layer.reverse), *[Strided()] * 4], True)

    def backward(self, layer: Layer, gradients: LayerGradients, packed: torch.Tensor) -> None:
        """Computes the gradients of a layer's gates and of its first state, in place."""
        arrays = [
            *_arrays(layer, not layer.reverse),
            of_steps(gradients.grad, not layer.reverse),
            of_steps(gradients.gates, not layer.reverse),
            of_rows(gradients.state),
            of_rows(gradients.cell),
        ]
        self._call(layer, packed, arrays, False)

    def _call(self, layer: Layer, packed: torch.Tensor, arrays: list[Strided], is_forward: bool) -> None:
        code = self._code(layer, is_forward)
        # Both stay alive until the loop has run.
        table, zeros = _packed_steps(layer, layer.reverse == is_forward)
        given = (layer.weight, layer.input_bias, layer.bias, packed, *table, zeros)
        pointers = tuple(0 if tensor is None else tensor.data_ptr() for tensor in given)
        words = pack(code.block, self._blocks(layer, is_forward), layer.sizes, pointers, arrays)
        address = ctypes.addressof(ctypes.c_char.from_buffer(words))
        code.pack(address)
        self._runner.run(address)

    def _blocks(self, layer: Layer, is_forward: bool) -> int:
        """Into how many blocks of rows a layer is cut. Results don't depend on it."""
        _, rows, hidden = layer.sizes
        gates = CELLS[layer.mode].gates
        if layer.output.numel() * gates * (hidden + _CELL) < _ONE_BLOCK:
            return 1
        groups = -(-rows // rows_at_once(gates if is_forward else 1, self.cpu.vector_bytes))
        return max(1, min(groups, torch.get_num_threads()))

    def _code(self, layer: Layer, is_forward: bool) -> _Code:
        dtype, is_packed = layer.output.dtype, layer.packed is not None
        key = layer.mode, dtype, is_forward, is_packed
        with self._lock:
            if key not in self._codes:
                write = forward_text if is_forward else backward_text
                code = MachineCode(str(write(layer.mode, DTYPES[dtype], self.cpu.vector_bytes, is_packed)), self.cpu)
                function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address("pack"))
                self._codes[key] = _Code(code, function, code.address("block"))
            return self._codes[key]


def _packed_steps(layer: Layer, reverse: bool) -> tuple[Sequence[torch.Tensor | None], torch.Tensor | None]:
    """The rows and starts of a packed layer's steps in the order in which they run, and zeros."""
    if layer.packed is None:
        return (None, None), None
    rows, starts = layer.packed.table(reverse)[:, 1:]
    return (rows, starts), layer.weight.new_zeros(len(layer.weight))


def _arrays(layer: Layer, reverse: bool) -> list[Strided]:
    saved = of_steps(layer.saved, reverse) if CELLS[layer.mode].saved else Strided()
    return [saved, of_steps(layer.output, reverse), of_rows(layer.state), of_rows(layer.cell)]
