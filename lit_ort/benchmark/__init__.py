"""A step of a user's own in eager, inductor and ONNX Runtime, side by side: time, memory, errors, what ran where."""

from __future__ import annotations

from lit_ort.benchmark.result import BaselineFigures, Benchmark
from lit_ort.benchmark.run import benchmark

__all__ = ["BaselineFigures", "Benchmark", "benchmark"]
