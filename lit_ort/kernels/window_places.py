"""Where the windows of a convolution read images, in the LLVM texts of gradients of weights."""

from __future__ import annotations

from lit_ort.kernels.kernel_text import KernelText


def shift_of(text: KernelText, number: str, dilation: int, padding: int) -> str:
    """How many pixels behind the first one of its window an element of a kernel reads.

    Args:
        text: of the kernel.
        number: of the element's row, or column.
        dilation, padding: the positions of these words.
    """
    return text.op("sub", text.op("mul", number, text.word(dilation)), text.word(padding))


def places_inside(text: KernelText, shift: str, stride: str, last: str) -> tuple[str, str]:
    """The first of some places that reads no earlier than 0, and the first that reads behind the end.

    Args:
        text: of the kernel.
        shift: where the first place reads.
        stride: the distance of what neighbouring places read.
        last: how far from the first place's the last reading is that ends inside.
    """
    low = text.divided_up(text.maximum(text.op("sub", 0, shift), 0), stride)
    high = text.op("add", text.op("sdiv", last, stride), 1)
    return low, text.choose(text.test("slt", last, 0), "i64", 0, high)
