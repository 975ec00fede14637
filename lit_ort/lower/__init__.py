"""A graph of ATen operators -> ONNX: ONNX Runtime's kernel for an operator, or the torch operator as a node."""
