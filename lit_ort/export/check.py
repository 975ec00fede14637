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
    cases = list(_cases(call, changing_of(model)))
    found = _ran(path, [case for case, _ in cases], call.names)
    producers = {name: node.op_type for node in model.graph.node for name in node.output}
    return [
        _compared(call, tensors, expected, results, producers)
        for (tensors, expected), results in zip(cases, found, strict=True)
    ]


def _cases(
    call: Call, changing: Mapping[str, Mapping[int, str]]
) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Inputs and results at each size; one at which the module itself can't compute is left out."""
    seen: set[tuple[torch.Size, ...]] = set()
    for size_of in (lambda size: size, lambda size: -(-size // 2), lambda size: 1):
        for only_first in (False, True):
            tensors = tuple(_resized(call, changing, size_of, only_first))
            shapes = tuple(tensor.shape for tensor in tensors)
            if shapes in seen:
                continue
            try:
                with torch.no_grad():
                    expected = call.function(*tensors)
            # Such as a convolution that is larger than one place.
            except (RuntimeError, ValueError, IndexError):
                continue
            seen.add(shapes)
            yield tensors, expected
            break


def _resized(
    call: Call, changing: Mapping[str, Mapping[int, str]], size_of: Callable[[int], int], only_first: bool
) -> Iterator[Tensor]:
    for name, tensor in zip(call.names, call.tensors, strict=True):
        result = tensor
        for place in changing.get(name, {}):
            if place == 0 or not only_first:
                result = result.narrow(place, 0, size_of(tensor.shape[place]))
        yield result.contiguous()


def _ran(path: Path, cases: Sequence[Sequence[Tensor]], names: Sequence[str]) -> list[dict[str, np.ndarray]]:
    with tempfile.TemporaryDirectory() as folder:
        given, taken = Path(folder, "given.npz"), Path(folder, "taken.npz")
        arrays = {f"{k}/{n}": t.numpy() for k, case in enumerate(cases) for n, t in zip(names, case, strict=True)}
        np.savez(given, **arrays)  # pyright: ignore[reportArgumentType] - names of arrays
        run_python(
            _RUN,
            *map(str, (path, given, taken)),
            problem="ONNX Runtime refuses the exported model",
            remedy="verify=False writes it none the less.",
        )
        with np.load(taken) as found:
            values = {key: found[key] for key in found.files}
    return [
        {key.split("/", 1)[1]: value for key, value in values.items() if key.split("/")[0] == str(k)}
        for k in range(len(cases))
    ]


def _compared(
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
                f"{list(reference.shape)}. Fix that size: dynamic=False, or name the dimensions that change."
            )
        error = _error(torch.from_numpy(found), reference)
        if error > worst or not where:
            worst, where = error, label
    return Checked(shapes, worst, where)


def _error(found: Tensor, reference: Tensor) -> float:
    if not reference.numel():
        return 0.0
    if not reference.is_floating_point():
        return float((found != reference).any())
    same = (found == reference) | (found.isnan() & reference.isnan())
    difference = torch.where(same, 0.0, (found.double() - reference.double()).abs())
    finite = reference[reference.isfinite()].double().abs()
    return float(difference.max()) / max(float(finite.max()) if finite.numel() else 0.0, 1e-12)
