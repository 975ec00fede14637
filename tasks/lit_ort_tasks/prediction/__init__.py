"""Predictions of exported models, with onnxruntime, tokenizers and NumPy alone: nothing here needs torch."""
