"""Converts a call to an ONNX model of standard operators with torch's exporter (torch.export and onnxscript)."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import torch
from torch import Tensor, nn
from torch.export import Dim

from lit_ort._compat.torch_export import layers_of_any_length, prepare_for_onnx, recorded_specializations
from lit_ort.errors import ExportError, LitOrtWarning, first_line_of
from lit_ort.export.call import Call
from lit_ort.extras import install_command

# The names of dynamic dimensions, by name of the input and dimension.
Dimensions = Mapping[str, Mapping[int, str]]
_STANDARD = ("", "ai.onnx")


class Converted(NamedTuple):
    """A model, and why sizes of its inputs are fixed that were to be dynamic."""

    model: onnx.ModelProto
    fixed_sizes: tuple[str, ...]


# Converts a call with tensors, of each of which some dimensions are dynamic, to a program of torch.onnx, at an opset.
Converter = Callable[[Call, Sequence[Tensor], Sequence[Collection[int]], int], Any]


def inference_program(call: Call, tensors: Sequence[Tensor], dimensions: Sequence[Collection[int]], opset: int) -> Any:
    # Traced here, since torch.onnx would defer constant sizes to checks at run time, which ONNX lacks.
    traced = exported_program(call.function, tensors, dimensions)
    prepare_for_onnx(traced)
    return onnx_program(traced, call, opset)


def onnx_program(traced: torch.export.ExportedProgram, call: Call, opset: int, **settings: Any) -> Any:
    """A traced call as a program of torch.onnx with the call's names, by more settings of its exporter."""
    return torch.onnx.export(
        traced,
        input_names=list(call.names),
        output_names=list(call.output_names),
        opset_version=opset,
        dynamo=True,
        verbose=False,
        **settings,
    )


def exported_program(
    function: nn.Module, tensors: Sequence[Tensor], dimensions: Sequence[Collection[int]]
) -> torch.export.ExportedProgram:
    """Traces a function of tensors, some of whose dimensions are dynamic."""
    shapes = (tuple({k: Dim.AUTO for k in own} for own in dimensions),)
    return torch.export.export(function, tuple(tensors), dynamic_shapes=shapes, strict=False)


def model_of(
    call: Call,
    dynamic: bool | Dimensions,
    opset: int,
    fixed: Collection[str] = (),
    convert: Converter = inference_program,
) -> Converted:
    """Converts a call to a model.

    Args:
        call: the call.
        dynamic: True for all dimensions that can be dynamic, False for none, or the names of dynamic dimensions.
        opset: the ONNX opset.
        fixed: the names of inputs whose sizes are fixed.
        convert: makes the program.

    Raises:
        ExportError: onnxscript is missing, or an operator can't be exported; the error names its location in the user's
            code.
    """
    if importlib.util.find_spec("onnxscript") is None:
        raise ExportError(f"Exporting needs onnxscript, which is not installed: {install_command('export')}")
    dimensions = tuple(_dynamic_dimensions(call, dynamic, fixed))
    tensors = tuple(_with_size_two(call, dynamic, dimensions))
    with recorded_specializations() as traces:
        model = _dynamic_model(call, tensors, dynamic, dimensions, opset, convert)
    _require_standard(model)
    _set_constant_sizes(model)
    if not isinstance(dynamic, bool):
        _require_dynamic(model, dynamic)
    _name_dimensions(model, dynamic)
    return Converted(model, tuple(_fixed_sizes(model, dimensions, traces)))


def _dynamic_model(
    call: Call,
    tensors: tuple[Tensor, ...],
    dynamic: bool | Dimensions,
    dimensions: Sequence[Collection[int]],
    opset: int,
    convert: Converter,
) -> onnx.ModelProto:
    try:
        program = _program(call, tensors, dimensions, opset, convert)
    except ExportError as error:
        if dynamic is not True:
            raise
        # torch can't trace some modules if every dimension is dynamic.
        first = [(0,) if 0 in own else () for own in dimensions]
        program = _program(call, tensors, first, opset, convert)
        warnings.warn(
            f"Only the first dimension of each input is dynamic: {error} Pass dynamic= with the names of the "
            "dimensions that must be dynamic.",
            LitOrtWarning,
            stacklevel=5,
        )
    return program.model_proto


def _fixed_sizes(
    model: onnx.ModelProto, dimensions: Sequence[Collection[int]], traces: Mapping[tuple[int, int], str]
) -> Iterator[str]:
    """For each size that could not be dynamic, the size and where the module uses it as a constant."""
    for position, (value, own) in enumerate(zip(model.graph.input, dimensions, strict=False)):
        sizes = value.type.tensor_type.shape.dim
        for dimension in own:
            if sizes[dimension].HasField("dim_value"):
                place = place_in(traces.get((position, dimension), ""))
                yield f"{value.name} has {sizes[dimension].dim_value} in dimension {dimension}{place}"


def _program(
    call: Call, tensors: Sequence[Tensor], dimensions: Sequence[Collection[int]], opset: int, convert: Converter
) -> Any:
    with _quiet(), layers_of_any_length():
        try:
            return convert(call, tensors, dimensions, opset)
        # torch's exporter has no common class of errors; both tracing and conversion can raise.
        except Exception as error:
            raise _export_error(call, error) from error


