"""Trained modules as ONNX files: of standard operators for inference, or with what training on a device needs."""

from lit_ort.export.export import export
from lit_ort.export.result import Checked, Exported
from lit_ort.export.training import ExportedTraining, export_training
from lit_ort.export.training_checkpoint import load_training_checkpoint

__all__ = ["Checked", "Exported", "ExportedTraining", "export", "export_training", "load_training_checkpoint"]
