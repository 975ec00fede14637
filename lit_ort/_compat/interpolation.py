"""Traces interpolation as one operator.

By default, torch decomposes it while tracing, into gathers and scatters of every element. These take about ten times as
long as its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp import meta_table
from torch._decomp.decompositions import upsample_compute_output_size
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_impls import op_implementations_dict

from lit_ort._compat.patching import removed_entry, replaced_entry

aten = torch.ops.aten
_PACKETS = (
    *(aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d, aten.upsample_linear1d),
    *(aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d),
    *(aten.upsample_bilinear2d, aten.upsample_trilinear3d, aten.upsample_bicubic2d),
    *(aten._upsample_bilinear2d_aa, aten._upsample_bicubic2d_aa),
)
_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@contextmanager
def whole_interpolations() -> Iterator[None]:
    """A context in which interpolations and their gradients are traced as one operator each, also for dynamic sizes."""
    with ExitStack() as stack:
        for packet in _PACKETS:
            backward = getattr(aten, f"{packet.__name__}_backward").default
            for target in (packet.default, packet.vec, backward):
                target._dispatch_cache.clear()
                stack.callback(target._dispatch_cache.clear)
            for key in _KEYS:
                stack.enter_context(removed_entry(packet.default.py_kernels, key))
                stack.enter_context(replaced_entry(packet.vec.py_kernels, key, _as_default(packet.default)))
            for target, fake in ((packet.default, _fake), (backward, _fake_backward)):
                # Without the first one, torch decomposes the operator to compute its shape.
                stack.enter_context(replaced_entry(meta_table, target, fake))
                stack.enter_context(replaced_entry(op_implementations_dict, target, fake))
        yield


def _fake(mode: Any, target: Any, input: torch.Tensor, output_size: Sequence[Any], *_: Any) -> torch.Tensor:
    """Replaces torch's fakes, most of which work for fixed sizes only."""
    return _like(mode, input, (*input.shape[:2], *output_size))


def _fake_backward(
    mode: Any, target: Any, grad: torch.Tensor, output_size: Sequence[Any], input_size: Sequence[Any], *_: Any
) -> torch.Tensor:
    return _like(mode, grad, input_size)


def _like(mode: Any, tensor: torch.Tensor, shape: Sequence[Any]) -> torch.Tensor:
    with mode:
        return tensor.new_empty(shape).contiguous(memory_format=suggest_memory_format(tensor))


def _as_default(target: torch._ops.OpOverload) -> Callable[..., Any]:
    """The overload that F.interpolate calls, in terms of the one with a kernel. Torch's own fixes dynamic sizes."""

    def vec(
        input: torch.Tensor, output_size: Sequence[Any] | None, *rest: Any, scale_factors: Sequence[float] | None = None
    ) -> torch.Tensor:
        *settings, scales = rest if rest and not isinstance(rest[-1], bool) else (*rest, scale_factors)
        size: list[Any] = list(upsample_compute_output_size(input.size(), output_size, scales) or ())
        return target(input, size, *settings, *(scales or [None] * len(size)))

    return vec
