"""Compares the results of a model in a plain session on the CPU with those of the module, at several sizes."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor

from lit_ort.errors import ExportError
from lit_ort.export.call import Call
from lit_ort.export.export_result import Checked
from lit_ort.export.exported_graph import dynamic_dimensions
from lit_ort.export.process import run_python

FIX_SIZE = "Fix that size: dynamic=False, or name the dimensions that change"
# With onnxruntime and NumPy only: the model must run without torch and lit_ort.
_RUN = """
import sys
import numpy, onnxruntime
model, inputs_path, results_path = sys.argv[1:]
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
inputs = numpy.load(inputs_path)
names = {value.name for value in session.get_inputs()}
outputs = [value.name for value in session.get_outputs()]
arrays = {}
for case in sorted({key.split("/")[0] for key in inputs.files}):
    feeds = {key.split("/", 1)[1]: inputs[key] for key in inputs.files if key.split("/")[0] == case}
    results = session.run(outputs, {name: value for name, value in feeds.items() if name in names})
    arrays.update({f"{case}/{name}": value for name, value in zip(outputs, results)})
numpy.savez(results_path, **arrays)
"""


def check(model: onnx.ModelProto, path: Path, call: Call) -> list[Checked]:
    """Runs a model at the call's sizes, at half of them and at one, as far as its sizes are dynamic.

    Args:
        model: the model.
        path: the path of its file.
        call: the call of the module.

    Raises:
        ExportError: a session rejects the model, or results have another shape.
    """
    cases = list(cases_of(call, dynamic_dimensions(model)))
    results = run_cases(_RUN, path, [case for case, _ in cases], call.names)
    producers = {name: node.op_type for node in model.graph.node for name in node.output}
    return [compare(call, tensors, expected, results[str(k)], producers) for k, (tensors, expected) in enumerate(cases)]


def cases_of(
    call: Call, dynamic: Mapping[str, Mapping[int, str]]
) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Inputs and results at each size; sizes that the module itself doesn't support are skipped."""
    done: set[tuple[torch.Size, ...]] = set()
    for size_of in (lambda size: size, lambda size: -(-size // 2), lambda size: 1):
        for only_first in (False, True):
            tensors = resized(call.names, call.tensors, dynamic, size_of, only_first)
            shapes = tuple(tensor.shape for tensor in tensors)
            if shapes in done:
                continue
            try:
                with torch.no_grad():
                    expected = call.function(*tensors)
            # User code can raise any exception: for example, a convolution's kernel is larger than its input.
            except Exception:
                continue
            # For example, the mean of an empty tensor. Values that are NaN at the batch's own sizes are compared.
            if done and any(result.isnan().any() for result in expected):
                continue
            done.add(shapes)
            yield tensors, expected
            break


def resized(
    names: Sequence[str],
    tensors: Sequence[Tensor],
    dynamic: Mapping[str, Mapping[int, str]],
    size_of: Callable[[int], int],
    only_first: bool = False,
) -> tuple[Tensor, ...]:
    """Shrinks tensors to their first values along dynamic dimensions.

    Args:
        names, tensors: the inputs.
        dynamic: the names of dynamic sizes, or sums of names, by input and dimension.
        size_of: returns the new size for a size.
        only_first: changes only the first dimension of each tensor.
    """
    sizes: dict[str, int] = {}
    for name, tensor in zip(names, tensors, strict=True):
        for dimension, label in dynamic.get(name, {}).items():
            size = tensor.shape[dimension]
            sizes.setdefault(label, size if dimension and only_first else size_of(size))
    shrunk = []
    for name, tensor in zip(names, tensors, strict=True):
        for dimension, label in dynamic.get(name, {}).items():
            tensor = tensor.narrow(dimension, 0, min(size_named(label, sizes), tensor.shape[dimension]))
        shrunk.append(tensor.contiguous())
    return tuple(shrunk)


def size_named(label: str, sizes: Mapping[str, int]) -> int:
    """The size of a dimension by its name, or by a sum of names, such as `past + length`."""
    parts = [part.strip() for part in label.split("+")]
    if all(part in sizes or part.isdigit() for part in parts):
        return sum(sizes[part] if part in sizes else int(part) for part in parts)
    return sizes[label]


def run_cases(
    program: str, path: Path, cases: Sequence[Sequence[Tensor]], names: Sequence[str]
) -> dict[str, dict[str, np.ndarray]]:
    """Runs a program in a separate process; returns its arrays by group (such as the case's number) and name.

    Args:
        program: the source of the program. Its arguments are `path`, a file with arrays named `CASE/NAME`, and the path
            of the file to which it writes arrays named `GROUP/NAME`.
        path: the first argument of the program.
        cases: the input tensors of each case.
        names: the names of the input tensors.
    """
    # On the disk of the model, so that an error of a full one is about that.
    with tempfile.TemporaryDirectory(dir=path if path.is_dir() else path.parent) as folder:
        inputs_path, results_path = Path(folder, "inputs.npz"), Path(folder, "results.npz")
        arrays = {f"{k}/{n}": t.numpy() for k, case in enumerate(cases) for n, t in zip(names, case, strict=True)}
        np.savez(inputs_path, **arrays)  # pyright: ignore[reportArgumentType] - names of arrays
        run_python(
            program,
            *map(str, (path, inputs_path, results_path)),
            problem="ONNX Runtime rejects the exported model",
            remedy="If sizes depend on each other, name them: dynamic={'mask': {1: 'past + length'}, ...}. "
            "verify=False writes the model without this check.",
        )
        results: dict[str, dict[str, np.ndarray]] = {}
        with np.load(results_path) as values:
            for key in values.files:
                group, name = key.split("/", 1)
                results.setdefault(group, {})[name] = values[key]
    return results


def compare(
    call: Call,
    tensors: Sequence[Tensor],
    expected: Sequence[Tensor],
    results: Mapping[str, np.ndarray],
    producers: Mapping[str, str],
) -> Checked:
    """Compares the results of one case with those of the module.

    Args:
        call: the call of the module.
        tensors: the inputs.
        expected: the results of the module.
        results: the results of the model, by name.
        producers: the operators that compute the results, by name of the result.

    Raises:
        ExportError: a result has another shape.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in zip(call.names, tensors, strict=True)}
    largest_error, output = 0.0, ""
    for name, reference in zip(call.output_names, expected, strict=True):
        result = results[name]
        label = f"{name} ({producers.get(name, 'an input')})"
        if result.shape != tuple(reference.shape):
            raise ExportError(
                f"The exported model returns {label} of shape {list(result.shape)} at {shapes}, but the module returns "
                f"{list(reference.shape)}. {FIX_SIZE}."
            )
        error = error_of(torch.from_numpy(result), reference)
        if error > largest_error or not output:
            largest_error, output = error, label
    return Checked(shapes, largest_error, output)


def error_of(result: Tensor, reference: Tensor) -> float:
    """The largest absolute difference, divided by the reference's largest finite absolute value."""
    if not reference.numel():
        return 0.0
    if not reference.is_floating_point():
        return float((result != reference).any())
    same = (result == reference) | (result.isnan() & reference.isnan())
    # A value that is not a number on one side alone is as far away as can be.
    difference = torch.where(same, 0.0, (result.double() - reference.double()).abs()).nan_to_num(
        nan=math.inf, posinf=math.inf
    )
    finite = reference[reference.isfinite()].double().abs()
    return float(difference.max()) / max(float(finite.max()) if finite.numel() else 0.0, 1e-12)
