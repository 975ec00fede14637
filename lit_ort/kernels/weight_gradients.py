"""The gradients of convolutions' weights in machine code, made when one is first computed."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

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
from lit_ort.regions.element_types import size_of

# The arguments of calls of as many sizes are kept.
_MOST_SIZES = 256
# Blocks of depthwise convolutions, where there are enough images.
_DEPTHWISE_BLOCKS = 16


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


class Sizes(NamedTuple):
    """The sizes of a call: those of its tensors, its windows, and the number of threads."""

    grad: tuple[int, ...]
    images: tuple[int, ...]
    result: tuple[int, ...]
    windows: Windows
    threads: int


class _Kind(NamedTuple):
    """A kind of convolutions.

    Args:
        words: of a call besides those of all kinds, from its sizes, its dtype, and the width of vectors in bytes.
        text: of its code, from its dtype and the width of vectors in bytes.
    """

    words: Callable[[Sizes, str, int], dict[int, int]]
    text: Callable[[str, int], Text]


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
        self._codes: dict[tuple[_Kind, torch.dtype], MachineCode] = {}
        self._call = functools.lru_cache(_MOST_SIZES)(self._new_call)

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
        self._run(_PLAIN, grad, images, windows, result)

    def compute_depthwise(
        self, grad: torch.Tensor, images: torch.Tensor, windows: Windows, result: torch.Tensor
    ) -> None:
        """Computes the gradient of the weight of a convolution of each channel.

        Args:
            grad: float[batch, channels, out_height, out_width] with channels last.
            images: float[batch, channels, height, width] with channels last.
            windows: how the convolution reads images.
            result: float[parts, kernel_height, kernel_width, channels], contiguous; each part is of some images, and
                their number is that of `image_blocks`.
        """
        self._run(_DEPTHWISE, grad, images, windows, result.zero_())

    def image_blocks(self, images: torch.Tensor) -> int:
        """Into how many parts the gradient of a depthwise convolution's weight is cut, for many threads."""
        batch, channels = images.shape[:2]
        channel_blocks = _channel_blocks(channels, self._cpu.vector_bytes // images.dtype.itemsize)
        return max(1, min(batch, _DEPTHWISE_BLOCKS // channel_blocks))

    def _run(
        self, kind: _Kind, grad: torch.Tensor, images: torch.Tensor, windows: Windows, result: torch.Tensor
    ) -> None:
        sizes = Sizes(grad.shape, images.shape, result.shape, windows, torch.get_num_threads())
        call = self._call(kind, grad.dtype, sizes)
        arguments = (ctypes.c_int64 * words.WORDS).from_buffer_copy(call)
        arguments[matmul.LEFT] = grad.data_ptr()
        arguments[matmul.RIGHT] = images.data_ptr()
        arguments[matmul.RESULT] = result.data_ptr()
        self._runner.run(ctypes.addressof(arguments))

    def _new_call(self, kind: _Kind, dtype: torch.dtype, sizes: Sizes) -> bytes:
        """The arguments of calls with these sizes, without the addresses of tensors."""
        values = {BLOCK_FUNCTION: self._block(kind, dtype), COLUMN_BLOCKS: 1, **_shared_words(sizes)}
        values |= kind.words(sizes, DTYPES[dtype], self._cpu.vector_bytes)
        return bytes((ctypes.c_int64 * words.WORDS)(*(values.get(number, 0) for number in range(words.WORDS))))

    def _block(self, kind: _Kind, dtype: torch.dtype) -> int:
        """The address of the function that computes a part."""
        key = kind, dtype
        code = self._codes.get(key)
        if code is None:
            text = str(kind.text(DTYPES[dtype], self._cpu.vector_bytes))
            # Addresses are those of the code that is kept, if several threads make one.
            code = self._codes.setdefault(key, MachineCode(text, self._cpu))
        return code.address("block")


def _shared_words(sizes: Sizes) -> dict[int, int]:
    (_, channels, height, width), windows = sizes.images, sizes.windows
    return {
        words.HEIGHT: height,
        words.ROW_ELEMENTS: width * channels,
        words.CHANNELS: channels,
        words.OUT_HEIGHT: sizes.grad[2],
        words.OUT_WIDTH: sizes.grad[3],
        words.ROW_STRIDE: windows.stride[0],
        words.ROW_PADDING: windows.padding[0],
        words.COLUMN_PADDING: windows.padding[1],
        words.ROW_DILATION: windows.dilation[0],
        words.COLUMN_DILATION: windows.dilation[1],
        words.PIXEL_DISTANCE: windows.stride[1] * channels,
    }


def _plain_words(sizes: Sizes, dtype: str, vector_bytes: int) -> dict[int, int]:
    outputs, runs, elements = sizes.result
    tile = MatmulText(dtype, vector_bytes)
    blocks, axis = _blocks(-(-outputs // tile.rows), -(-runs * elements // tile.columns), sizes.threads)
    return {
        ROW_BLOCKS: blocks,
        matmul.ROWS: outputs,
        matmul.COLUMNS: runs * elements,
        matmul.INNER: math.prod(sizes.grad) // outputs,
        matmul.LEFT_ROW: 1,
        matmul.LEFT_COLUMN: outputs,
        matmul.RESULT_ROW: runs * elements,
        matmul.AXIS: axis,
        matmul.COUNT: 1,
        words.RUN: elements,
        words.RUNS_ACROSS: sizes.windows.runs_across,
    }


def _depthwise_words(sizes: Sizes, dtype: str, vector_bytes: int) -> dict[int, int]:
    parts, height, width, channels = sizes.result
    return {
        ROW_BLOCKS: parts * _channel_blocks(channels, vector_bytes // size_of(dtype)),
        matmul.COUNT: sizes.images[0],
        words.PARTS: parts,
        words.KERNEL_HEIGHT: height,
        words.KERNEL_WIDTH: width,
    }


def _channel_blocks(channels: int, lanes: int) -> int:
    return -(-channels // (DEPTHWISE_VECTORS * lanes))


def _blocks(row_units: int, column_units: int, threads: int) -> tuple[int, int]:
    """Into how many blocks a result is cut, and of what: where the largest part is smaller."""
    largest = {matmul.BY_ROWS: row_units, matmul.BY_COLUMNS: column_units}
    axis = min(largest, key=lambda one: -(-largest[one] // threads) / largest[one])
    return min(threads, largest[axis]), axis


_PLAIN = _Kind(_plain_words, weight_gradient_text)
_DEPTHWISE = _Kind(_depthwise_words, depthwise_gradient_text)
