"""Stock onnxruntime through its C interface, with one custom operator for all torch nodes.

The package itself is not imported: its pybind module holds a second copy of ONNX Runtime.
"""
