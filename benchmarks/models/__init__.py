"""The models of the suite: five groups of architectures, and this project's tasks."""

from __future__ import annotations

from benchmarks.models import decoders, encoders, own, sequences, tasks, vision
from benchmarks.models.case import Model

TASKS = "this project's tasks"
GROUPS: dict[str, dict[str, Model]] = {
    "encoders": encoders.MODELS,
    "decoders": decoders.MODELS,
    "sequences and sound": sequences.MODELS,
    "vision": vision.MODELS,
    "hand-written": own.MODELS,
    TASKS: tasks.MODELS,
}
MODELS: dict[str, Model] = {name: model for models in GROUPS.values() for name, model in models.items()}
