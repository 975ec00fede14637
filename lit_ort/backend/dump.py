"""Every stage of a graph as a file, for reports."""

from __future__ import annotations

import warnings
from pathlib import Path

import onnx
from torch import fx

from lit_ort.errors import LitOrtWarning
from lit_ort.files import whole_file


class Dump:
    """The files of one graph: FX graphs as text, and what runs as ONNX.

    A folder that can't be written to is named in a warning, and the graph is compiled all the same.

    Args:
        dump_dir: the folder of all graphs, or None to write nothing.
        name: of the graph.
    """

    def __init__(self, dump_dir: str | None, name: str) -> None:
        self._folder = None if dump_dir is None else Path(dump_dir) / name

    def graph(self, stage: str, module: fx.GraphModule) -> None:
        """Writes a stage as text."""
        if self._folder is not None:
            self._write(self._folder / f"{stage}.txt", str(module.graph).encode())

    def model(self, stage: str, model: onnx.ModelProto) -> None:
        """Writes what runs."""
        if self._folder is not None:
            self._write(self._folder / f"{stage}.onnx", model.SerializeToString())

    def _write(self, path: Path, content: bytes) -> None:
        try:
            with whole_file(path) as file:
                file.write(content)
        except OSError as error:
            self._folder = None
            warnings.warn(
                f"dump_dir: {path} can't be written: {error.strerror or error}. The graph is compiled, and its other "
                "stages are not kept. Make room, or choose another folder.",
                LitOrtWarning,
                stacklevel=2,
            )
