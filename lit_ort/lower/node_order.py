"""Whether ONNX Runtime runs the nodes of native sessions in the order of their model, on which their memory depends."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from lit_ort.lower.model import ModelBuilder
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.nodes import NodeFunction, RunState

if TYPE_CHECKING:
    from lit_ort.runtime.engines.native_sessions import NativeEngine

_INPUT, _TYPE = "x", (torch.float32, [1])
# As in a backward: values that depend on each other, and results that each of them alone determines.
_LINKS = 3


@functools.cache
def runs_in_order(native: NativeEngine) -> bool:
    """Runs a model whose nodes ONNX Runtime would by itself run in another order.

    Args:
        native: creates its session.
    """
    from lit_ort.runtime.engines.native_sessions import NativeModel, RunShapes  # loads LLVM

    builder, ran = ModelBuilder(), list[int]()
    value = builder.input(_INPUT, *_TYPE)
    results = []
    for link in range(_LINKS):
        (value,) = builder.torch_node(2 * link, [value], [_TYPE], "value")
        results += builder.torch_node(2 * link + 1, [value], [_TYPE], "result")
    for name in results:
        builder.output(name, *_TYPE)
    nodes = [_recording(ran, position) for position in range(2 * _LINKS)]
    data = builder.build("node_order", keeps_order=False, is_native=True).SerializeToString()
    model = NativeModel(
        data, nodes, _location_of, [_INPUT], results, results=len(results), uses_openmp=native.uses_openmp
    )
    outputs = tuple((torch.float32, (1,), (1,)) for _ in results)
    native.session(model, threads=1).run(
        [torch.zeros(1, dtype=_TYPE[0])], RunShapes((), outputs, {}, 0), RunState(BufferPool())
    )
    return ran == sorted(ran)


def _recording(ran: list[int], position: int) -> NodeFunction:
    def node(state: RunState, value: torch.Tensor) -> list[torch.Tensor]:
        ran.append(position)
        return [value + 1]

    return node


def _location_of(position: int, error: BaseException) -> str:
    return f"node {position} of the model that tells the order of nodes"
