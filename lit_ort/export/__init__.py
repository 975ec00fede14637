"""Trained modules as ONNX files of standard operators."""

from lit_ort.export.export import export
from lit_ort.export.result import Checked, Exported

__all__ = ["Checked", "Exported", "export"]
