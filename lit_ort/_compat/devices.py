"""Device-specific code that torch has no common interface for."""

from __future__ import annotations

from collections.abc import Iterable

import torch

CPU = torch.device("cpu")


def is_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """The device of a graph with these inputs: that of the first input that is not on the CPU, or the CPU.

    Scalars on the CPU are allowed in a graph of any device.
    """
    return next((tensor.device for tensor in tensors if not is_cpu(tensor.device)), CPU)


def generator_of(device: torch.device) -> torch.Generator:
    """The default random generator of a device."""
    if is_cpu(device):
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[device.index or 0]


def wait_for(device: torch.device) -> None:
    """Waits until a device that computes asynchronously has done what was called."""
    if not is_cpu(device):
        torch.accelerator.synchronize(device)
