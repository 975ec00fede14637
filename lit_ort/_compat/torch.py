"""Private interfaces of torch: DLPack without checks, autograd's state, functions that Dynamo writes into graphs."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch._C import (
    _autograd,
    _from_dlpack,
    _functorch,  # pyright: ignore[reportAttributeAccessIssue] - not in the stubs
    _to_dlpack,
)
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.amp import autocast_mode
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from lit_ort._compat.patching import replaced

# Dynamo's nodes at the start and the end of an autocast region.
enter_autocast: Any = autocast_mode._enter_autocast
exit_autocast: Any = autocast_mode._exit_autocast
# Dynamo's node for `no_grad` and `enable_grad`.
set_grad_enabled: Any = torch._C._set_grad_enabled
# Dynamo's node for `tensor.data`.
data_of: Any = _autograd._get_data_attr  # pyright: ignore[reportAttributeAccessIssue] - not in the stubs
# A call by which torch logs the use of its modules. Dynamo keeps it in graphs.
log_api_usage: Any = torch._C._log_api_usage_once

# Without the checks and the stream handling of torch.utils.dlpack, which take longer than the conversion.
from_dlpack: Any = _from_dlpack
to_dlpack: Any = _to_dlpack

_add_batch_dim: Any = torch._add_batch_dim  # pyright: ignore[reportPrivateImportUsage] - vmap of autograd.grad
_remove_batch_dim: Any = torch._remove_batch_dim  # pyright: ignore[reportPrivateImportUsage] - vmap of autograd.grad

_functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active

# Autograd's version counter: the number of in-place changes of a tensor.
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


def versions_of(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """The version counters; 0 for tensors made in inference mode, which have none."""
    return tuple([0 if tensor.is_inference() else tensor._version for tensor in tensors])


is_view: Callable[[torch.Tensor], bool] = operator.methodcaller("_is_view")


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The `apply` of a function without `setup_context`, without the look at its signature and at functorch's wrappers.

    That look takes a third of the call's time.
    """
    direct = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def apply(*arguments: Any) -> Any:
        return (function.apply if _functorch_is_active() else direct)(*arguments)

    return apply


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps Dynamo from tracing what a function calls; `torch.compiler.disable` without its looks at exports."""

    @functools.wraps(function)
    def called(*arguments: Any) -> Any:
        before = set_eval_frame(None)
        try:
            return function(*arguments)
        finally:
            set_eval_frame(before)

    return called


def keeps_graph() -> bool:
    """Whether the backward in progress was called with `retain_graph=True`."""
    return _autograd._get_current_graph_task_keep_graph()


def backward_in_progress() -> int:
    """The number of the backward in progress in this thread; -1 outside of one."""
    return torch._C._current_graph_task_id()


@contextmanager
def seen_inside(names: Collection[str]) -> Iterator[None]:
    """Lets a TorchFunctionMode see what Python functions of torch.nn.functional call.

    By default it sees these functions instead, and runs them without itself.

    Args:
        names: functions that the mode still sees themselves. One that is chosen by the value of an argument, such as
            `adaptive_max_pool2d` by `return_indices`, has an underscore in front.
    """

    def is_seen(*_: Any) -> bool:
        return torch._C._is_torch_function_mode_enabled() and sys._getframe(1).f_code.co_name.lstrip("_") in names

    with ExitStack() as stack:
        for check in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
            stack.enter_context(replaced(functional, check, is_seen))
        yield


@contextmanager
def unhooked() -> Iterator[None]:
    """Keeps autograd's hooks on saved tensors (`saved_tensors_hooks`) from running while the block traces a graph."""
    hooks: Any = _autograd
    before = hooks._saved_tensors_hooks_set_tracing(True)
    try:
        yield
    finally:
        hooks._saved_tensors_hooks_set_tracing(before)


def have_tangents(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether forward-mode differentiation is in progress and one of the tensors has a tangent."""
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


class GradientBatch(NamedTuple):
    """Gradients of `torch.autograd.grad(..., is_grads_batched=True)`.

    Args:
        level: of torch's vmap.
        rows: the gradients for each row of the batch; None where no gradient arrived.
    """

    level: int
    rows: list[tuple[torch.Tensor | None, ...]]

    def stacked(self, rows: Sequence[Sequence[torch.Tensor | None]]) -> tuple[torch.Tensor | None, ...]:
        """One batched tensor for each column of `rows`."""
        columns = zip(*rows, strict=True)
        return tuple(None if column[0] is None else self._batched(column) for column in columns)

    def _batched(self, column: Sequence[Any]) -> torch.Tensor:
        return _add_batch_dim(torch.stack(list(column)), 0, self.level)


def is_batched(gradient: torch.Tensor) -> bool:
    """Whether a tensor is a batch of gradients, under `is_grads_batched=True`."""
    return _functorch.is_legacy_batchedtensor(gradient)


def batch_of(gradients: Sequence[torch.Tensor | None]) -> GradientBatch | None:
    """The rows of batched gradients; None if no gradient is batched."""
    batched = [k for k, g in enumerate(gradients) if g is not None and is_batched(g)]
    if not batched:
        return None
    # The level of the vmap in progress can only be read by entering another one.
    torch._C._vmapmode_increment_nesting()
    level = torch._C._vmapmode_decrement_nesting()
    columns: list[Any] = list(gradients)
    for k in batched:
        # The batch size is used only for tensors without this level.
        columns[k] = _remove_batch_dim(columns[k], level, 1, 0)
    rows = range(len(columns[batched[0]]))
    return GradientBatch(level, [tuple(c[row] if k in batched else c for k, c in enumerate(columns)) for row in rows])


def memory_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, also of a fake tensor's: equal for tensors that share their memory."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()._cdata


def owners_of_memory(tensor: torch.Tensor) -> int:
    """The number of references to a tensor's storage; one if no other tensor shares the memory."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1
