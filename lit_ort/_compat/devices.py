"""Devices, as far as torch has no one way for all of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

CPU = torch.device("cpu")


def is_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Where a graph of these inputs computes: their device; scalars on the CPU go with any other."""
    return next((tensor.device for tensor in tensors if not is_cpu(tensor.device)), CPU)


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that operators on a device draw from by default."""
    if is_cpu(device):
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[device.index or 0]
