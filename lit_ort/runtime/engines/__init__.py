"""Engines run ONNX models that have torch nodes. Each engine is a file or a folder."""
