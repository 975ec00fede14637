"""Distributed training on torch.distributed: combining gradients, sharding optimizers and splitting models."""
