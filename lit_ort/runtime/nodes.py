"""Torch nodes as functions: operators and constant arguments are resolved once, when a session is made."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lit_ort._compat.devices import CPU, is_cpu
from lit_ort._compat.torch_ops import OpOverload, memory_argument, returns_list
from lit_ort.ops import OPERATORS
from lit_ort.ops.operator import Memory, Operator
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.calls import CALLS, CALLS_INTO_MEMORY
from lit_ort.runtime.program import AS_BYTES, AS_REAL, Statement, TorchNode
from lit_ort.runtime.random import seeded
from lit_ort.runtime.words import SIZE, SLOT, constant_of, is_constant


@dataclasses.dataclass(frozen=True)
class RunState:
    """What the torch nodes of one run need to know.

    Args:
        pool: memory for results on the CPU, and for what ONNX Runtime asks for.
        sizes: the values of the phase's terms.
        seed: of the run's random streams.
    """

    pool: BufferPool
    sizes: Sequence[int] = ()
    seed: int = 0


NodeFunction = Callable[..., Sequence[torch.Tensor]]
# What tracebacks call the source of a node.
_FILE = "<torch node>"
# Functions that belong to a strategy, such as the optimizer's, by the name of their operator.
Hooks = Mapping[str, Callable[..., Any]]


def bind(node: TorchNode, hooks: Hooks, device: torch.device = CPU) -> NodeFunction:
    """Makes a node's function: from the run's state and its inputs to its outputs, as they cross the border.

    Args:
        hooks: what takes the place of operators that this process implements otherwise, by target.
        device: where it computes; the project's own kernels are the CPU's.
    """
    source = _Source(len(node.inputs), device)
    for position, form in enumerate(node.inputs):
        source.take(position, form)
    last_uses = _last_uses(node)
    for position, statement in enumerate(node.statements):
        source.statement(statement, hooks)
        source.drop(slot for slot in last_uses.get(position, ()) if slot not in node.outputs)
    source.give(node.outputs, node.forms)
    return source.function()


def failed_statement(node: TorchNode, error: BaseException) -> Statement | None:
    """The statement of a node that raised an error, or None where it was none of them."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != _FILE:
        frame = frame.tb_next
    # The first line is the function's head, and the next ones take inputs that cross the border in another form.
    position = -1 if frame is None else frame.tb_lineno - 2 - sum(bool(form) for form in node.inputs)
    return node.statements[position] if 0 <= position < len(node.statements) else None


class _Source:
    """Python source of one node: names of slots and of constants are all that it is made of.

    Each statement is one line, which is how an error tells where it came from.
    """

    def __init__(self, inputs: int, device: torch.device) -> None:
        self._device = device
        self._names: dict[str, Any] = {"from_border": from_border, "to_border": to_border}
        arguments = ", ".join(f"v{k}" for k in range(inputs))
        self._lines = [f"def node(state{', ' if inputs else ''}{arguments}):"]
        self._slots = inputs

    def take(self, position: int, form: str) -> None:
        if form:
            self._add(f"v{position} = from_border(v{position}, {self._named(form)})")

    def statement(self, statement: Statement, hooks: Hooks) -> None:
        call = self._call(statement, hooks)
        slots = [f"v{self._slots + k}" for k in range(statement.results)]
        self._slots += statement.results
        is_list = len(slots) > 1 or (statement.target not in hooks and returns_list(overload_of(statement.target)))
        self._add(f"{', '.join(slots)}{',' if is_list else ''} = {call}" if slots else call)

    def drop(self, slots: Any) -> None:
        dropped = [f"v{slot}" for slot in sorted(slots)]
        if dropped:
            self._lines[-1] += f"; del {', '.join(dropped)}"

    def give(self, outputs: Sequence[int], forms: Sequence[str]) -> None:
        given = [f"to_border(v{k}, {self._named(form)})" for k, form in zip(outputs, forms, strict=True)]
        self._add(f"return [{', '.join(given)}]")

    def function(self) -> NodeFunction:
        exec(compile("\n".join(self._lines), _FILE, "exec"), self._names)
        return self._names["node"]

    def _add(self, line: str) -> None:
        self._lines.append(f"    {line}")

    def _call(self, statement: Statement, hooks: Hooks) -> str:
        args = [self._word(word) for word in statement.args]
        args += [f"{name}={self._word(word)}" for name, word in statement.kwargs.items() if name.isidentifier()]
        hook = hooks.get(statement.target)
        if hook is not None:
            return f"{self._named(hook)}({', '.join(['state', *args])})"
        target = overload_of(statement.target)
        own = OPERATORS.get(target) if is_cpu(self._device) else None
        if statement.stream is not None:
            drawn = functools.partial(_drawn, target, statement.stream, self._device)
            return f"{self._named(drawn)}({', '.join(['state', *args])})"
        if own is not None:
            kernel = own.kernel if own.supports is None else functools.partial(_supported, own)
            return f"{self._named(kernel)}({', '.join(['state.pool', *args])})"
        if statement.out is not None:
            shape = ", ".join(self._word(word) for word in statement.shape)
            memory = f"state.pool.empty({shape + ', ' if shape else ''}dtype={self._named(statement.dtype)})"
            out = overload_of(f"{statement.target.rpartition('.')[0]}.{statement.out}")
            function = CALLS_INTO_MEMORY.get(statement.target, out)
            return f"{self._named(function)}({', '.join([*args, f'{memory_argument(out)}={memory}'])})"
        return f"{self._named(CALLS.get(statement.target, target))}({', '.join(args)})"

    def _word(self, word: Any) -> str:
        if is_constant(word):
            return self._constant(constant_of(word))
        if isinstance(word, list):
            return f"[{', '.join(map(self._word, word))}]"
        if SLOT in word:
            return f"v{int(word[SLOT])}"
        return f"state.sizes[{int(word[SIZE])}]"

    def _constant(self, value: Any) -> str:
        return repr(value) if value is None or type(value) in (bool, int) else self._named(value)

    def _named(self, value: Any) -> str:
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name


