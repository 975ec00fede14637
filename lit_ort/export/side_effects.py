"""What a step leaves in its module beside parameters and buffers: lists that grow, counters, states of metrics."""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Those that a call of the step with other tensors replaces.
_STATE = ("_parameters", "_buffers")
# Of any module.
_OF_MODULES = frozenset(vars(nn.Module()))


@contextlib.contextmanager
def undone(module: nn.Module) -> Iterator[None]:
    """Undoes afterwards what the block changes in the attributes of a module, and in the objects that they hold.

    Tensors among them, other than parameters and buffers, are copies in the block, which can write into them.
    """
    state = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    contents = [(container, _content_of(container)) for container in _containers_in(module)]
    try:
        for container, content in contents:
            _set(container, [_copied(value, state) for value in content])
        yield
    finally:
        for container, content in contents:
            _set(container, content)


def changed_attributes(before: nn.Module, after: nn.Module) -> tuple[str, ...]:
    """The names of attributes, other than parameters and buffers, that differ between two copies of a module."""
    return tuple(
        f"{prefix}.{name}" if prefix else name
        for (prefix, part), other in zip(before.named_modules(), after.modules(), strict=True)
        for name, value in vars(other).items()
        if name not in _OF_MODULES and _differ(getattr(part, name, None), value, set())
    )


def _differ(a: Any, b: Any, seen: set[int]) -> bool:
    if id(a) in seen or isinstance(a, nn.Module):
        return False
    seen.add(id(a))
    if type(a) is not type(b):
        return True
    if isinstance(a, Tensor):
        return not torch.equal(a, b)
    if isinstance(a, (bool, int, float, str)):
        return a != b
    if isinstance(a, (list, tuple, deque)):
        return len(a) != len(b) or any(_differ(x, y, seen) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) != list(b) or any(_differ(x, y, seen) for x, y in zip(a.values(), b.values(), strict=True))
    return _has_own_attributes(a) and _differ(vars(a), vars(b), seen)


def _containers_in(module: nn.Module) -> list[Any]:
    """The lists, dictionaries, sets, queues and dictionaries of attributes that are reached from a module."""
    found: dict[int, Any] = {}
    rest: list[Any] = [vars(module)]
    while rest:
        value = rest.pop()
        if isinstance(value, (tuple, frozenset)):
            rest.extend(value)
        elif id(value) in found or isinstance(value, (Tensor, type)):
            continue
        elif isinstance(value, dict):
            found[id(value)] = value
            rest.extend(part for name, part in value.items() if name not in _STATE)
        elif isinstance(value, (list, set, deque)):
            found[id(value)] = value
            rest.extend(value)
        elif _has_own_attributes(value):
            rest.append(vars(value))
    return list(found.values())


def _has_own_attributes(value: Any) -> bool:
    """Whether a copy of an object is one of its attributes, unlike that of a logger or of a Python module."""
    kind: Any = type(value)
    is_plain = kind.__reduce__ is object.__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__
    return is_plain and not inspect.isroutine(value) and isinstance(getattr(value, "__dict__", None), dict)


def _content_of(container: Any) -> list[Any]:
    """The values of a container, or the keys and values of a dictionary."""
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def _copied(value: Any, state: Collection[int]) -> Any:
    is_copied = isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and id(value) not in state
    # Writes into another copy would not be traced.
    return torch.ops.aten.lift_fresh_copy.default(value.detach()) if is_copied else value


def _set(container: Any, content: Sequence[Any]) -> None:
    own = _content_of(container)
    if len(own) == len(content) and all(a is b for a, b in zip(own, content, strict=True)):
        return
    container.clear()
    if isinstance(container, dict):
        middle = len(content) // 2
        container.update(zip(content[:middle], content[middle:], strict=True))
    elif isinstance(container, set):
        container.update(content)
    else:
        container.extend(content)
