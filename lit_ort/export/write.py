"""Writes a model to its file after comparing it with its module."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import onnx
import torch
from torch import nn

from lit_ort.errors import ExportError
from lit_ort.export.call import Call
from lit_ort.export.check import FIX_SIZE, check
from lit_ort.export.export_result import Checked, Exported
from lit_ort.export.exported_graph import dynamic_dimensions
from lit_ort.export.form_names import INT8
from lit_ort.export.reduced import halve, quantize
from lit_ort.version import __version__

# Protocol buffers are limited to 2 GiB; larger weights are stored in a separate file.
EXTERNAL_BYTES = 2**31 - 2**24


def describe(model: onnx.ModelProto, module: nn.Module, step: str, more: Mapping[str, str]) -> None:
    """Sets the metadata of a model."""
    metadata = {
        "class": f"{type(module).__module__}.{type(module).__qualname__}",
        "step": step,
        "torch": torch.__version__,
        "lit_ort": __version__,
        **more,
    }
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, metadata)
    model.producer_name = "lit_ort"


def write(
    model: onnx.ModelProto, target: Path, call: Call, form: str | None, verify: bool, tolerance: float
) -> Exported:
    """Writes a model to a temporary folder, compares it with its module, and then moves it to its path.

    Raises:
        ExportError: results differ from the module's, or the file can't be written.
    """
    with unfinished_files(target.parent, target.name) as folder:
        unfinished = folder / target.name
        external = _save(model, unfinished)
        float32_bytes = bytes_of(folder)
        if form == INT8:
            plain = folder / "float32" / target.name
            plain.parent.mkdir()
            for file in _files_of(folder):
                os.replace(file, plain.with_name(file.name))
            quantize(plain, unfinished, external)
        elif form is not None:
            halve(model, form)
            for file in _files_of(folder):
                file.unlink()
            _save(model, unfinished)
        checked = check(model, unfinished, call) if verify else []
        require_close(checked, tolerance, "" if form is None else f" in {form}")
        size = bytes_of(folder)
    inputs = sizes_of(model, call.names)
    return Exported(target, inputs, call.output_names, tuple(checked), form, size, float32_bytes)


@contextlib.contextmanager
def unfinished_files(folder: Path, last: str) -> Iterator[Path]:
    """A temporary folder whose files are moved to another folder at the end; after an error, none is moved.

    Args:
        folder: the other folder.
        last: the file that is moved last, without which the others are not valid.

    Raises:
        ExportError: the files can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=f".{last}.") as name:
            yield Path(name)
            files = sorted(_files_of(Path(name)), key=lambda file: file.name == last)
            for file in files:
                # Some tools write files of weights that only their owner can read.
                shutil.copymode(Path(name, last), file)
                os.replace(file, folder / file.name)
            if all(file.name != _weights_file(last) for file in files):
                (folder / _weights_file(last)).unlink(missing_ok=True)  # of a larger model before
    except OSError as error:
        raise ExportError(
            f"{folder / last} can't be written: {error.strerror or error}. Choose another path."
        ) from error


def _save(model: onnx.ModelProto, path: Path) -> bool:
    """Writes a model; returns whether its weights are in a separate file."""
    external = _weight_bytes(model) > EXTERNAL_BYTES
    if external:
        import onnx_ir  # comes with onnxscript, of the export extra

        # onnx.save_model would remove the weights from the model in memory.
        onnx_ir.save(onnx_ir.from_proto(model), path, external_data=_weights_file(path.name))
    else:
        onnx.save_model(model, path)
    return external


def _weights_file(name: str) -> str:
    return f"{name}.data"


def _weight_bytes(model: onnx.ModelProto) -> int:
    """The bytes of all initializers. A protocol buffer of more than 2 GiB can't compute its own size."""
    return sum(
        math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        for tensor in model.graph.initializer
    )


def _files_of(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()]


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files_of(folder))


def sizes_of(model: onnx.ModelProto, names: Sequence[str]) -> dict[str, tuple[int | str, ...]]:
    """The sizes of the named inputs; dynamic sizes are names."""
    dynamic = dynamic_dimensions(model)
    dims = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}
    return {name: tuple(dynamic[name].get(k, dim.dim_value) for k, dim in enumerate(dims[name])) for name in names}


def require_close(checked: Sequence[Checked], tolerance: float, form: str = "", remedy: str | None = None) -> None:
    """Raises ExportError if an error exceeds the tolerance.

    Args:
        checked: the errors at each size, first at the batch's own.
        tolerance: the largest error to accept.
        form: the form of the model for the message, such as ` in int8`.
        remedy: what to do about an error, if that is known.
    """
    for comparison in checked:
        # The negation also rejects NaN.
        if not comparison.error <= tolerance:
            is_batch_size = comparison.shapes == checked[0].shapes
            default = "Use another form or a larger tolerance" if is_batch_size else FIX_SIZE
            raise ExportError(
                f"The exported model{form} has an error of {comparison.error:.1e} of the largest value in "
                f"{comparison.output} at {comparison.shapes}, but tolerance={tolerance:g}. {remedy or default}."
            )
