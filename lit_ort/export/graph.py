"""A call -> ONNX model of standard operators, by torch's own exporter (torch.export and onnxscript)."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor
from torch.export import Dim

from lit_ort._compat.torch_export import prepare_for_onnx
from lit_ort.errors import ExportError, LitOrtWarning, first_line_of
from lit_ort.export.call import Call

# For each input by name, what its changing dimensions are called.
Dimensions = Mapping[str, Mapping[int, str]]
_STANDARD = ("", "ai.onnx")


def model_of(call: Call, dynamic: bool | Dimensions, opset: int, fixed: Collection[str] = ()) -> onnx.ModelProto:
    """Writes a call as a model.

    Args:
        dynamic: every dimension may change that the call leaves free, or none, or those that are named.
        fixed: names of inputs whose sizes don't change.

    Raises:
        ExportError: onnxscript is missing, or what can't be written: an operator, with its place in the user's code.
    """
    if importlib.util.find_spec("onnxscript") is None:
        raise ExportError("Exporting needs onnxscript, which is not installed: pip install 'lit_ort[export]'.")
    free = tuple(_free_places(call, dynamic, fixed))
    tensors = tuple(_from_two_on(call, dynamic, free))
    try:
        program = _program(call, tensors, tuple({place: Dim.AUTO for place in places} for places in free), opset)
    except ExportError as error:
        if dynamic is not True:
            raise
        # torch can't trace some modules with every size free.
        first = tuple({0: Dim.AUTO} if 0 in places else {} for places in free)
        program = _program(call, tensors, first, opset)
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
            prepare_for_onnx(traced)
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


def changing_of(model: onnx.ModelProto) -> dict[str, dict[int, str]]:
    """The dimensions of a model's inputs that may change, by name of the input and place."""
    found: dict[str, dict[int, str]] = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        found[value.name] = {k: dim.dim_param for k, dim in enumerate(dims) if dim.HasField("dim_param")}
    return found


def _free_places(call: Call, dynamic: bool | Dimensions, fixed: Collection[str]) -> Iterator[Collection[int]]:
    """Of each input the dimensions that may change."""
    for name, tensor in zip(call.names, call.tensors, strict=True):
        if name in fixed or dynamic is False:
            yield ()
        elif dynamic is True:
            yield range(tensor.dim())
        else:
            for place in dynamic.get(name, {}):
                if not 0 <= place < tensor.dim():
                    raise ExportError(
                        f"dynamic names dimension {place} of {name}, which has {tensor.dim()}. Count them from 0."
                    )
            yield tuple(dynamic.get(name, {}))


def _from_two_on(call: Call, dynamic: bool | Dimensions, free: Sequence[Collection[int]]) -> Iterator[Tensor]:
    """The tensors, with two places where one may become several: torch takes a size of one for a constant.

    With `dynamic=True` that is the first dimension, where it is of size one in all tensors.
    """
    firsts = [tensor.shape[0] for tensor, places in zip(call.tensors, free, strict=True) if 0 in places]
    for tensor, places in zip(call.tensors, free, strict=True):
        if dynamic is True:
            places = (0,) if 0 in places and set(firsts) == {1} else ()
        for place in places:
            if tensor.shape[place] == 1:
                tensor = torch.cat([tensor, tensor], place)
        yield tensor


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
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
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
    where = (f" (operator {operator[0]})" if operator else "") + place_in(said)
    name = type(getattr(call.function, "module", call.function)).__name__
    return ExportError(
        f"{name} can't be exported{where}: {first_line_of(chain[-1])}. Compute it by other operators in eval mode, or "
        "export a part of the module."
    )


def place_in(trace: str) -> str:
    """The last place in a stack trace that is the user's, or else a library's; nothing where there is none."""
    places = re.findall(r'File "([^"]+)", line (\d+)', trace)
    places = [found for found in places if Path(found[0]).parent != Path(__file__).parent]
    own = [found for found in places if "site-packages" not in found[0]] or places
    return f" at {own[-1][0]}:{own[-1][1]}" if own else ""
