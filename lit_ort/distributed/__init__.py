"""What several processes do together, on torch.distributed: how gradients are combined and optimizers are sharded."""
