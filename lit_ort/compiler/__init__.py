"""From a graph of Dynamo's to a model that ONNX Runtime trains: capture, convert, gradient, passes, kernels."""
