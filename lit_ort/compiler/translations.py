"""The exporter's table of which operators have an ONNX form."""

from __future__ import annotations

import functools

from torch.onnx._internal.exporter._registration import ONNXRegistry

from lit_ort.compiler.quiet import quiet_exporter

# Written by the exporter without conversion, known to ONNX Runtime 1.19 and to its gradient builder.
OPSET = 20


@functools.cache
def onnx_registry() -> ONNXRegistry:
    """The table of `OPSET`, made once a process: reading the sources of all its functions takes half a second."""
    with quiet_exporter():
        return ONNXRegistry.from_torchlib(OPSET)