def dynamic_dimensions(model: onnx.ModelProto) -> dict[str, dict[int, str]]:
    """The names of the dynamic dimensions of a model's inputs, by name of the input and dimension."""
    dimensions: dict[str, dict[int, str]] = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        dimensions[value.name] = {k: dim.dim_param for k, dim in enumerate(dims) if dim.HasField("dim_param")}
    return dimensions


def _dynamic_dimensions(call: Call, dynamic: bool | Dimensions, fixed: Collection[str]) -> Iterator[Collection[int]]:
    """The dynamic dimensions of each input."""
    for name, tensor in zip(call.names, call.tensors, strict=True):
        if name in fixed or dynamic is False:
            yield ()
        elif dynamic is True:
            yield range(tensor.dim())
        else:
            for dimension in dynamic.get(name, {}):
                if not 0 <= dimension < tensor.dim():
                    raise ExportError(
                        f"dynamic names dimension {dimension} of {name}, which has {tensor.dim()}. Count dimensions "
                        "from 0."
                    )
            yield tuple(dynamic.get(name, {}))


def _with_size_two(call: Call, dynamic: bool | Dimensions, dimensions: Sequence[Collection[int]]) -> Iterator[Tensor]:
    """The tensors, with size two instead of one in dynamic dimensions, since torch treats size one as a constant.

    With `dynamic=True`, only the first dimension is changed, if it has size one in all tensors.
    """
    first_sizes = [tensor.shape[0] for tensor, own in zip(call.tensors, dimensions, strict=True) if 0 in own]
    for tensor, own in zip(call.tensors, dimensions, strict=True):
        if dynamic is True:
            own = (0,) if 0 in own and set(first_sizes) == {1} else ()
        for dimension in own:
            if tensor.shape[dimension] == 1:
                tensor = torch.cat([tensor, tensor], dimension)
        yield tensor


def _require_standard(model: onnx.ModelProto) -> None:
    names = sorted({f"{node.domain}::{node.op_type}" for node in model.graph.node if node.domain not in _STANDARD})
    local = {(function.domain, function.name) for function in model.functions}
    nonstandard = [name for name in names if tuple(name.split("::")) not in local]
    if nonstandard:
        raise ExportError(
            f"The model would contain {', '.join(nonstandard)}, which ONNX doesn't have. Use other operators in eval "
            "mode."
        )


def _require_dynamic(model: onnx.ModelProto, required: Dimensions) -> None:
    dynamic = dynamic_dimensions(model)
    for name, dimensions in required.items():
        if name not in dynamic:
            raise ExportError(f"dynamic names {name!r}, which is not an input. The inputs are {', '.join(dynamic)}.")
        fixed = [dimension for dimension in dimensions if dimension not in dynamic[name]]
        if fixed:
            raise ExportError(
                f"Dimension {fixed[0]} of {name} can't be dynamic: the module uses its size as a constant. Remove it "
                "from dynamic."
            )


def _set_constant_sizes(model: onnx.ModelProto) -> None:
    """Sets sizes that are constant, which torch's exporter writes as names made of digits."""
    for dim in _dims(model):
        if dim.dim_param.isdigit():
            dim.dim_value = int(dim.dim_param)


def _dims(model: onnx.ModelProto) -> Iterator[Any]:
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        yield from value.type.tensor_type.shape.dim


def _name_dimensions(model: onnx.ModelProto, dynamic: bool | Dimensions) -> None:
    """Names dynamic sizes as the user does, or after the first input that has the size."""
    names: dict[str, str] = {}
    for value in model.graph.input:
        for k, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.HasField("dim_param") and dim.dim_param not in names:
                name = None if isinstance(dynamic, bool) else dynamic.get(value.name, {}).get(k)
                names[dim.dim_param] = name or f"{value.name}_{k}"
    for dim in _dims(model):
        if dim.HasField("dim_param"):
            dim.dim_param = re.sub(r"[A-Za-z_]\w*", lambda match: names.get(match[0], match[0]), dim.dim_param)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch's exporter, which reports its stages and packages that are not needed here."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
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
    """An error that names the operator that can't be exported and its location."""
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    messages = "\n".join(str(link) for link in chain)
    operator = re.search(r"torch\.ops\.([\w.]+)|\baten[.:]+[\w.]+|Unsupported.*?'([\w.:]+)'", messages)
    frames = "".join(traceback.format_tb(error.__traceback__))
    location = (f" (operator {operator[0]})" if operator else "") + (place_in(messages) or place_in(frames))
    name = type(getattr(call.function, "module", call.function)).__name__
    if "data-dependent" in messages:
        return ExportError(
            f"{name} can't be exported: its code reads the value of a tensor{place_in(frames)}, but a model computes "
            "the same operators for all values. Use torch.where instead of a branch."
        )
    return ExportError(
        f"{name} can't be exported{location}: {first_line_of(chain[-1])}. Use other operators there, or export a "
        "part of the module."
    )


def place_in(trace: str) -> str:
    """The last location in a stack trace that is in the user's code, otherwise in a library; empty if there is none."""
    locations = re.findall(r'File "([^"]+)", line (\d+)', trace)
    package = Path(__file__).parents[1]
    locations = [location for location in locations if package not in Path(location[0]).parents]
    user_locations = [location for location in locations if "site-packages" not in location[0]] or locations
    return f" at {user_locations[-1][0]}:{user_locations[-1][1]}" if user_locations else ""
