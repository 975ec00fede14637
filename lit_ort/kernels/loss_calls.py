"""An output layer with its cross entropy as a kernel of native sessions, which computes the gradients too."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from lit_ort.kernels.kernel_arguments import BLOCK_FUNCTION, COLUMN_BLOCKS, DTYPES, FACTOR_DTYPES, WORD, sum_dtype
from lit_ort.kernels.kernel_calls import KernelCache
from lit_ort.kernels.loss_arguments import (
    BAD_LABEL,
    BUFFERS,
    CHUNK,
    CLASSES,
    GRADIENTS,
    IGNORED,
    IS_MEAN,
    ROWS,
    TENSORS,
    WIDTH,
    WORDS,
    buffer_offsets,
    chunk_rows,
)
from lit_ort.kernels.loss_text import loss_text
from lit_ort.kernels.machine_code import MachineCode
from lit_ort.kernels.operator_entry import CallWords


@dataclass(frozen=True)
class LossCall:
    """The loss of an output layer, over contiguous values, and its gradients.

    Args:
        dtype: of the factors; other values are float32 if these are bfloat16, and otherwise of the same dtype, but the
            labels are int64.
        rows, width, classes: the sizes of the layer.
        inputs: the names of the inputs that there are, in the order of `INPUTS`.
        gradients: the names of the gradients to compute, in the order of `GRADIENTS`.
        ignore_index: the label of rows that are ignored.
        mean: whether the loss is the mean over rows, weighted by class, instead of the sum.
    """

    dtype: torch.dtype
    rows: int
    width: int
    classes: int
    inputs: tuple[str, ...]
    gradients: tuple[str, ...]
    ignore_index: int
    mean: bool

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the outputs by their names, in order; the working memory follows them."""
        shapes = (self.rows, self.width), (self.classes, self.width), (self.classes,)
        given = dict(zip(GRADIENTS, shapes, strict=True))
        return {"loss": ()} | {name: given[name] for name in self.gradients}


class LossCode:
    """The machine code of losses.

    Args:
        kernels: of this process.
    """

    def __init__(self, kernels: KernelCache) -> None:
        self._kernels = kernels
        self._codes = dict[torch.dtype, MachineCode]()

    def of(self, dtype: torch.dtype) -> MachineCode:
        """The functions `run` and `rows` for a dtype."""
        if dtype not in self._codes:
            kernels, cpu = self._kernels, self._kernels.cpu
            gemm = kernels.matmuls.functions(dtype).gemm
            names = DTYPES[sum_dtype(dtype)], FACTOR_DTYPES[dtype]
            text = loss_text(*names, cpu.vector_bytes, gemm, kernels.runner.address)
            self._codes[dtype] = MachineCode(str(text), cpu, kernels.library.addresses(text.library))
        return self._codes[dtype]


class LossCallWords(CallWords):
    """The words of a loss's calls.

    Args:
        code: of losses.
        call: the loss.
        module: the name of the module that it comes from, for messages; empty if unknown.
    """

    def __init__(self, code: LossCode, call: LossCall, module: str) -> None:
        self._call, self._module = call, module
        self._code = machine_code = code.of(call.dtype)
        sizes = sum_dtype(call.dtype).itemsize, call.dtype.itemsize
        chunk = chunk_rows(call.rows, call.classes, sizes[0])
        offsets, scratch = buffer_offsets(chunk, call.rows, call.width, call.classes, *sizes)
        names = [*call.inputs, *call.outputs, "scratch"]
        self._arguments = words = (ctypes.c_int64 * (WORDS + len(names)))()
        values = {
            COLUMN_BLOCKS: 1,
            BLOCK_FUNCTION: machine_code.address("rows"),
            ROWS: call.rows,
            WIDTH: call.width,
            CLASSES: call.classes,
            CHUNK: chunk,
            IGNORED: call.ignore_index,
            IS_MEAN: int(call.mean),
            **{TENSORS[name]: position for position, name in enumerate(names, WORDS)},
            **{BUFFERS[name]: offset for name, offset in offsets.items()},
        }
        for position, value in values.items():
            words[position] = value
        address = ctypes.addressof(words)
        shapes = [*call.outputs.values(), (-(-scratch // sizes[0]),)]
        super().__init__(len(call.inputs), shapes, address, address + WORD * WORDS, machine_code.address("run"))

    def failure(self) -> str:
        """Why the call that has just failed did so."""
        place = f"the loss of {self._module}" if self._module else "the loss"
        return (
            f"{place} failed: label {self._arguments[BAD_LABEL]} is out of range: the loss has {self._call.classes} "
            f"classes, so labels must be 0 to {self._call.classes - 1}, or the ignore_index of cross_entropy"
        )
