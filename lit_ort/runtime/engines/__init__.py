"""What runs an ONNX model with torch nodes in it: one engine a file."""
