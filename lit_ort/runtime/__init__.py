"""Runs compiled models on torch tensors: sessions, autograd, randomness, memory."""
