"""Torch nodes for ONNX Runtime's callbacks, which know nothing of the run that they belong to but their thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from lit_ort.errors import SessionError
from lit_ort.runtime.engines.engine import CHECK_THE_BATCH, Model, WhatFailed
from lit_ort.runtime.nodes import NodeFunction, RunState


class _Current(threading.local):
    """What the callbacks of this thread need to know, and what they have to tell."""

    nodes: Sequence[NodeFunction] = ()
    what_failed: WhatFailed | None = None
    state: RunState | None = None
    failure: tuple[str, BaseException] | None = None


_current = _Current()


@contextmanager
def serving(model: Model, state: RunState) -> Iterator[None]:
    """Serves the torch nodes of one run on this thread, and raises what a node raised.

    Raises:
        SessionError: a node raised, with its error as the cause; ctypes would swallow it. What is no Exception, such as
            KeyboardInterrupt, passes through unchanged.
    """
    previous = (_current.nodes, _current.what_failed, _current.state)
    _current.nodes, _current.what_failed, _current.state = model.nodes, model.what_failed, state
    # The graph says in what each node computes, whatever autocast its caller runs under.
    kind = model.device.type
    plain = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
    try:
        with plain, torch.no_grad():
            yield
    finally:
        _current.nodes, _current.what_failed, _current.state = previous
        failure, _current.failure = _current.failure, None
        if failure is not None:
            label, error = failure
            if not isinstance(error, Exception):
                raise error
            raise SessionError(f"{label} failed: {str(error).rstrip('. ')}", remedy=CHECK_THE_BATCH) from error


def current_state() -> RunState | None:
    """Of the run in progress on this thread."""
    return _current.state


def results_of(position: int, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
    """A node's results; None after a failure, which `serving` raises."""
    if _current.failure is None:
        try:
            return _current.nodes[position](_current.state, *tensors)
        except BaseException as error:  # noqa: B036 - nothing may be raised into C
            fail(position, error)
    return None


def fail(position: int, error: BaseException) -> None:
    """Keeps what a node raised for `serving`."""
    assert _current.what_failed is not None
    _current.failure = (_current.what_failed(position, error), error)
