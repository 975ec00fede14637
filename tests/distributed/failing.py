"""A training run on two ranks, one of which fails: `python failing.py <failure>`, also under torchrun."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lit_ort import ORTDDPStrategy
from tests.lightning_models import Net, loader, trainer

# A rank that starts on busy cores can take half of it.
WAIT_S = 60


class Failing(Net):
    def on_train_batch_start(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        if self.global_rank == 1 and batch_idx == 2:
            _fail(sys.argv[1])
        if sys.argv[1] == "stopped" and batch_idx == 2:
            self._stop_while_another_rank_waits()

    def _stop_while_another_rank_waits(self) -> None:
        message = torch.zeros(1)
        if self.global_rank == 1:
            dist.recv(message, 0)
        else:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGTERM)
            dist.send(message, 1)


def _fail(failure: str) -> None:
    if failure == "raises":
        raise ValueError("row 17 of the data is broken")
    if failure == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if failure == "hangs":
        time.sleep(600)


def _die_if_first(runner: Any) -> None:
    if runner.local_rank == 0:
        time.sleep(float(sys.argv[2]))
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    alone = sys.argv[1] == "alone"  # the second of two nodes; the first one never starts
    limit_s = {"alone": 5, "killed": 600}.get(sys.argv[1], WAIT_S)
    strategy: Any = ORTDDPStrategy(timeout=timedelta(seconds=limit_s))
    processes: dict[str, Any] = {"devices": 1, "num_nodes": 2} if alone else {"devices": 2}
    runner = trainer(strategy, **processes)
    if sys.argv[1] == "killed":  # the first process, before it joins the other one
        setup_environment = runner.strategy.setup_environment
        runner.strategy.setup_environment = lambda: _die_if_first(runner) or setup_environment()
    runner.fit(Failing(), loader(), loader())


if __name__ == "__main__":
    main()
