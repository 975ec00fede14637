"""Any operator of torch's as a kernel, with the gradients of torch's own autograd.

A node says in words which operator it calls and with what. Where a gradient will be asked for, the operator runs with
autograd on, and what autograd keeps of it waits for the backward's node.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from lit_ort.runtime.aten import Kernel
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.random import draw_seed

NAME, BACKWARD = "torch_call", "torch_call_backward"
FUNCTION = "function."
Functions = Sequence[Callable[..., Any]]
_TYPES = (torch.dtype, torch.memory_format)
# Words that say which of the node's inputs an argument is.
_PLACES = frozenset({"tensor", "number"})


@dataclasses.dataclass(frozen=True)
class TorchCall:
    """A call of an operator.

    Args:
        target: the operator, such as `aten.elu.default`; `function.0` for the first of the graph's own functions.
        arguments, keywords: what it is called with, in plain words; a tensor, or a size that changes, is its position
            among the node's inputs.
        results: which of its results the node has; the first and only one of most.
        wants: how many of the inputs want a gradient, the first ones.
        used: positions among the node's outputs of those that a gradient comes back for.
    """

    target: str
    arguments: list[Any]
    keywords: dict[str, Any]
    results: tuple[int, ...] = (0,)
    wants: int = 0
    used: tuple[int, ...] = ()

    @property
    def operator(self) -> torch._ops.OpOverload:
        return functools.reduce(getattr, self.target.split("."), torch.ops)  # type: ignore[return-value]

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return not self.target.startswith(FUNCTION) and torch.Tag.nondeterministic_seeded in self.operator.tags

    def describe(self) -> str:
        """What a node says of it."""
        return json.dumps(dataclasses.asdict(self))

    def apply(self, tensors: Sequence[torch.Tensor], functions: Functions = ()) -> list[torch.Tensor]:
        """The node's results."""
        own = self.target.startswith(FUNCTION)
        operator = functions[int(self.target.removeprefix(FUNCTION))] if own else self.operator
        given = [_given(word, tensors) for word in self.arguments]
        found = operator(*given, **{name: _given(word, tensors) for name, word in self.keywords.items()})
        results = (found,) if isinstance(found, torch.Tensor) else found
        return [results[k] for k in self.results]

    def reordered(self, order: Sequence[int], wants: int, used: Sequence[int]) -> TorchCall:
        """The same call for inputs in another order, of which the first `wants` get gradients."""
        place = {before: after for after, before in enumerate(order)}
        return dataclasses.replace(
            self,
            arguments=[_moved(word, place) for word in self.arguments],
            keywords={name: _moved(word, place) for name, word in self.keywords.items()},
            wants=wants,
            used=tuple(used),
        )


@functools.lru_cache(maxsize=4096)
def call_of(description: str) -> TorchCall:
    """What a node's description says."""
    words = json.loads(description)
    return TorchCall(**{**words, "results": tuple(words["results"]), "used": tuple(words["used"])})


def words_for(value: Any, tensors: list[torch.Tensor]) -> Any:
    """An argument in plain words; tensors that are not in `tensors` are appended.

    Raises:
        TypeError: it has none.
    """
    if isinstance(value, torch.Tensor):
        position = next((k for k, tensor in enumerate(tensors) if tensor is value), len(tensors))
        tensors[position:] = tensors[position:] or [value]
        return {"tensor": position, "bool": value.dtype == torch.bool}
    if isinstance(value, _TYPES):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, (torch.device, torch.layout)):
        # Everything lies on the CPU, strided.
        return None
    if isinstance(value, (list, tuple)):
        return [words_for(part, tensors) for part in value]
    if isinstance(value, torch.SymInt):
        # A size that changes is given to the node as a tensor.
        tensors.append(torch.scalar_tensor(value, dtype=torch.int64))  # type: ignore[arg-type]
        return {"number": len(tensors) - 1}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"an argument is a {type(value).__name__}, which a kernel can't be told")


