"""The strategies for code that imports `pytorch_lightning`."""

from __future__ import annotations

from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy

from lit_ort.strategies.ddp import DDPMixin
from lit_ort.strategies.pipeline import PipelineMixin
from lit_ort.strategies.processes import Unwrapped
from lit_ort.strategies.single import SingleDeviceMixin
from lit_ort.strategies.tensor import TensorMixin
from lit_ort.strategies.zero1 import Zero1Mixin


class ORTStrategy(SingleDeviceMixin, SingleDeviceStrategy):
    """As `lit_ort.ORTStrategy`, on `pytorch_lightning`'s classes."""


class ORTDDPStrategy(DDPMixin, DDPStrategy):
    """As `lit_ort.ORTDDPStrategy`, on `pytorch_lightning`'s classes."""


class ORTZero1Strategy(Zero1Mixin, DDPStrategy):
    """As `lit_ort.ORTZero1Strategy`, on `pytorch_lightning`'s classes."""


class ORTPipelineStrategy(PipelineMixin, Unwrapped, DDPStrategy):
    """As `lit_ort.ORTPipelineStrategy`, on `pytorch_lightning`'s classes."""


class ORTTensorStrategy(TensorMixin, Unwrapped, DDPStrategy):
    """As `lit_ort.ORTTensorStrategy`, on `pytorch_lightning`'s classes."""
