"""Convolutions of images with channels last, and their gradients, in machine code, made when one is first computed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from lit_ort._compat.openmp import find_openmp
from lit_ort.kernels import matmul_arguments as matmul
from lit_ort.kernels.bfloat16_convolution_text import bfloat16_convolution_text
from lit_ort.kernels.bfloat16_weight_gradient_text import bfloat16_weight_gradient_text
from lit_ort.kernels.convolution_arguments import image_blocks, is_depthwise
from lit_ort.kernels.convolution_text import convolution_text
from lit_ort.kernels.convolution_words import (
    Arguments,
    Machine,
    Sizes,
    Windows,
    convolution_words,
    depthwise_gradient_words,
    depthwise_words,
    runs_of,
    weight_gradient_words,
)
from lit_ort.kernels.depthwise_convolution_text import depthwise_convolution_text
from lit_ort.kernels.depthwise_gradient_text import depthwise_gradient_text
from lit_ort.kernels.kernel_arguments import BLOCK_FUNCTION, COLUMN_BLOCKS, DTYPES, WORD, sum_dtype
from lit_ort.kernels.machine_code import Cpu, MachineCode, host_cpu
from lit_ort.kernels.operator_entry import CallWords
from lit_ort.kernels.thread_pool import Runner
from lit_ort.kernels.vector_text import Text
from lit_ort.kernels.weight_gradient_text import weight_gradient_text

# The arguments of calls of as many sizes are kept.
_MOST_SIZES = 256


class Kind(NamedTuple):
    """A kind of convolutions.

    Args:
        text: of its code, from its dtype and the width of vectors in bytes.
        words: the arguments of a call.
        text_of_pairs: of its code for bfloat16, from the width of vectors; None if there is none.
    """

    text: Callable[[str, int], Text]
    words: Callable[[Sizes, Machine], Arguments]
    text_of_pairs: Callable[[int], Text] | None = None


# By the `kind` of `lit_ort.runtime.program.ConvolutionNode`, and whether each channel is convolved by itself.
_KINDS = {
    ("convolution", False): Kind(
        convolution_text, functools.partial(convolution_words, is_gradient=False), bfloat16_convolution_text
    ),
    ("image_gradient", False): Kind(
        convolution_text, functools.partial(convolution_words, is_gradient=True), bfloat16_convolution_text
    ),
    ("weight_gradient", False): Kind(weight_gradient_text, weight_gradient_words, bfloat16_weight_gradient_text),
    ("convolution", True): Kind(depthwise_convolution_text, functools.partial(depthwise_words, is_gradient=False)),
    ("image_gradient", True): Kind(depthwise_convolution_text, functools.partial(depthwise_words, is_gradient=True)),
    ("weight_gradient", True): Kind(depthwise_gradient_text, depthwise_gradient_words),
}


class Convolutions:
    """The convolutions of this process.

    Values of images have the shape [batch, channels, height, width] and channels last.

    Args:
        cpu: what to make code for; by default, the CPU of this machine.

    Attributes:
        runner: computes the blocks of a call on OpenMP's threads.
        multiplies_bfloat16: whether there is code for images and weights of bfloat16, of an even number of channels.

    Raises:
        KernelError: there is no code for this CPU.
    """

    def __init__(self, cpu: Cpu | None = None) -> None:
        self._cpu = cpu or host_cpu()
        self.runner = Runner(self._cpu, find_openmp())
        self.multiplies_bfloat16 = self._cpu.multiplies_bfloat16
        self._codes: dict[tuple[Callable[[str, int], Text], torch.dtype], MachineCode] = {}
        self.arguments = functools.lru_cache(_MOST_SIZES)(self._new_arguments)

    def compute(
        self, images: torch.Tensor, weight: torch.Tensor, windows: Windows, is_gradient: bool, result: torch.Tensor
    ) -> None:
        """Computes a convolution or, from the gradient of its result, that of its images.

        Args:
            images: float[batch, channels, height, width].
            weight: float[outputs, kernel_height, kernel_width, channels], contiguous, of the convolution;
                float[kernel_height, kernel_width, channels] if each channel is convolved by itself.
            windows: how the convolution reads its images.
            is_gradient: whether the gradient is computed; `images` then is that of the result.
            result: float[batch, outputs, out_height, out_width].
        """
        kind = _KINDS["image_gradient" if is_gradient else "convolution", weight.dim() == 3]
        if result.numel():
            self._run(kind, (images, result), windows, (images, weight, result))

    def runs(self, windows: Windows, channels: int, dtype: torch.dtype) -> tuple[int, int]:
        """The runs of a weight's gradient, and the elements that it has for each: whole vectors."""
        return runs_of(windows, channels, self._cpu.vector_bytes // sum_dtype(dtype).itemsize)

    def compute_weight_gradient(
        self, grad: torch.Tensor, images: torch.Tensor, windows: Windows, result: torch.Tensor
    ) -> None:
        """Computes the gradient of a weight.

        Args:
            grad: float[batch, outputs, out_height, out_width].
            images: float[batch, channels, height, width].
            windows: how the convolution reads images.
            result: float[outputs, runs, elements], contiguous, with the sizes of `runs`. If each channel is convolved
                by itself, float[parts, kernel_height, kernel_width, channels], contiguous; each part is of some
                images, and their number is that of `convolution_arguments.image_blocks`.
        """
        kind = _KINDS["weight_gradient", result.dim() == 4]
        self._run(kind, (grad, images), windows, (grad, images, result))

    def _run(
        self, kind: Kind, of_sizes: Sequence[torch.Tensor], windows: Windows, tensors: Sequence[torch.Tensor]
    ) -> None:
        first, second = (tuple(tensor.shape) for tensor in of_sizes)
        arguments = self.arguments(kind, tensors[0].dtype, Sizes(first, second, windows, torch.get_num_threads()))
        words = type(arguments.words).from_buffer_copy(arguments.words)
        words[matmul.LEFT], words[matmul.RIGHT], words[matmul.RESULT] = (tensor.data_ptr() for tensor in tensors)
        self.runner.run(ctypes.addressof(words))

    def _new_arguments(self, kind: Kind, dtype: torch.dtype, sizes: Sizes) -> Arguments:
        """The arguments of calls with these sizes, without the addresses of tensors."""
        pair = 2 if dtype == torch.bfloat16 else 1
        arguments = kind.words(sizes, Machine(DTYPES[sum_dtype(dtype)], self._cpu.vector_bytes, pair))
        arguments.words[BLOCK_FUNCTION], arguments.words[COLUMN_BLOCKS] = self._block(kind, dtype), 1
        return arguments

    def _block(self, kind: Kind, dtype: torch.dtype) -> int:
        """The address of the function that computes a part."""
        key = kind.text, dtype
        code = self._codes.get(key)
        if code is None:
            # Addresses are those of the code that is kept, if several threads make one.
            code = self._codes.setdefault(key, MachineCode(str(self._text(kind, dtype)), self._cpu))
        return code.address("block")

    def _text(self, kind: Kind, dtype: torch.dtype) -> Text:
        if dtype in DTYPES:
            return kind.text(DTYPES[dtype], self._cpu.vector_bytes)
        assert kind.text_of_pairs is not None
        return kind.text_of_pairs(self._cpu.vector_bytes)


class ConvolutionCallWords(CallWords):
    """The words of calls of convolutions.

    Args:
        shared: the arguments of calls of these sizes.
        shape: of the result.
        run: the address of a function that computes all blocks.
    """

    def __init__(self, shared: Arguments, shape: Sequence[int], run: int) -> None:
        # They have the addresses of tables.
        self._shared = shared
        self._arguments = type(shared.words).from_buffer_copy(shared.words)
        address = ctypes.addressof(self._arguments)
        super().__init__(2, [shape], address, address + WORD * matmul.LEFT, run)


def convolution_call_words(
    code: Convolutions,
    kind: str,
    dtype: torch.dtype,
    sizes: Sequence[int],
    windows: Sequence[int],
    groups: int,
) -> CallWords:
    """The words of calls of a convolution; the arguments are those of `lit_ort.runtime.program.ConvolutionNode`."""
    pairs = Windows(*((windows[at], windows[at + 1]) for at in range(0, len(windows), 2)), groups=groups)
    first, second = tuple(sizes[:4]), tuple(sizes[4:])
    has_own_channels = is_depthwise(second[1], first[1], groups)
    call = Sizes(first, second, pairs, torch.get_num_threads())
    arguments = code.arguments(_KINDS[kind, has_own_channels], dtype, call)
    batch, channels, height, width = second
    shape = (batch, height, width, channels)
    if kind == "weight_gradient":
        runs = code.runs(pairs, channels, dtype)
        shape = (image_blocks(channels), *pairs.kernel, channels) if has_own_channels else (first[1], *runs)
    return ConvolutionCallWords(arguments, shape, code.runner.address)