@functools.lru_cache(maxsize=4096)
def overload_of(target: str) -> OpOverload:
    """The operator of a name such as `aten.mm.default`.

    Raises:
        TypeError: there is none, or it is no operator.
    """
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, OpOverload):
        raise TypeError(f"{target!r} is not the name of a torch operator")
    return found


def _last_uses(node: TorchNode) -> dict[int, list[int]]:
    """For each statement, the slots that no later one uses."""
    last: dict[int, int] = {}
    slot = len(node.inputs)
    for position, statement in enumerate(node.statements):
        for used in _slots_of([statement.args, list(statement.kwargs.values())]):
            last[used] = position
        for defined in range(slot, slot + statement.results):
            last[defined] = position
        slot += statement.results
    uses: dict[int, list[int]] = {}
    for used, position in last.items():
        uses.setdefault(position, []).append(used)
    return uses


def _slots_of(word: Any) -> list[int]:
    if isinstance(word, dict):
        return [int(word[SLOT])] if SLOT in word else []
    if isinstance(word, (list, tuple)):
        return [slot for part in word for slot in _slots_of(part)]
    return []


def _supported(own: Operator, memory: Memory, *args: Any, **kwargs: Any) -> Any:
    """The project's kernel where it computes a call, torch's elsewhere."""
    if own.supports is not None and own.supports(*args, **kwargs):
        return own.kernel(memory, *args, **kwargs)
    return own.target(*args, **kwargs)


def _drawn(target: OpOverload, stream: int, device: torch.device, state: RunState, /, *args: Any, **kwargs: Any) -> Any:
    """An operator that draws from torch's generator, as a function of the run's seed and its own stream."""
    with seeded(state.seed, stream, device):
        return target(*args, **kwargs)


def to_border(value: torch.Tensor, form: str) -> torch.Tensor:
    """A value as ONNX Runtime takes it."""
    if not value.numel():
        # torch calls every empty tensor contiguous, and ONNX Runtime looks at its strides.
        value = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if form == AS_REAL:
        return torch.view_as_real(value.resolve_conj()).contiguous()
    # The real part of a conjugate carries a lazy minus sign, which DLPack has no place for.
    value = value.resolve_neg().contiguous()
    return value.view(torch.uint8) if form == AS_BYTES else value


def from_border(value: torch.Tensor, form: str) -> torch.Tensor:
    """A value as torch takes it."""
    if form == AS_REAL:
        return torch.view_as_complex(value)
    return value.view(torch.bool) if form == AS_BYTES and value.dtype == torch.uint8 else value
