"""The strategies for code that imports `pytorch_lightning`."""

from __future__ import annotations

import sys

from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy

from lit_ort.strategies import register_in_pytorch_lightning
from lit_ort.strategies.ddp import DDPMixin
from lit_ort.strategies.pipeline import PipelineMixin
from lit_ort.strategies.processes import Unwrapped
from lit_ort.strategies.single import SingleDeviceMixin
from lit_ort.strategies.tensor import TensorMixin
from lit_ort.strategies.zero1 import Zero1Mixin


class ORTStrategy(SingleDeviceMixin, SingleDeviceStrategy):
    """As `lit_ort.ORTStrategy`, based on the classes of `pytorch_lightning`."""

    precision_class = Precision


class ORTDDPStrategy(DDPMixin, DDPStrategy):
    """As `lit_ort.ORTDDPStrategy`, based on the classes of `pytorch_lightning`."""

    precision_class = Precision


class ORTZero1Strategy(Zero1Mixin, DDPStrategy):
    """As `lit_ort.ORTZero1Strategy`, based on the classes of `pytorch_lightning`."""

    precision_class = Precision


class ORTPipelineStrategy(PipelineMixin, Unwrapped, DDPStrategy):
    """As `lit_ort.ORTPipelineStrategy`, based on the classes of `pytorch_lightning`."""

    precision_class = Precision


class ORTTensorStrategy(TensorMixin, Unwrapped, DDPStrategy):
    """As `lit_ort.ORTTensorStrategy`, based on the classes of `pytorch_lightning`."""

    precision_class = Precision


register_in_pytorch_lightning(sys.modules[__name__])
