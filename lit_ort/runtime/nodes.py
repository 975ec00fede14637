"""Torch nodes as Python functions; operators and constant arguments are resolved once, when a session is created."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lit_ort._compat.devices import CPU, is_cpu
from lit_ort._compat.torch_ops import OpOverload, memory_argument, returns_list
from lit_ort.ops import OPERATORS
from lit_ort.ops.operator import Allocator, Operator
from lit_ort.ops.region_operator import REGION_NAME
from lit_ort.runtime.argument_codec import SIZE, SLOT, constant_of, is_constant
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.calls import CALLS, CALLS_INTO_MEMORY
from lit_ort.runtime.program import AS_BYTES, AS_REAL, Statement, TorchNode
from lit_ort.runtime.random import RandomNumbers


@dataclasses.dataclass(eq=False)
class RunState:
    """The state of one run, which its torch nodes receive, one after the other.

    Args:
        pool: memory for results on the CPU, and for ONNX Runtime's own requests.
        sizes: the values of the phase's size terms.
        random: the random numbers of the run.
        outputs: returns the memory of an output of the node that runs, by its position, shape and dtype; None if
            results become outputs wherever they are.
    """

    pool: BufferPool
    sizes: Sequence[int] = ()
    random: RandomNumbers = dataclasses.field(default_factory=RandomNumbers)
    outputs: Callable[[int, Sequence[int], torch.dtype], torch.Tensor] | None = None

    def output(self, position: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a result that is an output."""
        if self.outputs is None:
            return self.pool.empty(*shape, dtype=dtype)
        return self.outputs(position, shape, dtype)

    def allocator_of(self, *outputs: tuple[int, tuple[int, ...], torch.dtype]) -> Allocator:
        """Memory for an operator of this project.

        Args:
            outputs: positions, shapes and dtypes of the outputs that are its results.
        """
        return self.pool if self.outputs is None else _OutputAllocator(self, outputs)


class _OutputAllocator:
    """The pool, whose first allocation of an output's shape and dtype is that output.

    If the operator returns something else, its result is copied into the output, as any other.
    """

    __slots__ = ("_outputs", "_state")

    def __init__(self, state: RunState, outputs: Sequence[tuple[int, tuple[int, ...], torch.dtype]]) -> None:
        self._state, self._outputs = state, list(outputs)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        for k, (position, *of_output) in enumerate(self._outputs):
            if of_output == [shape, dtype]:
                del self._outputs[k]
                return self._state.output(position, shape, dtype)
        return self._state.pool.empty(*shape, dtype=dtype)


NodeFunction = Callable[..., Sequence[torch.Tensor]]
# The file name of a node's source in tracebacks.
_FILE = "<torch node>"
# Functions of a strategy that implement an operator, such as the optimizer's, by the operator's name.
Hooks = Mapping[str, Callable[..., Any]]


def bind(
    node: TorchNode, hooks: Hooks, device: torch.device = CPU, regions: Mapping[str, Callable[..., Any]] | None = None
) -> NodeFunction:
    """Create the function of a node, which maps the run's state and the node's inputs to its outputs.

    Args:
        node: the torch node. Its inputs and outputs have the representation that ONNX Runtime uses for them.
        hooks: functions that replace operators, by target.
        device: the device of the node's operators; the project's own kernels are used on the CPU only.
        regions: the functions of its regions, by their text.
    """
    positions = {slot: k for k, slot in enumerate(node.outputs) if not node.forms[k] and node.outputs.count(slot) == 1}
    source = _Source(len(node.inputs), positions, device, regions or {})
    for position, form in enumerate(node.inputs):
        source.convert_input(position, form)
    last_uses = _last_uses(node)
    for position, statement in enumerate(node.statements):
        source.statement(statement, hooks)
        source.drop(slot for slot in last_uses.get(position, ()) if slot not in node.outputs)
    source.return_outputs(node.outputs, node.forms)
    return source.function()


