"""The strategies' checkpoint plugin for `pytorch_lightning`, which only its Trainers import."""

from __future__ import annotations

from pytorch_lightning.plugins.io import TorchCheckpointIO

from lit_ort.checkpoint_io import AtomicCheckpoints


class PyTorchLightningCheckpointIO(AtomicCheckpoints, TorchCheckpointIO):
    """As `lit_ort.AtomicCheckpointIO`; which objects it reads depends on the version of `pytorch_lightning`."""
