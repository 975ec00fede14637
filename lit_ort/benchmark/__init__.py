"""Benchmarks a user's training step in eager, inductor and ONNX Runtime: time, memory, errors and what ran where."""

from __future__ import annotations

from lit_ort.benchmark.result import BaselineFigures, Benchmark
from lit_ort.benchmark.run import benchmark

__all__ = ["BaselineFigures", "Benchmark", "benchmark"]
