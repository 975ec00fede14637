"""Results of a model in a plain session on the CPU beside those of the module, at several sizes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor

from lit_ort.errors import ExportError
from lit_ort.export.call import Call
from lit_ort.export.graph import changing_of
from lit_ort.export.process import run_python
from lit_ort.export.result import Checked

FIX_SIZE = "Fix that size: dynamic=False, or name the dimensions that change"
# With onnxruntime and NumPy alone: what runs the model has nothing of torch's or of ours.
_RUN = """
import sys
import numpy, onnxruntime
model, given, taken = sys.argv[1:]
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
inputs = numpy.load(given)
wanted = {value.name for value in session.get_inputs()}
outputs = [value.name for value in session.get_outputs()]
found = {}
for case in sorted({key.split("/")[0] for key in inputs.files}):
    feeds = {key.split("/", 1)[1]: inputs[key] for key in inputs.files if key.split("/")[0] == case}
    results = session.run(outputs, {name: value for name, value in feeds.items() if name in wanted})
    found.update({f"{case}/{name}": value for name, value in zip(outputs, results)})
numpy.savez(taken, **found)
"""


def check(model: onnx.ModelProto, path: Path, call: Call) -> list[Checked]:
    """Runs a model at the call's size, at half of it and at one, as far as its sizes may change.

    Args:
        path: where the model lies.

    Raises:
        ExportError: a session refuses the model, or gives results of another shape.
    """
    cases = list(cases_of(call, changing_of(model)))
    found = ran(_RUN, path, [case for case, _ in cases], call.names)
    producers = {name: node.op_type for node in model.graph.node for name in node.output}
    return [compared(call, tensors, expected, found[str(k)], producers) for k, (tensors, expected) in enumerate(cases)]


def cases_of(
    call: Call, changing: Mapping[str, Mapping[int, str]]
) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Inputs and results at each size; one at which the module itself can't compute is left out."""
    seen: set[tuple[torch.Size, ...]] = set()
    for size_of in (lambda size: size, lambda size: -(-size // 2), lambda size: 1):
        for only_first in (False, True):
            tensors = resized(call.names, call.tensors, changing, size_of, only_first)
            shapes = tuple(tensor.shape for tensor in tensors)
            if shapes in seen:
                continue
            try:
                with torch.no_grad():
                    expected = call.function(*tensors)
            # Such as a convolution that is larger than one place.
            except (RuntimeError, ValueError, IndexError):
                continue
            # Such as a mean of nothing.
            if any(result.isnan().any() for result in expected):
                continue
            seen.add(shapes)
            yield tensors, expected
            break


def resized(
    names: Sequence[str],
    tensors: Sequence[Tensor],
    changing: Mapping[str, Mapping[int, str]],
    size_of: Callable[[int], int],
    only_first: bool = False,
) -> tuple[Tensor, ...]:
    """The first values of each tensor, as many as a function of the size gives.

    Args:
        changing: names of the sizes that may change, or sums of names, by input and place.
        only_first: leaves all dimensions but the first as they are.
    """
    sizes: dict[str, int] = {}
    for name, tensor in zip(names, tensors, strict=True):
        for place, label in changing.get(name, {}).items():
            size = tensor.shape[place]
            sizes.setdefault(label, size if place and only_first else size_of(size))
    found = []
    for name, tensor in zip(names, tensors, strict=True):
        for place, label in changing.get(name, {}).items():
            tensor = tensor.narrow(place, 0, min(size_named(label, sizes), tensor.shape[place]))
        found.append(tensor.contiguous())
    return tuple(found)


def size_named(label: str, sizes: Mapping[str, int]) -> int:
    """The size of a dimension by its name, or by a sum of names, such as `past + length`."""
    parts = [part.strip() for part in label.split("+")]
    if all(part in sizes or part.isdigit() for part in parts):
        return sum(sizes[part] if part in sizes else int(part) for part in parts)
    return sizes[label]


def ran(
    program: str, path: Path, cases: Sequence[Sequence[Tensor]], names: Sequence[str]
) -> dict[str, dict[str, np.ndarray]]:
    """What a program found with cases of named tensors: arrays by the case's number, or another heading, and name.

    Args:
        program: takes `path`, a file of arrays named `CASE/NAME`, and the file that it leaves such arrays in.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, taken = Path(folder, "given.npz"), Path(folder, "taken.npz")
        arrays = {f"{k}/{n}": t.numpy() for k, case in enumerate(cases) for n, t in zip(names, case, strict=True)}
        np.savez(given, **arrays)  # pyright: ignore[reportArgumentType] - names of arrays
        run_python(
            program,
            *map(str, (path, given, taken)),
            problem="ONNX Runtime refuses the exported model",
            remedy="Where sizes depend on each other, name them: dynamic={'mask': {1: 'past + length'}, ...}. "
            "verify=False writes the model none the less.",
        )
        found: dict[str, dict[str, np.ndarray]] = {}
        with np.load(taken) as values:
            for key in values.files:
                heading, name = key.split("/", 1)
                found.setdefault(heading, {})[name] = values[key]
    return found


def compared(
    call: Call,
    tensors: Sequence[Tensor],
    expected: Sequence[Tensor],
    results: Mapping[str, np.ndarray],
    producers: Mapping[str, str],
) -> Checked:
    shapes = {name: tuple(tensor.shape) for name, tensor in zip(call.names, tensors, strict=True)}
    worst, where = 0.0, ""
    for name, reference in zip(call.output_names, expected, strict=True):
        found = results[name]
        label = f"{name} ({producers.get(name, 'an input')})"
        if found.shape != tuple(reference.shape):
            raise ExportError(
                f"The exported model gives {label} of shape {list(found.shape)} at {shapes}, where the module gives "
                f"{list(reference.shape)}. {FIX_SIZE}."
            )
        error = error_of(torch.from_numpy(found), reference)
        if error > worst or not where:
            worst, where = error, label
    return Checked(shapes, worst, where)


def error_of(found: Tensor, reference: Tensor) -> float:
    """The largest absolute difference, over the reference's largest finite value."""
    if not reference.numel():
        return 0.0
    if not reference.is_floating_point():
        return float((found != reference).any())
    same = (found == reference) | (found.isnan() & reference.isnan())
    difference = torch.where(same, 0.0, (found.double() - reference.double()).abs())
    finite = reference[reference.isfinite()].double().abs()
    return float(difference.max()) / max(float(finite.max()) if finite.numel() else 0.0, 1e-12)
