"""A model into its file, once it was compared with its module."""

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
from lit_ort.export.export import INT8
from lit_ort.export.graph import changing_of
from lit_ort.export.reduced import halve, quantize
from lit_ort.export.result import Checked, Exported
from lit_ort.version import __version__

# Protocol buffers end at 2 GiB; weights go into a file of their own from here on.
EXTERNAL_BYTES = 2**31 - 2**24


def describe(model: onnx.ModelProto, module: nn.Module, step: str, more: Mapping[str, str]) -> None:
    facts = {
        "class": f"{type(module).__module__}.{type(module).__qualname__}",
        "step": step,
        "torch": torch.__version__,
        "lit_ort": __version__,
        **more,
    }
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, facts)
    model.producer_name = "lit_ort"


def write(
    model: onnx.ModelProto, target: Path, call: Call, form: str | None, verify: bool, tolerance: float
) -> Exported:
    """Writes and compares a model beside its place, and then puts it there."""
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
    """A folder whose files move into another one at the end; after an error none of them does.

    Args:
        last: the file that moves last, without which the others mean nothing.

    Raises:
        ExportError: they can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=f".{last}.") as name:
            yield Path(name)
            for file in sorted(_files_of(Path(name)), key=lambda file: file.name == last):
                # Tools write weights that only their owner can read.
                shutil.copymode(Path(name, last), file)
                os.replace(file, folder / file.name)
    except OSError as error:
        raise ExportError(
            f"{folder / last} can't be written: {error.strerror or error}. Choose another path."
        ) from error


def _save(model: onnx.ModelProto, path: Path) -> bool:
    """Writes a model; returns whether its weights are in a file of their own."""
    external = _weight_bytes(model) > EXTERNAL_BYTES
    if external:
        import onnx_ir  # comes with onnxscript, of the export extra

        # onnx.save_model would move the weights out of the model that it is passed.
        onnx_ir.save(onnx_ir.from_proto(model), path, external_data=f"{path.name}.data")
    else:
        onnx.save_model(model, path)
    return external


def _weight_bytes(model: onnx.ModelProto) -> int:
    """Bytes of all initializers. A protocol buffer beyond 2 GiB fails to compute its own size."""
    return sum(
        math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        for tensor in model.graph.initializer
    )


def _files_of(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()]


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files_of(folder))


def sizes_of(model: onnx.ModelProto, names: Sequence[str]) -> dict[str, tuple[int | str, ...]]:
    """The sizes of these inputs; those that may change by name."""
    changing = changing_of(model)
    dims = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}
    return {name: tuple(changing[name].get(k, dim.dim_value) for k, dim in enumerate(dims[name])) for name in names}


def require_close(checked: Sequence[Checked], tolerance: float, what: str = "") -> None:
    for one in checked:
        # NaN is close to nothing.
        if not one.error <= tolerance:
            own = one.shapes == checked[0].shapes
            remedy = "Choose another form or a larger tolerance" if own else FIX_SIZE
            raise ExportError(
                f"The exported model{what} errs by {one.error:.1e} of the largest value in {one.output} at "
                f"{one.shapes}, and tolerance={tolerance:g}. {remedy}."
            )
