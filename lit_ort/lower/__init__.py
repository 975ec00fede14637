"""Lowers a graph of ATen operators to ONNX. Each operator becomes an ONNX operator or part of a torch node."""
