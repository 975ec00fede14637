"""Measures matmuls of native sessions: compiled ones, MKL's, and ONNX Runtime's.

    python benchmarks/matmuls.py

Prints a table of GFLOP/s in float32 and one line of JSON. Each library runs in a process of its own, since pools that
spin take the cores from each other, and the processes take turns. Sizes are the matrices of a batch, rows, columns and
the inner size; a factor with a prime is stored as its transpose.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

COMPILED, MKL, ONNX_RUNTIME = "compiled", "MKL", "ONNX Runtime"
LIBRARIES = (COMPILED, MKL, ONNX_RUNTIME)
Sizes = tuple[int, int, int, int]
# The matmuls of layers, of their gradients, of attention, and of a loss over many classes.
CASES: Sequence[tuple[Sizes, tuple[bool, bool]]] = (
    ((1, 512, 256, 256), (False, True)),
    ((1, 512, 1024, 256), (False, True)),
    ((1, 512, 256, 1024), (False, False)),
    ((1, 1024, 256, 512), (True, False)),
    ((16, 128, 128, 64), (False, True)),
    ((16, 128, 64, 128), (False, False)),
    ((16, 128, 64, 128), (True, False)),
    ((1, 512, 8000, 256), (False, True)),
    ((1, 512, 256, 8000), (False, False)),
    ((1, 8000, 256, 512), (True, False)),
    ((1, 32, 64, 64), (False, True)),
    ((1, 64, 784, 128), (False, False)),
    ((1, 2048, 2048, 2048), (False, True)),
)
TURN_SECONDS = 0.1


def main() -> None:
    arguments = parse()
    if arguments.alone:
        alone(arguments.alone)
        return
    rates: dict[str, list[list[float]]] = {name: [[] for _ in CASES] for name in LIBRARIES}
    with contextlib.ExitStack() as stack:
        processes = {name: stack.enter_context(started(name)) for name in LIBRARIES}
        for _ in range(arguments.rounds):
            for name, process in processes.items():
                for case, rate in zip(rates[name], asked(process), strict=True):
                    case.append(rate)
    medians = {name: [round(statistics.median(case)) for case in cases] for name, cases in rates.items()}
    print(table(medians))
    print(json.dumps({"cases": CASES, "gflops": medians}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timed turns of each library")
    parser.add_argument("--alone", choices=LIBRARIES, help=argparse.SUPPRESS)
    return parser.parse_args()


def table(medians: dict[str, list[int]]) -> str:
    rows = ["| sizes | " + " | ".join(LIBRARIES) + " |", "|---" * (1 + len(LIBRARIES)) + "|"]
    for k, (sizes, (is_left, is_right)) in enumerate(CASES):
        name = " x ".join(map(str, sizes)) + f", left{'′' * is_left}, right{'′' * is_right}"
        rows.append(f"| {name} | " + " | ".join(str(medians[library][k]) for library in LIBRARIES) + " |")
    return "\n".join(rows)


def started(name: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--alone", name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def asked(process: subprocess.Popen[str]) -> list[float]:
    """The rate of each case, in GFLOP/s, from one turn of a process."""
    assert process.stdin is not None
    assert process.stdout is not None
    print("turn", file=process.stdin, flush=True)
    return json.loads(process.stdout.readline())


def alone(name: str) -> None:
    make = by_onnx_runtime if name == ONNX_RUNTIME else lambda *case: by_address(name, *case)
    calls = [make(*case) for case in CASES]
    for _ in sys.stdin:
        print(json.dumps([rate(call, sizes) for call, (sizes, _) in zip(calls, CASES, strict=True)]), flush=True)


def rate(call: Callable[[], Any], sizes: Sizes) -> float:
    call()
    seconds = list[float]()
    while sum(seconds) < TURN_SECONDS:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return 2 * math.prod(sizes) / statistics.median(seconds) / 1e9


def by_address(name: str, sizes: Sizes, transposed: tuple[bool, bool]) -> Callable[[], Any]:
    """A matmul as native sessions on OpenMP's threads call it."""
    import torch

    from lit_ort._compat.torch_blas import matmul_functions
    from lit_ort.kernels.matmul_calls import Matmul, MatmulArguments, MatmulCode
    from lit_ort.kernels.matmul_library import MatmulLibrary
    from lit_ort.runtime.region_calls import kernels

    cpu, runner = kernels().cpu, kernels().runner
    functions = matmul_functions() if name == MKL else None
    if name == MKL and functions is None:
        raise SystemExit("this build of torch has no MKL")
    code = MatmulCode(MatmulLibrary(cpu, runner, functions), cpu, runner)
    count, rows, columns, inner = sizes
    arguments = MatmulArguments(code, Matmul(torch.float32, count, rows, columns, inner, transposed))
    tensors = [torch.randn(count * a * b) for a, b in ((rows, inner), (inner, columns), (rows, columns))]
    addresses = (ctypes.c_int64 * len(tensors)).from_address(arguments.tensors)
    addresses[:] = [tensor.data_ptr() for tensor in tensors]

    def call(kept: Any = (code, arguments, tensors)) -> None:
        runner.run(arguments.address)

    return call


def by_onnx_runtime(sizes: Sizes, transposed: tuple[bool, bool]) -> Callable[[], Any]:
    import numpy as np
    import onnxruntime
    import torch
    from onnx import TensorProto, helper

    count, rows, columns, inner = sizes
    shapes = [(count, rows, inner), (count, inner, columns)]
    given = [(a, c, b) if is_t else (a, b, c) for (a, b, c), is_t in zip(shapes, transposed, strict=True)]
    left, right = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, s) for name, s in zip("ab", given, strict=True)
    )
    forms: dict[str, Any] = {"transA": int(transposed[0]), "transB": int(transposed[1])}
    node = helper.make_node("FusedMatMul", ["a", "b"], ["c"], domain="com.microsoft", **forms)
    result = helper.make_tensor_value_info("c", TensorProto.FLOAT, (count, rows, columns))
    graph = helper.make_graph([node], "matmul", [left, right], [result])
    versions = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=9).SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, shape in zip("ab", given, strict=True):
        binding.bind_cpu_input(name, np.random.default_rng(0).standard_normal(shape, np.float32))
    binding.bind_ortvalue_output(
        "c", onnxruntime.OrtValue.ortvalue_from_shape_and_type((count, rows, columns), np.float32)
    )
    return lambda: session.run_with_iobinding(binding)


if __name__ == "__main__":
    main()
