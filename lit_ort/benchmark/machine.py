"""The machine and the package versions of a measurement."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import psutil
import torch

PACKAGES = ("torch", "onnxruntime-training-cpu", "onnxruntime-training", "onnxruntime", "lightning", "transformers")

# A quarter of the cores.
_BUSY_PERCENT = 25.0
# By Linux's names of CPU flags, the widest unit first.
VECTOR_UNITS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}


def machine() -> str:
    """The processor, its cores, and the threads that torch uses."""
    info = Path("/proc/cpuinfo")
    fields = _cpu_fields(info.read_text()) if info.exists() else {}
    name = fields.get("model name") or platform.processor()
    # Clouds use one model name for several processors, so family and model are added.
    if "cpu family" in fields:
        units = next((title for flag, title in VECTOR_UNITS.items() if flag in fields.get("flags", "").split()), "")
        details = [f"family {fields['cpu family']}", f"model {fields.get('model', '')}", units]
        name += f" ({', '.join(detail for detail in details if detail)})"
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def _cpu_fields(cpuinfo: str) -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo."""
    pairs = (line.partition(":") for line in cpuinfo.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def versions() -> dict[str, str]:
    """The versions of the installed packages that affect measurements."""
    installed = {name.lower() for name in (d.metadata["Name"] for d in importlib.metadata.distributions()) if name}
    return {name: importlib.metadata.version(name) for name in PACKAGES if name in installed}


def busy() -> str:
    """A sentence if other programs use the cores, measured for half a second; empty if not."""
    share = psutil.cpu_percent(interval=0.5)
    if share < _BUSY_PERCENT:
        return ""
    return f"Other programs were running ({share:.0f} % of {os.cpu_count()} cores): the times are not reliable."
