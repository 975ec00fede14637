"""A call -> ONNX model of standard operators, by torch's own exporter (torch.export and onnxscript)."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx
import torch
from torch import Tensor
from torch.export import Dim

from lit_ort.errors import ExportError, LitOrtWarning, first_line_of
from lit_ort.export.call import Call

# For each input by name, what its changing dimensions are called.
Dimensions = Mapping[str, Mapping[int, str]]
_STANDARD = ("", "ai.onnx")


def model_of(call: Call, dynamic: bool | Dimensions, opset: int) -> onnx.ModelProto:
    """Writes a call as a model.

    Args:
        dynamic: every dimension may change that the call leaves free, or none, or those that are named.

    Raises:
        ExportError: onnxscript is missing, or what can't be written: an operator, with its place in the user's code.
    """
    if importlib.util.find_spec("onnxscript") is None:
        raise ExportError("Exporting needs onnxscript, which is not installed: pip install 'lit_ort[export]'.")
    tensors = tuple(_from_two_on(call, dynamic))
    try:
        program = _program(call, tensors, tuple(_shapes(call.names, tensors, dynamic)), opset)
    except ExportError as error:
        if dynamic is not True:
            raise
        # torch can't trace some modules with every size free.
        program = _program(call, tensors, tuple(_first_alone(tensors)), opset)
        warnings.warn(
            f"Only the first dimension of each input may change: {error} Pass dynamic=, with names for the dimensions "
            "that have to.",
            LitOrtWarning,
            stacklevel=4,
        )
    model: onnx.ModelProto = program.model_proto
    _require_standard(model)
    _settle_constants(model)
    if not isinstance(dynamic, bool):
        _require_dynamic(model, dynamic)
    _name_dimensions(model, dynamic)
    return model


def _program(call: Call, tensors: tuple[Tensor, ...], shapes: tuple[Any, ...], opset: int) -> Any:
    with _quiet():
        try:
            # Traced here: torch.onnx would put sizes that are constants off to checks at run time, which ONNX lacks.
            traced = torch.export.export(call.function, tensors, dynamic_shapes=(shapes,), strict=False)
            return torch.onnx.export(
                traced,
                input_names=list(call.names),
                output_names=list(call.output_names),
                opset_version=opset,
                dynamo=True,
                verbose=False,
            )
        # torch's exporter has no one class of errors, and they come from tracing as well as from writing.
        except Exception as error:
            raise _export_error(call, error) from error


def _first_alone(tensors: Sequence[Tensor]) -> Iterator[dict[int, Any]]:
    for tensor in tensors:
        yield {0: Dim.AUTO} if tensor.dim() else {}


def changing_of(model: onnx.ModelProto) -> dict[str, dict[int, str]]:
    """The dimensions of a model's inputs that may change, by name of the input and place."""
    found: dict[str, dict[int, str]] = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        found[value.name] = {k: dim.dim_param for k, dim in enumerate(dims) if dim.HasField("dim_param")}
    return found


def _from_two_on(call: Call, dynamic: bool | Dimensions) -> Iterator[Tensor]:
    """The tensors, with a second item where the batch has one alone: torch takes a size of one for a constant."""
    alone = dynamic is True and all(tensor.dim() == 0 or tensor.shape[0] == 1 for tensor in call.tensors)
    for tensor in call.tensors:
        yield torch.cat([tensor, tensor]) if alone and tensor.dim() else tensor


def _shapes(names: Sequence[str], tensors: Sequence[Tensor], dynamic: bool | Dimensions) -> Iterator[dict[int, Any]]:
    for name, tensor in zip(names, tensors, strict=True):
        if isinstance(dynamic, bool):
            yield {k: Dim.AUTO for k in range(tensor.dim())} if dynamic else {}
            continue
        for place in dynamic.get(name, {}):
            if not 0 <= place < tensor.dim():
                raise ExportError(
                    f"dynamic names dimension {place} of {name}, which has {tensor.dim()}. Count them from 0."
                )
        yield {place: Dim.AUTO for place in dynamic.get(name, {})}


def _require_standard(model: onnx.ModelProto) -> None:
    foreign = sorted({f"{node.domain}::{node.op_type}" for node in model.graph.node if node.domain not in _STANDARD})
    local = {(function.domain, function.name) for function in model.functions}
    foreign = [name for name in foreign if tuple(name.split("::")) not in local]
    if foreign:
        raise ExportError(
            f"The model would hold {', '.join(foreign)}, which ONNX doesn't have. Compute it by other operators in "
            "eval mode."
        )


def _require_dynamic(model: onnx.ModelProto, wanted: Dimensions) -> None:
    changing = changing_of(model)
    for name, places in wanted.items():
        if name not in changing:
            raise ExportError(f"dynamic names {name!r}, which is no input. They are {', '.join(changing)}.")
        fixed = [place for place in places if place not in changing[name]]
        if fixed:
            raise ExportError(
                f"Dimension {fixed[0]} of {name} can't change: the module computes with its size as a constant. Leave "
                "it out of dynamic."
            )


def _settle_constants(model: onnx.ModelProto) -> None:
    """Sizes that tracing found to be constants, which torch's exporter writes as names made of digits."""
    for dim in _dims(model):
        if dim.dim_param.isdigit():
            dim.dim_value = int(dim.dim_param)


def _dims(model: onnx.ModelProto) -> Iterator[Any]:
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        yield from value.type.tensor_type.shape.dim


def _name_dimensions(model: onnx.ModelProto, dynamic: bool | Dimensions) -> None:
    """Calls a changing size what the user calls it, or after the input where it is first seen."""
    names: dict[str, str] = {}
    for value in model.graph.input:
        for place, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.HasField("dim_param") and dim.dim_param not in names:
                given = None if isinstance(dynamic, bool) else dynamic.get(value.name, {}).get(place)
                names[dim.dim_param] = given or f"{value.name}_{place}"
    for dim in _dims(model):
        if dim.HasField("dim_param"):
            dim.dim_param = re.sub(r"[A-Za-z_]\w*", lambda found: names.get(found[0], found[0]), dim.dim_param)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch's exporter tells of its stages and of packages that it doesn't need here."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "torch.export")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _export_error(call: Call, error: Exception) -> ExportError:
    """What can't be written, and where it stands."""
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    said = "\n".join(str(each) for each in chain)
    operator = re.search(r"torch\.ops\.([\w.]+)|\baten[.:]+[\w.]+|Unsupported.*?'([\w.:]+)'", said)
    place = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', said)
    own = [found for found in place if "site-packages" not in found[0]] or place
    where = f" (operator {operator[0]})" if operator else ""
    where += f" at {own[-1][0]}:{own[-1][1]}" if own else ""
    name = type(getattr(call.function, "module", call.function)).__name__
    return ExportError(
        f"{name} can't be exported{where}: {first_line_of(chain[-1])}. Compute it by other operators in eval mode, or "
        "export a part of the module."
    )
