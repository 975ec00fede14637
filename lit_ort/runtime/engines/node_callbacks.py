"""Runs torch nodes for ONNX Runtime's callbacks, which can identify their run only by the thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from lit_ort._compat.torch import set_grad_enabled
from lit_ort.errors import SessionError
from lit_ort.runtime.engines.engine_interface import CHECK_THE_BATCH, LocationOf, Model
from lit_ort.runtime.nodes import NodeFunction, RunState


class _Current(threading.local):
    """The state that the callbacks of this thread read, and the failure that they report."""

    nodes: Sequence[NodeFunction] = ()
    location_of: LocationOf | None = None
    state: RunState | None = None
    failure: tuple[str | None, BaseException] | None = None


_current = _Current()


class Serving:
    """Serves the torch nodes of one run on this thread; raises the error of a node, which ctypes would discard.

    Args:
        model: the model that runs.
        state: of the run.

    Raises:
        SessionError: a node raised an error, which is the cause. An error that is not an Exception, such as
            KeyboardInterrupt, and an error of the program's own, such as a failed assertion, are raised unchanged.
    """

    __slots__ = ("_autocast", "_had_gradients", "_model", "_previous", "_state")

    def __init__(self, model: Model, state: RunState) -> None:
        self._model, self._state = model, state

    def __enter__(self) -> None:
        model = self._model
        self._previous = _current.nodes, _current.location_of, _current.state
        _current.nodes, _current.location_of, _current.state = model.nodes, model.location_of, self._state
        # The graph determines the dtype of each node, so the caller's autocast must not apply.
        kind = model.device.type
        self._autocast = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else None
        if self._autocast is not None:
            self._autocast.__enter__()
        self._had_gradients = torch.is_grad_enabled()
        set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        set_grad_enabled(self._had_gradients)
        if self._autocast is not None:
            self._autocast.__exit__(*error)
        _current.nodes, _current.location_of, _current.state = self._previous
        failure, _current.failure = _current.failure, None
        if failure is not None:
            _raise(*failure)


def _raise(location: str | None, error: BaseException) -> NoReturn:
    if location is None or not isinstance(error, Exception):
        raise error
    raise SessionError(f"{location} failed: {str(error).rstrip('. ')}", remedy=CHECK_THE_BATCH) from error


def current_state() -> RunState | None:
    """The state of the run in progress on this thread, or None."""
    return _current.state


def results_of(
    position: int,
    tensors: Sequence[torch.Tensor],
    outputs: Callable[[int, Sequence[int], torch.dtype], torch.Tensor] | None = None,
) -> Sequence[torch.Tensor] | None:
    """Runs a node and returns its results; None after a failure, which `Serving` raises.

    Args:
        position: of the node.
        tensors: its inputs.
        outputs: the memory of its outputs, as in `RunState`.
    """
    if _current.failure is None:
        state = _current.state
        try:
            if state is not None:
                state.outputs = outputs
            return _current.nodes[position](state, *tensors)
        except BaseException as error:  # noqa: B036 - nothing may be raised into C
            fail(position, error)
    return None


def fail(position: int, error: BaseException) -> None:
    """Records the error of a node, which `Serving` raises."""
    assert _current.location_of is not None
    _current.failure = (_current.location_of(position, error), error)
