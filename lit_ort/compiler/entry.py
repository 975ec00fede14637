"""A compiled graph as bytes: one line that says what it is, a checksum, the facts as JSON, the model as ONNX.

Reading one runs nothing of it, unlike a pickle.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
import typing
from typing import Any

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from lit_ort.compiler.signature import Compilation, StepSignature, TrainingModel
from lit_ort.inspect import GraphReport

FORMAT = b"lit_ort compiled graph 1"
_PLAIN = (bool, int, float, str, type(None))


class UnusableEntry(Exception):
    """The bytes are not a whole entry for the graph asked for."""


class NotPlain(Exception):
    """A fact about the graph has no JSON form."""


def encode(compilation: Compilation, key: str) -> bytes:
    """The entry of a graph.

    Raises:
        NotPlain: the graph returns a constant that is none of number, text and None.
    """
    for output in compilation.signature.outputs:
        if type(output.value) not in _PLAIN:
            raise NotPlain(f"it returns a {type(output.value).__name__}, which has no plain form")
    training = compilation.training
    facts = {
        "key": key,
        "kind": compilation.kind,
        "signature": _plain(compilation.signature),
        "training": {name: _plain(value) for name, value in _fields(training).items() if name != "model"},
        "report": _plain(compilation.report),
    }
    content = json.dumps(facts).encode() + b"\n" + ir.to_proto(training.model).SerializeToString()
    return b"\n".join((FORMAT, _checksum(content), content))


def decode(data: bytes, key: str) -> Compilation:
    """The graph of an entry.

    Raises:
        UnusableEntry: says what is wrong with it.
    """
    facts, model = _parts(data)
    if facts.get("key") != key:
        raise UnusableEntry("it is the entry of another graph")
    try:
        training = {**facts["training"], "model": ir.from_proto(onnx.load_from_string(model))}
        return Compilation(
            signature=_typed(StepSignature, facts["signature"]),
            kind=_typed(str, facts["kind"]),
            training=_typed(TrainingModel, training),
            report=_typed(GraphReport, facts["report"]),
        )
    except (DecodeError, KeyError, TypeError, ValueError) as error:
        raise UnusableEntry(f"its facts don't fit ({error!r})") from error


def summary(data: bytes) -> str:
    """Kind and inputs of an entry's graph, in a line.

    Raises:
        UnusableEntry: says what is wrong with it.
    """
    facts, _ = _parts(data)
    try:
        report = _typed(GraphReport, facts["report"])
    except (KeyError, TypeError) as error:
        raise UnusableEntry("it is the entry of another version") from error
    return f"{report.kind} {report.name}: {', '.join(report.shapes) or 'no data'}"


def _parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    first, _, rest = data.partition(b"\n")
    if first != FORMAT:
        raise UnusableEntry("it doesn't begin as an entry does")
    checksum, _, content = rest.partition(b"\n")
    if checksum != _checksum(content):
        raise UnusableEntry("it is damaged or was not written to its end")
    text, _, model = content.partition(b"\n")
    try:
        facts = json.loads(text)
    except ValueError as error:
        raise UnusableEntry("its facts are not JSON") from error
    if not isinstance(facts, dict):
        raise UnusableEntry("its facts are not a mapping")
    return facts, model


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _plain(value: Any) -> Any:
    """Dataclasses, tuples and dictionaries of plain values as JSON has them."""
    if type(value) in _PLAIN:
        return value
    if dataclasses.is_dataclass(value):
        return _plain(_fields(value))
    if type(value) is tuple:
        return [_plain(part) for part in value]
    if type(value) is dict and all(type(name) is str for name in value):
        return {name: _plain(part) for name, part in value.items()}
    raise NotPlain(f"a {type(value).__name__} belongs to it, which has no plain form")


def _typed(kind: Any, value: Any) -> Any:
    """What `_plain` was given, by its type.

    Raises:
        TypeError: `value` is not of that form. KeyError: nor are its fields.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and type(value) is dict:
        hints = typing.get_type_hints(kind)
        return kind(**{name: _typed(hints[name], part) for name, part in value.items()})
    if origin is tuple and type(value) is list:
        return tuple(_typed(inner[0], part) for part in value)
    if origin is dict and type(value) is dict:
        return {name: _typed(inner[1], part) for name, part in value.items()}
    if kind is Any or type(value) is kind or origin is types.UnionType and type(value) in inner:
        return value
    raise TypeError(f"{value!r} is not {kind}")
