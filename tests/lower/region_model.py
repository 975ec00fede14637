"""Runs a region's ONNX function by ONNX Runtime."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import onnx
import torch
from onnx import helper

from lit_ort.lower.onnx_values import FUNCTION_DOMAIN, OPSET, uniform_function
from lit_ort.lower.region_function import region_function
from lit_ort.regions.element_types import MEMORY_DTYPES
from lit_ort.regions.placed_region import PlacedRegion, TensorLayout
from lit_ort.regions.region import Region
from lit_ort.regions.region_run import RegionRun
from lit_ort.regions.symbolic_size import number_of
from lit_ort.runtime.elements import ELEMENTS

# NumPy has no bfloat16.
_EXACT = {torch.bfloat16: torch.float32}


def run_function(
    region: Region, run: RegionRun[int], inputs: Sequence[torch.Tensor], outputs: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """The outputs of a region, of these shapes; inputs are contiguous."""
    layouts = tuple(TensorLayout(tuple(x.shape)) for x in inputs)
    placed = PlacedRegion(region, run, layouts, tuple(map(tuple, outputs))).map(number_of)
    function, sizes = region_function(placed, [x.shape for x in inputs], "region")
    assert not sizes
    session = _session(_model(function, inputs, region.outputs).SerializeToString())
    found = session.run(None, {f"x{k}": x.to(_EXACT.get(x.dtype, x.dtype)).numpy() for k, x in enumerate(inputs)})
    return [torch.from_numpy(y).to(MEMORY_DTYPES[d]) for y, d in zip(found, region.outputs, strict=True)]


def _model(function: onnx.FunctionProto, inputs: Sequence[torch.Tensor], outputs: Sequence[str]) -> onnx.ModelProto:
    nodes, given, taken, values = [], [], [], []
    for k, x in enumerate(inputs):
        given.append(helper.make_tensor_value_info(f"x{k}", ELEMENTS[_EXACT.get(x.dtype, x.dtype)], x.shape))
        nodes.append(helper.make_node("Cast", [f"x{k}"], [f"in{k}"], to=ELEMENTS[x.dtype]))
    nodes.append(
        helper.make_node(
            "region", [f"in{k}" for k in range(len(inputs))], list(function.output), domain=FUNCTION_DOMAIN
        )
    )
    for k, name in enumerate(outputs):
        dtype = ELEMENTS[_EXACT.get(MEMORY_DTYPES[name], MEMORY_DTYPES[name])]
        nodes.append(helper.make_node("Cast", [f"out{k}"], [f"y{k}"], to=dtype))
        taken.append(helper.make_tensor_value_info(f"y{k}", dtype, None))
        values.append(f"y{k}")
    graph = helper.make_graph(nodes, "region", given, taken)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(FUNCTION_DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=[uniform_function(), function])


@functools.lru_cache(64)
def _session(model: bytes) -> Any:
    import onnxruntime  # takes two seconds

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
