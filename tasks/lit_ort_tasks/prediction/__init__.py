"""What an exported model of a run predicts, with onnxruntime, tokenizers and NumPy alone: nothing here needs torch."""
