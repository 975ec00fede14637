"""Recurrent layers as loops over time in machine code, made when a kind of layer first runs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from lit_ort._compat.openmp import find_openmp
from lit_ort.kernels.kernel_arguments import DTYPES
from lit_ort.kernels.machine_code import Cpu, MachineCode, host_cpu
from lit_ort.kernels.packed_recurrent_text import backward_text, forward_text
from lit_ort.kernels.recurrent_arguments import CELLS, Layer, LayerGradients, Strided, of_rows, of_steps, pack
from lit_ort.kernels.recurrent_text import lanes_of, rows_at_once
from lit_ort.kernels.thread_pool import Runner

# In multiplications: below, threads cost more than they save. A cell counts as so many of each of its gates.
_ONE_BLOCK, _CELL = 300_000, 30


@dataclass(frozen=True)
class LoopCode:
    """The functions of a loop.

    Attributes:
        pack, block: the addresses of `pack(arguments)` and `block(arguments, number)`.
    """

    code: MachineCode

    @cached_property
    def pack(self) -> int:
        return self.code.address("pack")

    @cached_property
    def block(self) -> int:
        return self.code.address("block")

    @cached_property
    def call_pack(self) -> Callable[[int], None]:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.pack)


class RecurrentLoops:
    """The loops of this process. Thread-safe.

    Args:
        cpu: what to make code for; by default, the CPU of this machine.

    Raises:
        KernelError: there is no code for this CPU.
    """

    def __init__(self, cpu: Cpu | None = None) -> None:
        self.cpu = cpu or host_cpu()
        self.runner = Runner(self.cpu, find_openmp())
        self._codes: dict[tuple[str, torch.dtype, bool, bool], LoopCode] = {}
        self._lock = threading.Lock()

    def packed_elements(self, mode: str, hidden: int, dtype: torch.dtype) -> int:
        """The elements of the packed weights of a layer."""
        # The columns are padded to whole groups, of two vectors at most.
        columns = 2 * lanes_of(DTYPES[dtype], self.cpu.vector_bytes)
        return CELLS[mode].gates * hidden * (-(-hidden // columns) * columns)

    def forward(self, layer: Layer, packed: torch.Tensor) -> None:
        """Computes what a layer saves and its output, in place; `packed` is memory for its packed weights."""
        arrays = {**_arrays(layer, layer.reverse), "matmuls": of_steps(layer.matmuls, layer.reverse)}
        self._call(layer, packed, arrays, True)

    def backward(self, layer: Layer, gradients: LayerGradients, packed: torch.Tensor) -> None:
        """Computes the gradients of a layer's gates and of its first state, in place."""
        arrays = {
            **_arrays(layer, not layer.reverse),
            "grad": of_steps(gradients.grad, not layer.reverse),
            "gradients": of_steps(gradients.gates, not layer.reverse),
            "of_state": of_rows(gradients.state),
            "of_cell": of_rows(gradients.cell),
        }
        self._call(layer, packed, arrays, False)

    def _call(self, layer: Layer, packed: torch.Tensor, arrays: Mapping[str, Strided], is_forward: bool) -> None:
        dtype = layer.output.dtype
        code = self.loop(layer.mode, dtype, is_forward, layer.packed is not None)
        # Both stay alive until the loop has run.
        (rows, starts), zeros = _packed_steps(layer, is_forward)
        given = {
            "weight": layer.weight,
            "input_bias": layer.input_bias,
            "bias": layer.bias,
            "packed": packed,
            "step_rows": rows,
            "step_starts": starts,
            "zeros": zeros,
        }
        pointers = {name: tensor.data_ptr() for name, tensor in given.items() if tensor is not None}
        rows = layer.output.numel() // layer.sizes[2]
        blocks = self.blocks(layer.mode, layer.sizes, rows, is_forward)
        words = pack(code.block, blocks, layer.sizes, pointers, arrays)
        address = ctypes.addressof(ctypes.c_char.from_buffer(words))
        code.call_pack(address)
        self.runner.run(address)

    def blocks(self, mode: str, sizes: tuple[int, int, int], total: int, is_forward: bool) -> int:
        """Into how many blocks of rows a layer is cut, whose steps have `total` rows. Results don't depend on it."""
        _, rows, hidden = sizes
        gates = CELLS[mode].gates
        if total * hidden * gates * (hidden + _CELL) < _ONE_BLOCK:
            return 1
        groups = -(-rows // rows_at_once(gates if is_forward else 1, self.cpu.vector_bytes))
        return max(1, min(groups, torch.get_num_threads()))

    def loop(self, mode: str, dtype: torch.dtype, is_forward: bool, is_packed: bool = False) -> LoopCode:
        """The loop of a kind of layers, or of their gradients."""
        key = mode, dtype, is_forward, is_packed
        with self._lock:
            if key not in self._codes:
                write = forward_text if is_forward else backward_text
                text = str(write(mode, DTYPES[dtype], self.cpu.vector_bytes, is_packed))
                self._codes[key] = LoopCode(MachineCode(text, self.cpu))
            return self._codes[key]


def _packed_steps(layer: Layer, is_forward: bool) -> tuple[Sequence[torch.Tensor | None], torch.Tensor | None]:
    """The rows and starts of a packed layer's steps in the order in which they run, and zeros."""
    if layer.packed is None:
        return (None, None), None
    forward, backward = layer.packed.tables[:, 1:].split(2)
    rows, starts = forward if is_forward else backward
    return (rows, starts), layer.weight.new_zeros(len(layer.weight))


def _arrays(layer: Layer, reverse: bool) -> dict[str, Strided]:
    return {
        "saved": of_steps(layer.saved, reverse),
        "output": of_steps(layer.output, reverse),
        "state": of_rows(layer.state),
        "cell": of_rows(layer.cell),
    }
