"""The keyword arguments that strategies share.

Each is declared once here, or in `lit_ort.options`: `Unpack` shows them to editors, type checkers and LightningCLI.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision as PrecisionPlugin

from lit_ort.options import OptionArguments

Compile = Literal["auto", "always", "never"]
Schedule = Literal["1f1b", "gpipe", "interleaved"]
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class StrategyArguments(OptionArguments, total=False):
    """Arguments of every strategy.

    Args:
        fused_optimizer: let Adam, AdamW, SGD and Adagrad step in torch's fused form where the module chose no form; the
            default is True.
    """

    fused_optimizer: bool


class ProcessArguments(StrategyArguments, total=False):
    """Arguments of the strategies with several processes.

    Args:
        timeout: how long a process waits for another one; 30 minutes by default.
        process_group_backend: the backend of torch.distributed; gloo by default.
        start_method: how Lightning starts the processes; "popen", the default, runs the script again.
        accelerator: as in Lightning's `DDPStrategy`; only the CPU's.
        parallel_devices: as in Lightning's `DDPStrategy`, which sets them from the Trainer's devices.
        cluster_environment: as in Lightning's `DDPStrategy`; it defines the ranks.
        checkpoint_io: as in Lightning's `DDPStrategy`.
        precision_plugin: as in Lightning's `DDPStrategy`, for one of the precisions of `ORTOptions`.
    """

    timeout: timedelta | None
    process_group_backend: str | None
    start_method: StartMethod
    accelerator: Accelerator | None
    parallel_devices: list[torch.device] | None
    cluster_environment: ClusterEnvironment | None
    checkpoint_io: CheckpointIO | None
    precision_plugin: PrecisionPlugin | None
