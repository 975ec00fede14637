"""The models of the suite, in five groups."""

from __future__ import annotations

from benchmarks.models import decoders, encoders, own, sequences, vision
from benchmarks.models.case import Model

GROUPS: dict[str, dict[str, Model]] = {
    "encoders": encoders.MODELS,
    "decoders": decoders.MODELS,
    "sequences and sound": sequences.MODELS,
    "vision": vision.MODELS,
    "users' own": own.MODELS,
}
MODELS: dict[str, Model] = {name: model for models in GROUPS.values() for name, model in models.items()}
