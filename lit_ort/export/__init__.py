"""Exports trained modules as ONNX files for inference, and training steps as ONNX files for training anywhere."""

from lit_ort.export.export_result import Checked, Exported
from lit_ort.export.module_export import export
from lit_ort.export.training_checkpoint import load_training_checkpoint
from lit_ort.export.training_export import ExportedTraining, export_training

__all__ = ["Checked", "Exported", "ExportedTraining", "export", "export_training", "load_training_checkpoint"]
