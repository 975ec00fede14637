"""Runs compiled programs on torch tensors: sessions, autograd, random numbers and memory."""
