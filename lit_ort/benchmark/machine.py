"""What a table of times has to say of where they were taken."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

PACKAGES = ("torch", "onnxruntime-training-cpu", "onnxruntime-training", "onnxruntime", "lightning", "transformers")


def machine() -> str:
    """The processor, its cores, and the threads that torch uses."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
    return f"{model or platform.processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Of the packages that are installed and decide."""
    installed = {name.lower() for name in (d.metadata["Name"] for d in importlib.metadata.distributions()) if name}
    return {name: importlib.metadata.version(name) for name in PACKAGES if name in installed}
