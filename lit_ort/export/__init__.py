"""Exports trained modules as ONNX files for inference, and training steps as ONNX files for training anywhere."""

from lit_ort.export.export import export
from lit_ort.export.result import Checked, Exported
from lit_ort.export.training import ExportedTraining, export_training
from lit_ort.export.training_checkpoint import load_training_checkpoint

__all__ = ["Checked", "Exported", "ExportedTraining", "export", "export_training", "load_training_checkpoint"]