def failed_statement(node: TorchNode, error: BaseException) -> Statement | None:
    """The statement of a node that raised an error, or None if the error comes from elsewhere."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != _FILE:
        frame = frame.tb_next
    # The first line is the function's signature; the next lines convert the inputs that have a form.
    position = -1 if frame is None else frame.tb_lineno - 2 - sum(bool(form) for form in node.inputs)
    return node.statements[position] if 0 <= position < len(node.statements) else None


class _Source:
    """The Python source of one node; it contains only names of slots and constants.

    Each statement is one line, so that the line number of an error identifies the statement.
    """

    def __init__(
        self,
        inputs: int,
        outputs: Mapping[int, int],
        device: torch.device,
        regions: Mapping[str, Callable[..., Any]],
    ) -> None:
        self._outputs, self._device, self._regions = outputs, device, regions
        self._names: dict[str, Any] = {"from_ort": from_ort, "to_ort": to_ort}
        arguments = ", ".join(f"v{k}" for k in range(inputs))
        self._lines = [f"def node(state{', ' if inputs else ''}{arguments}):"]
        self._slots = inputs

    def convert_input(self, position: int, form: str) -> None:
        if form:
            self._add(f"v{position} = from_ort(v{position}, {self._name_of(form)})")

    def statement(self, statement: Statement, hooks: Hooks) -> None:
        outputs = [self._outputs.get(self._slots + k) for k in range(statement.results)]
        call = self._call(statement, hooks, outputs)
        slots = [f"v{self._slots + k}" for k in range(statement.results)]
        self._slots += statement.results
        is_list = len(slots) > 1 or (statement.target not in hooks and returns_list(overload_of(statement.target)))
        self._add(f"{', '.join(slots)}{',' if is_list else ''} = {call}" if slots else call)

    def drop(self, slots: Any) -> None:
        variables = [f"v{slot}" for slot in sorted(slots)]
        if variables:
            self._lines[-1] += f"; del {', '.join(variables)}"

    def return_outputs(self, outputs: Sequence[int], forms: Sequence[str]) -> None:
        values = [f"to_ort(v{k}, {self._name_of(form)})" for k, form in zip(outputs, forms, strict=True)]
        self._add(f"return [{', '.join(values)}]")

    def function(self) -> NodeFunction:
        exec(compile("\n".join(self._lines), _FILE, "exec"), self._names)
        return self._names["node"]

    def _add(self, line: str) -> None:
        self._lines.append(f"    {line}")

    def _call(self, statement: Statement, hooks: Hooks, outputs: Sequence[int | None]) -> str:
        args = [self._word(word) for word in statement.args]
        args += [f"{name}={self._word(word)}" for name, word in statement.kwargs.items() if name.isidentifier()]
        hook = hooks.get(statement.target)
        if hook is not None:
            return f"{self._name_of(hook)}({', '.join(['state', *args])})"
        if statement.target == REGION_NAME:
            tensors, text, sizes = statement.args
            return f"{self._name_of(self._regions[text])}(state.pool, {self._word(tensors)}, {self._word(sizes)})"
        target = overload_of(statement.target)
        operator = OPERATORS.get(target) if is_cpu(self._device) else None
        if statement.stream is not None:
            function = functools.partial(_draw, target, statement.stream, self._device)
            return f"{self._name_of(function)}({', '.join(['state', *args])})"
        if operator is not None:
            kernel = operator.kernel if operator.supports is None else functools.partial(_kernel_or_torch, operator)
            given = [
                f"({position}, ({self._sizes(one.shape)}), {self._name_of(one.dtype)})"
                for one in statement.large
                if (position := outputs[one.position]) is not None
            ]
            allocator = f"state.allocator_of({', '.join(given)})" if given else "state.pool"
            return f"{self._name_of(kernel)}({', '.join([allocator, *args])})"
        if statement.out is not None:
            (output,), (large,) = outputs, statement.large
            shape, dtype = self._sizes(large.shape), self._name_of(large.dtype)
            memory = f"state.pool.empty({shape}dtype={dtype})"
            if output is not None:
                memory = f"state.output({output}, [{shape}], {dtype})"
            out = overload_of(f"{statement.target.rpartition('.')[0]}.{statement.out}")
            function = CALLS_INTO_MEMORY.get(statement.target, out)
            return f"{self._name_of(function)}({', '.join([*args, f'{memory_argument(out)}={memory}'])})"
        return f"{self._name_of(CALLS.get(statement.target, target))}({', '.join(args)})"

    def _sizes(self, words: Sequence[Any]) -> str:
        return "".join(f"{self._word(word)}, " for word in words)

    def _word(self, word: Any) -> str:
        if is_constant(word):
            return self._constant(constant_of(word))
        if isinstance(word, list):
            return f"[{', '.join(map(self._word, word))}]"
        if SLOT in word:
            return f"v{int(word[SLOT])}"
        return f"state.sizes[{int(word[SIZE])}]"

    def _constant(self, value: Any) -> str:
        return repr(value) if value is None or type(value) in (bool, int) else self._name_of(value)

    def _name_of(self, value: Any) -> str:
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name


@functools.lru_cache(maxsize=4096)
def overload_of(target: str) -> OpOverload:
    """The operator with a name such as `aten.mm.default`.

    Raises:
        TypeError: no torch operator has this name.
    """
    operator: Any = torch.ops
    for part in target.split("."):
        operator = getattr(operator, part, None)
    if not isinstance(operator, OpOverload):
        raise TypeError(f"{target!r} is not the name of a torch operator")
    return operator


def _last_uses(node: TorchNode) -> dict[int, list[int]]:
    """For each statement, the slots that no later statement uses."""
    last_positions: dict[int, int] = {}
    count = len(node.inputs)
    for position, statement in enumerate(node.statements):
        for slot in _slots_of([statement.args, list(statement.kwargs.values())]):
            last_positions[slot] = position
        for slot in range(count, count + statement.results):
            last_positions[slot] = position
        count += statement.results
    slots: dict[int, list[int]] = {}
    for slot, position in last_positions.items():
        slots.setdefault(position, []).append(slot)
    return slots


def _slots_of(word: Any) -> list[int]:
    if isinstance(word, dict):
        return [int(word[SLOT])] if SLOT in word else []
    if isinstance(word, (list, tuple)):
        return [slot for part in word for slot in _slots_of(part)]
    return []


def _kernel_or_torch(operator: Operator, memory: Allocator, *args: Any, **kwargs: Any) -> Any:
    """Calls lit_ort's kernel if it supports the arguments, and torch's operator otherwise."""
    if operator.supports is not None and operator.supports(*args, **kwargs):
        return operator.kernel(memory, *args, **kwargs)
    return operator.target(*args, **kwargs)


def _draw(target: OpOverload, stream: int, device: torch.device, state: RunState, /, *args: Any, **kwargs: Any) -> Any:
    """Calls an operator that draws from torch's generator."""
    return state.random.draw(target, stream, device, *args, **kwargs)


def to_ort(value: torch.Tensor, form: str) -> torch.Tensor:
    """Convert a torch value to its representation in ONNX Runtime."""
    if not value.numel():
        # torch treats every empty tensor as contiguous, but ONNX Runtime checks its strides.
        value = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if form == AS_REAL:
        return torch.view_as_real(value.resolve_conj()).contiguous()
    # The real part of a conjugate view has a lazy negative bit, which DLPack can't represent.
    value = value.resolve_neg().contiguous()
    return value.view(torch.uint8) if form == AS_BYTES else value


def from_ort(value: torch.Tensor, form: str) -> torch.Tensor:
    """Convert a value from its representation in ONNX Runtime to torch's."""
    if form == AS_REAL:
        return torch.view_as_complex(value)
    return value.view(torch.bool) if form == AS_BYTES and value.dtype == torch.uint8 else value
