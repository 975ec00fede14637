"""Writes every stage of a graph to a file, for bug reports."""

from __future__ import annotations

import warnings
from pathlib import Path

import onnx
from torch import fx

from lit_ort.errors import LitOrtWarning
from lit_ort.files import whole_file
from lit_ort.ops.region_operator import REGION
from lit_ort.regions.placed_region import from_json


class Dump:
    """The files of one graph: FX graphs as text, the model that runs as ONNX.

    If a file can't be written, a warning names it, and the graph is still compiled.

    Args:
        dump_dir: the folder of all graphs, or None to write nothing.
        name: the graph's name.
    """

    def __init__(self, dump_dir: str | None, name: str) -> None:
        self._folder = None if dump_dir is None else Path(dump_dir) / name

    def graph(self, stage: str, module: fx.GraphModule) -> None:
        """Writes a stage as text."""
        if self._folder is not None:
            regions = [
                f"\n\n{node.name}\n{from_json(str(node.args[1]))}"
                for node in module.graph.nodes
                if node.target is REGION
            ]
            self._write(self._folder / f"{stage}.txt", "".join([str(module.graph), *regions]).encode())

    def model(self, stage: str, model: onnx.ModelProto) -> None:
        """Writes the ONNX model of a phase."""
        if self._folder is not None:
            self._write(self._folder / f"{stage}.onnx", model.SerializeToString())

    def _write(self, path: Path, content: bytes) -> None:
        try:
            with whole_file(path) as file:
                file.write(content)
        except OSError as error:
            self._folder = None
            warnings.warn(
                f"dump_dir: {path} can't be written: {error.strerror or error}. The graph is compiled, but its other "
                "stages are not written. Free disk space, or choose another folder.",
                LitOrtWarning,
                stacklevel=2,
            )
