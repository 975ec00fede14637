"""Small ONNX models for pass tests, and how to run them."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
import torch
from onnx_ir.passes import common

from lit_ort.compiler.convert import name_nodes
from lit_ort.compiler.kernels import KERNELS
from lit_ort.inspect import count_operators
from lit_ort.runtime.session import Session, SessionOptions

HEADER = '<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1, "org.pytorch.aten" : 1, "lit_ort" : 1]>'


def model(text: str) -> ir.Model:
    """A model from ONNX text without header, shapes inferred and nodes named."""
    made = ir.from_onnx_text(f"{HEADER} {text}")
    common.ShapeInferencePass()(made)
    name_nodes(made)
    return made


def operators(made: ir.Model) -> set[str]:
    return set(count_operators(made))


def run(made: ir.Model, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    outputs = [str(value.name) for value in made.graph.outputs]
    return Session(made, list(inputs), outputs, SessionOptions(1, kernels=KERNELS)).run(list(inputs.values()))
