"""The compiled steps of a kind of module, which strategies of one process hand on.

A search or a backtest trains many modules of one class. Dynamo's code belongs to the functions of the class and is
valid for each module that meets its guards, if the backend is the same object: so the backends and their sessions
outlive a fit, and the next strategy with equal options takes them.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from lit_ort._compat.dynamo_events import forget, has_code
from lit_ort.backend.backend import ORTBackend
from lit_ort.backend.explanation import CompileLog, Records
from lit_ort.options import ORTOptions
from lit_ort.runtime.buffers import BufferPool
from lit_ort.runtime.parameter_updates import Updates
from lit_ort.strategies.old_gradients import OldGradients

# How many wait for a strategy at most: with them, sessions and Dynamo's code stay in memory.
MOST_IDLE = 4
# Code of more graphs is not handed on: torch limits how often a function is compiled.
_MOST_GRAPHS = 32
_PLAIN = frozenset({bool, int, float, str, type(None)})


class CompiledCode:
    """The backends of a strategy's steps, and what their sessions share.

    Args:
        options: the options of the engine.
        log: records what is compiled, until `attach` names another log.

    Attributes:
        ways: how steps ran whose way was settled, by their names.
        pool: memory of torch nodes.
        updates: the optimizer of `optimizer_in_graph`.
        old_gradients: are freed when a run begins.
    """

    def __init__(self, options: ORTOptions, log: CompileLog) -> None:
        self.ways: Mapping[str, str] = {}
        self.pool = BufferPool()
        self.updates = Updates(self.pool)
        self.old_gradients = OldGradients(log)
        self._options, self._log = options, log
        self._clock = log.clock
        self._records: Records | None = None
        self._backends: dict[str, ORTBackend] = {}
        weakref.finalize(self, _forget, self._backends).atexit = False

    def backend(self, step: str) -> ORTBackend:
        """The backend of a step.

        Raises:
            OptionsError, EngineError: as `ORTBackend`.
        """
        if step not in self._backends:
            self._backends[step] = ORTBackend(
                self._options, step, self._log, self.pool, self.updates, self.old_gradients.before_run
            )
        return self._backends[step]

    @property
    def count(self) -> int:
        """The number of graphs."""
        return sum(backend.count for backend in self._backends.values())

    @property
    def is_valid(self) -> bool:
        """Whether Dynamo has code for it: `torch.compiler.reset()` drops that."""
        return has_code(self._backends.values())

    def attach(self, log: CompileLog) -> None:
        """Sends records to a log, which also receives those of what was compiled before."""
        if self._records is not None:
            log.adopt(self._records)
        # Sessions keep the clock that they were made with.
        self._clock.set(log.clock)
        log.clock = self._clock
        self._log = self.old_gradients.compile_log = log
        for backend in self._backends.values():
            backend.compile_log = log

    def detach(self, ways: Mapping[str, str]) -> None:
        """Ends the use by a strategy, whose log stays as it is.

        Args:
            ways: how its steps ran whose way was settled.
        """
        self.ways = {**self.ways, **ways}
        self._records, self._log.clock = self._log.records(), dataclasses.replace(self._clock)
        self.pool.trim()
        self.attach(CompileLog())


def code_key(module: torch.nn.Module, *settings: Any) -> Hashable:
    """Equal for modules for which Dynamo's code is probably the same, and equal settings."""
    numbers = tuple((name, value) for name, value in vars(module).items() if isinstance(value, (int, float, str)))
    return type(module), description_of(module), repr(numbers), *settings


def description_of(module: torch.nn.Module) -> str:
    """The parts of a module with the types of its parameters and buffers; the same in every process."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    # Lazy parameters have no shape yet.
    shapes = [
        (name, () if is_lazy(tensor) else tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for name, tensor in tensors
    ]
    # Not `repr`, which may run code of the module that draws or raises.
    parts = [(name, _type_name(part), _settings_of(part)) for name, part in module.named_modules()]
    return f"{parts} {shapes}"


def _type_name(module: torch.nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _settings_of(module: torch.nn.Module) -> list[tuple[str, Any]]:
    """Of a layer of torch: the attributes that are plain, such as a stride and a drop probability."""
    if not type(module).__module__.startswith("torch."):
        return []
    return [
        (name, value)
        for name, value in vars(module).items()
        if name != "training" and all(type(one) in _PLAIN for one in (value if type(value) is tuple else (value,)))
    ]


class IdleCode:
    """Compiled code that no strategy uses, the latest last.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._codes: list[tuple[Hashable, CompiledCode]] = []

    def put(self, key: Hashable, code: CompiledCode) -> None:
        """Keeps code for the next strategy with an equal key, if it has graphs, and not too many."""
        if 0 < code.count <= _MOST_GRAPHS:
            with self._lock:
                self._codes = [*self._codes, (key, code)][-self._most :]

    def take(self, key: Hashable) -> CompiledCode | None:
        """The latest code with an equal key, which is then the caller's."""
        with self._lock:
            for entry in reversed(self._codes):
                if entry[0] == key and entry[1].is_valid:
                    self._codes.remove(entry)
                    return entry[1]
        return None

    def clear(self) -> None:
        """Drops all code."""
        with self._lock:
            self._codes = []


# Of the process, as Dynamo's cache of compiled code is.
IDLE = IdleCode(MOST_IDLE)


def _forget(backends: Mapping[str, Any]) -> None:
    forget(backends.values())
