"""Runs a function in several processes that torch.distributed joins over gloo on 127.0.0.1."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lit_ort.errors import LitOrtError
from tests.scripts import PRELOADED

T = TypeVar("T")


def run_on_ranks(function: Callable[..., T], ranks: int, *args: Any) -> list[T]:
    """What `function(*args)`, importable by name, returns on each rank. As `torchrun --nproc-per-node=<ranks>`.

    Raises:
        ChildFailedError: a rank raised; its message has the traceback of the first one that did.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    # The launcher leaves handlers behind, which would raise errors of its own in later tests.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        results = elastic_launch(config, _called)(function, *args)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return [results[rank] for rank in range(ranks)]


def _called(function: Callable[..., T], *args: Any) -> T:
    gc.freeze()  # as tests/conftest.py
    return function(*args)


def message_of(function: Callable[[], Any]) -> str:
    """What a function is refused with, for a rank to hand back."""
    try:
        function()
    except (LitOrtError, ValueError) as error:
        return str(error)
    return "nothing was raised"
