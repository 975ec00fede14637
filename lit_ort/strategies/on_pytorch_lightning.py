"""The strategies for code that imports `pytorch_lightning`."""

from __future__ import annotations

import sys

from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy

from lit_ort.checkpoint_io import AtomicCheckpoints
from lit_ort.strategies import register_in_pytorch_lightning
from lit_ort.strategies.ddp import DDPMixin
from lit_ort.strategies.pipeline_strategy import PipelineMixin
from lit_ort.strategies.processes import Unwrapped
from lit_ort.strategies.single import SingleDeviceMixin
from lit_ort.strategies.tensor import TensorMixin
from lit_ort.strategies.zero1 import Zero1Mixin


class PyTorchLightningCheckpointIO(AtomicCheckpoints, TorchCheckpointIO):
    """As `lit_ort.AtomicCheckpointIO`; which objects it reads depends on the version of `pytorch_lightning`."""


class _OfPyTorchLightning:
    checkpoint_io_class = PyTorchLightningCheckpointIO
    precision_class = Precision


class ORTStrategy(_OfPyTorchLightning, SingleDeviceMixin, SingleDeviceStrategy):
    """As `lit_ort.ORTStrategy`, based on the classes of `pytorch_lightning`."""


class ORTDDPStrategy(_OfPyTorchLightning, DDPMixin, DDPStrategy):
    """As `lit_ort.ORTDDPStrategy`, based on the classes of `pytorch_lightning`."""


class ORTZero1Strategy(_OfPyTorchLightning, Zero1Mixin, DDPStrategy):
    """As `lit_ort.ORTZero1Strategy`, based on the classes of `pytorch_lightning`."""


class ORTPipelineStrategy(_OfPyTorchLightning, PipelineMixin, Unwrapped, DDPStrategy):
    """As `lit_ort.ORTPipelineStrategy`, based on the classes of `pytorch_lightning`."""


class ORTTensorStrategy(_OfPyTorchLightning, TensorMixin, Unwrapped, DDPStrategy):
    """As `lit_ort.ORTTensorStrategy`, based on the classes of `pytorch_lightning`."""


register_in_pytorch_lightning(sys.modules[__name__])
