"""What a table of times has to say of where they were taken."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

PACKAGES = ("torch", "onnxruntime-training-cpu", "onnxruntime-training", "onnxruntime", "lightning", "transformers")

# By what Linux calls them, the widest first.
VECTOR_UNITS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}


def machine() -> str:
    """The processor, its cores, and the threads that torch uses."""
    info = Path("/proc/cpuinfo")
    facts = _facts(info.read_text()) if info.exists() else {}
    name = facts.get("model name") or platform.processor()
    # Clouds hide the model behind a name for all, and speeds differ between families.
    if "cpu family" in facts:
        units = next((title for flag, title in VECTOR_UNITS.items() if flag in facts.get("flags", "").split()), "")
        kind = [f"family {facts['cpu family']}", f"model {facts.get('model', '')}", units]
        name += f" ({', '.join(part for part in kind if part)})"
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def _facts(cpuinfo: str) -> dict[str, str]:
    """Of the first processor."""
    pairs = (line.partition(":") for line in cpuinfo.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def versions() -> dict[str, str]:
    """Of the packages that are installed and decide."""
    installed = {name.lower() for name in (d.metadata["Name"] for d in importlib.metadata.distributions()) if name}
    return {name: importlib.metadata.version(name) for name in PACKAGES if name in installed}
