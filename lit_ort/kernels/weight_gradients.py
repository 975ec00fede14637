"""The gradients of convolutions' weights in machine code, made when one is first computed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lit_ort._compat.openmp import find_openmp
from lit_ort.kernels import matmul_arguments as matmul
from lit_ort.kernels import weight_gradient_arguments as words
from lit_ort.kernels.depthwise_gradient_text import VECTORS as DEPTHWISE_VECTORS
from lit_ort.kernels.depthwise_gradient_text import depthwise_gradient_text
from lit_ort.kernels.kernel_arguments import BLOCK_FUNCTION, COLUMN_BLOCKS, DTYPES, ROW_BLOCKS
from lit_ort.kernels.machine_code import Cpu, MachineCode, host_cpu
from lit_ort.kernels.matmul_text import MatmulText
from lit_ort.kernels.thread_pool import Runner
from lit_ort.kernels.vector_text import Text
from lit_ort.kernels.weight_gradient_text import weight_gradient_text


@dataclass(frozen=True)
class Windows:
    """How a convolution reads images.

    Args:
        kernel, stride, padding, dilation: height and width, in pixels.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def runs_across(self) -> int:
        """The runs of elements that are adjacent in an image, of a row of the kernel."""
        return 1 if self.dilation[1] == 1 else self.kernel[1]


class WeightGradients:
    """The gradients of weights of this process.

    Args:
        cpu: what to make code for; by default, the CPU of this machine.

    Raises:
        KernelError: there is no code for this CPU.
    """

    def __init__(self, cpu: Cpu | None = None) -> None:
        self._cpu = cpu or host_cpu()
        self._runner = Runner(self._cpu, find_openmp())
        self._codes: dict[tuple[Callable[[str, int], Text], torch.dtype], MachineCode] = {}

    def run_elements(self, windows: Windows, channels: int, dtype: torch.dtype) -> tuple[int, int]:
        """The elements of a run, and those that a result has for it: whole vectors."""
        elements = windows.kernel[1] // windows.runs_across * channels
        lanes = self._cpu.vector_bytes // dtype.itemsize
        return elements, -(-elements // lanes) * lanes

    def compute(self, grad: torch.Tensor, images: torch.Tensor, windows: Windows, result: torch.Tensor) -> None:
        """Computes the gradient of a weight.

        Args:
            grad: float[batch, outputs, out_height, out_width] with channels last.
            images: float[batch, channels, height, width] with channels last.
            windows: how the convolution reads images.
            result: float[outputs, runs, elements], contiguous, with the elements of `run_elements`.
        """
        outputs, columns = len(result), result.shape[1] * result.shape[2]
        tile = MatmulText(DTYPES[grad.dtype], self._cpu.vector_bytes)
        blocks, axis = _blocks(-(-outputs // tile.rows), -(-columns // tile.columns))
        values = {
            ROW_BLOCKS: blocks,
            BLOCK_FUNCTION: self._block(weight_gradient_text, grad.dtype),
            matmul.ROWS: outputs,
            matmul.COLUMNS: columns,
            matmul.INNER: grad.numel() // outputs,
            matmul.LEFT_ROW: 1,
            matmul.LEFT_COLUMN: outputs,
            matmul.RESULT_ROW: columns,
            matmul.AXIS: axis,
            matmul.COUNT: 1,
            words.RUN: result.shape[2],
            words.RUNS_ACROSS: windows.runs_across,
        }
        self._run(grad, images, windows, result, values)

    def compute_depthwise(
        self, grad: torch.Tensor, images: torch.Tensor, windows: Windows, result: torch.Tensor
    ) -> None:
        """Computes the gradient of the weight of a convolution of each channel.

        Args:
            grad: float[batch, channels, out_height, out_width] with channels last.
            images: float[batch, channels, height, width] with channels last.
            windows: how the convolution reads images.
            result: float[kernel_height, kernel_width, channels], contiguous.
        """
        lanes = self._cpu.vector_bytes // grad.dtype.itemsize
        values = {
            ROW_BLOCKS: -(-result.shape[2] // (DEPTHWISE_VECTORS * lanes)),
            BLOCK_FUNCTION: self._block(depthwise_gradient_text, grad.dtype),
            matmul.COUNT: len(images),
            words.KERNEL_HEIGHT: windows.kernel[0],
            words.KERNEL_WIDTH: windows.kernel[1],
        }
        self._run(grad, images, windows, result.zero_(), values)

    def _block(self, write: Callable[[str, int], Text], dtype: torch.dtype) -> int:
        """The address of the function of a text."""
        key = write, dtype
        code = self._codes.get(key)
        if code is None:
            text = str(write(DTYPES[dtype], self._cpu.vector_bytes))
            # Addresses are those of the code that is kept, if several threads make one.
            code = self._codes.setdefault(key, MachineCode(text, self._cpu))
        return code.address("block")

    def _run(
        self,
        grad: torch.Tensor,
        images: torch.Tensor,
        windows: Windows,
        result: torch.Tensor,
        values: Mapping[int, int],
    ) -> None:
        channels, height, width = images.shape[1:]
        arguments = (ctypes.c_int64 * words.WORDS)()
        shared = {
            COLUMN_BLOCKS: 1,
            matmul.LEFT: grad.data_ptr(),
            matmul.RIGHT: images.data_ptr(),
            matmul.RESULT: result.data_ptr(),
            words.HEIGHT: height,
            words.ROW_ELEMENTS: width * channels,
            words.CHANNELS: channels,
            words.OUT_HEIGHT: grad.shape[2],
            words.OUT_WIDTH: grad.shape[3],
            words.ROW_STRIDE: windows.stride[0],
            words.ROW_PADDING: windows.padding[0],
            words.COLUMN_PADDING: windows.padding[1],
            words.ROW_DILATION: windows.dilation[0],
            words.COLUMN_DILATION: windows.dilation[1],
            words.PIXEL_DISTANCE: windows.stride[1] * channels,
        }
        for position, value in (shared | dict(values)).items():
            arguments[position] = value
        self._runner.run(ctypes.addressof(arguments))


def _blocks(row_units: int, column_units: int) -> tuple[int, int]:
    """Into how many blocks a result is cut, and of what: where the largest part is smaller."""
    threads = torch.get_num_threads()
    largest = {matmul.BY_ROWS: row_units, matmul.BY_COLUMNS: column_units}
    axis = min(largest, key=lambda one: -(-largest[one] // threads) / largest[one])
    return min(threads, largest[axis]), axis