def _given(word: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(word, dict) and "number" in word:
        return int(tensors[word["number"]])
    if isinstance(word, dict) and "tensor" in word:
        given = tensors[word["tensor"]]
        # ONNX Runtime hands truth values over as bytes.
        return given.view(torch.bool) if word.get("bool") and given.dtype == torch.uint8 else given
    if isinstance(word, dict):
        return getattr(torch, word["torch"])
    return [_given(part, tensors) for part in word] if isinstance(word, list) else word


def _moved(word: Any, place: dict[int, int]) -> Any:
    if isinstance(word, dict) and not word.keys().isdisjoint(_PLACES):
        return {name: place[part] if name in _PLACES else part for name, part in word.items()}
    return [_moved(part, place) for part in word] if isinstance(word, list) else word


@dataclasses.dataclass
class _Saved:
    leaves: list[torch.Tensor]
    results: list[torch.Tensor]


class TorchCalls:
    """The kernels of one session's calls, with what they keep for the backward.

    A forward hands out a ticket, a number in memory of its own; what autograd has kept goes with the backward that
    brings it back, or with that memory where none comes.

    Args:
        functions: what a graph calls that is no operator of torch's.
    """

    def __init__(self, functions: Functions = ()) -> None:
        self._functions = functions
        self._saved: dict[int, _Saved] = {}
        self._numbers = itertools.count()

    @property
    def kernels(self) -> dict[str, Kernel]:
        return {NAME: Kernel(NAME, self._forward), BACKWARD: Kernel(BACKWARD, self._backward)}

    def _forward(self, description: str, pool: BufferPool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        call = call_of(description)
        with _seeded() if call.draws else nullcontext():
            if not call.used:
                return tuple(_apart(result, tensors) for result in call.apply(tensors, self._functions))
            leaves = [tensor.detach().requires_grad_() for tensor in tensors[: call.wants]]
            with torch.enable_grad():
                results = call.apply([*leaves, *tensors[call.wants :]], self._functions)
        ticket = self._ticket(_Saved(leaves, [results[k] for k in call.used]))
        return (*(_apart(result.detach(), tensors) for result in results), ticket)

    def _backward(self, description: str, pool: BufferPool, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of the inputs that want one.

        Args:
            given: gradients of the used outputs; then the forward's inputs and outputs, which are only here because
                nobody may write into their memory before; the last one is the ticket.
        """
        call = call_of(description)
        saved = self._saved.pop(int(given[-1]))
        pairs = zip(saved.results, given, strict=False)
        # A result may be an input itself, which is a leaf.
        roots = [(result, gradient) for result, gradient in pairs if result.requires_grad]
        found: Sequence[torch.Tensor | None] = [None] * call.wants
        if roots:
            results = [result for result, _ in roots]
            # ONNX Runtime has scalars as one element of one dimension in some places.
            gradients = [gradient.reshape(result.shape) for result, gradient in roots]
            with torch.enable_grad():
                found = torch.autograd.grad(results, saved.leaves, gradients, allow_unused=True)
        return tuple(
            torch.zeros_like(leaf) if gradient is None else _apart(gradient, given)
            for leaf, gradient in zip(saved.leaves, found, strict=True)
        )

    def _ticket(self, saved: _Saved) -> torch.Tensor:
        number = next(self._numbers)
        memory = np.array([number], dtype=np.int64)
        self._saved[number] = saved
        weakref.finalize(memory, self._saved.pop, number, None)
        return torch.from_numpy(memory)


def _apart(result: torch.Tensor, given: Sequence[torch.Tensor]) -> torch.Tensor:
    """A result in memory of its own, as what lies in an input's may be written over; truth values as bytes."""
    result = result.view(torch.uint8) if result.dtype == torch.bool else result
    storage = result.untyped_storage().data_ptr()
    return result.clone() if any(t.untyped_storage().data_ptr() == storage for t in given) else result


@contextmanager
def _seeded() -> Iterator[None]:
    """Draws from the generator of the run, and leaves torch's own where it was."""
    seed = draw_seed()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
