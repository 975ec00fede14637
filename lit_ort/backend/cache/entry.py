"""A compiled graph as bytes: a format line, a checksum, a description in JSON, the models in ONNX.

Unlike a pickle, an entry contains no code that runs when it is read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
import typing
from typing import Any

import torch

from lit_ort._compat.torch_ops import is_safe_in_cache
from lit_ort.backend.compilation import Compilation
from lit_ort.runtime.nodes import overload_of
from lit_ort.runtime.program import Phase, Program
from lit_ort.runtime.report import GraphReport

FORMAT = b"lit_ort compiled graph 4"
# The key by which a tensor of an ONNX model names the file that holds its data (onnx.proto, TensorProto.external_data).
_EXTERNAL = b"location"
_PLAIN = (bool, int, float, str, type(None))


class UnusableEntry(Exception):
    """The bytes are not a complete entry of the requested graph."""


class NotPlain(Exception):
    """A property of the graph has no JSON form."""


def encode(compilation: Compilation, key: str) -> bytes:
    """The entry of a graph.

    Raises:
        NotPlain: the graph returns a constant that is not a number, text or None, or calls an operator of another
            library, of which a reader can't know whether it is harmless.
    """
    for output in compilation.program.signature.outputs:
        if type(output.value) not in _PLAIN:
            raise NotPlain(f"it returns a {type(output.value).__name__}, which has no JSON form")
    program = compilation.program
    if (unknown := _unknown_operator(program)) is not None:
        raise NotPlain(f"it calls {unknown}, which is not one of torch's operators on tensors")
    models = [phase.model for phase in _phases(program)]
    description = {
        "key": key,
        "program": to_plain(_without_models(program)),
        "report": to_plain(compilation.report),
        "models": [len(model) for model in models],
    }
    content = json.dumps(description).encode() + b"\n" + b"".join(models)
    return b"\n".join((FORMAT, _checksum(content), content))


def decode(data: bytes, key: str) -> Compilation:
    """The graph of an entry.

    Raises:
        UnusableEntry: with the reason.
    """
    description, models = _parts(data)
    if description.get("key") != key:
        raise UnusableEntry("it is the entry of another graph")
    try:
        program = from_plain(Program, description["program"])
        report = from_plain(GraphReport, description["report"])
        first, *rest = from_plain(tuple[int, ...], description["models"])
        unknown = _unknown_operator(program)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise UnusableEntry(f"its description is invalid ({error!r})") from error
    if unknown is not None:
        raise UnusableEntry(f"it calls {unknown}, which is not one of torch's operators on tensors")
    forward = dataclasses.replace(program.forward, model=models[:first])
    backward = None if program.backward is None else dataclasses.replace(program.backward, model=models[first:])
    if len(models) != first + sum(rest) or bool(rest) != (backward is not None):
        raise UnusableEntry("its models don't match its description")
    if _EXTERNAL in models:
        raise UnusableEntry("its models refer to other files")
    return Compilation(dataclasses.replace(program, forward=forward, backward=backward), report)


def _phases(program: Program) -> list[Phase]:
    return [phase for phase in (program.forward, program.backward) if phase is not None]


def _unknown_operator(program: Program) -> str | None:
    """The first operator that is not known to only compute with tensors, or None.

    Raises:
        TypeError: a name that is not an operator's.
    """
    targets = (s.target for phase in _phases(program) for node in phase.nodes for s in node.statements)
    return next((target for target in targets if not is_safe_in_cache(overload_of(target))), None)


def _without_models(program: Program) -> Program:
    forward = dataclasses.replace(program.forward, model=b"")
    backward = None if program.backward is None else dataclasses.replace(program.backward, model=b"")
    return dataclasses.replace(program, forward=forward, backward=backward)


def summary(data: bytes) -> str:
    """The kind and inputs of an entry's graph, in one line.

    Raises:
        UnusableEntry: with the reason.
    """
    description, _ = _parts(data)
    try:
        report = from_plain(GraphReport, description["report"])
    except (KeyError, TypeError) as error:
        raise UnusableEntry("it is the entry of another version") from error
    return f"{report.kind} {report.name}: {', '.join(report.shapes) or 'no data'}"


def _parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    first, _, rest = data.partition(b"\n")
    if first != FORMAT:
        raise UnusableEntry("it is in another format")
    checksum, _, content = rest.partition(b"\n")
    if checksum != _checksum(content):
        raise UnusableEntry("it is damaged or incomplete")
    text, _, models = content.partition(b"\n")
    try:
        description = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnusableEntry("its description is not JSON") from error
    if not isinstance(description, dict):
        raise UnusableEntry("its description is not a mapping")
    return description, models


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def to_plain(value: Any) -> Any:
    """Return a value as JSON: dataclasses, tuples, sets and dictionaries of plain values, and torch's dtypes.

    Raises:
        NotPlain: any other value.
    """
    if type(value) in _PLAIN:
        return value
    if value == b"":
        return ""
    if dataclasses.is_dataclass(value):
        return to_plain(_fields(value))
    if type(value) is list:
        return [to_plain(part) for part in value]
    if isinstance(value, torch.dtype):
        return str(value)
    if type(value) in (tuple, frozenset):
        return [to_plain(part) for part in (value if type(value) is tuple else sorted(value))]
    if type(value) is dict and all(type(name) is str for name in value):
        return {name: to_plain(part) for name, part in value.items()}
    raise NotPlain(f"it contains a {type(value).__name__}, which has no JSON form")


def from_plain(kind: Any, value: Any) -> Any:
    """The inverse of `to_plain`, for a value of a type.

    Raises:
        TypeError: `value` doesn't have the form of that type.
        KeyError: a dataclass has no field of that name.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and type(value) is dict:
        hints = typing.get_type_hints(kind)
        return kind(**{name: from_plain(hints[name], part) for name, part in value.items()})
    if origin in (tuple, frozenset) and type(value) is list:
        if origin is tuple and Ellipsis not in inner:
            return tuple(from_plain(one, part) for one, part in zip(inner, value, strict=True))
        return origin(from_plain(inner[0], part) for part in value)
    if kind is bytes and value == "":
        return b""
    if origin is dict and type(value) is dict:
        return {name: from_plain(inner[1], part) for name, part in value.items()}
    if origin is types.UnionType:
        if value is None and type(None) in inner:
            return None
        options = [option for option in inner if option is type(value)] or [o for o in inner if o is not type(None)]
        return from_plain(options[0], value)
    if kind is torch.dtype and isinstance(dtype := getattr(torch, str(value).removeprefix("torch."), None), kind):
        return dtype
    if kind is Any or type(value) is kind:
        return value
    raise TypeError(f"{value!r} is not {kind}")
