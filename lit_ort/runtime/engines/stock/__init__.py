"""The engine of stock onnxruntime, through its C interface, with one custom operator for all torch nodes.

The Python package is not imported: its pybind module contains a second copy of ONNX Runtime.
"""
