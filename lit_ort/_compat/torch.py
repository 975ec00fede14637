"""Private interfaces of torch: DLPack without checks, autograd's state, what Dynamo writes into graphs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _autograd, _from_dlpack, _to_dlpack
from torch.amp import autocast_mode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# As Dynamo writes the borders of an autocast region.
enter_autocast: Any = autocast_mode._enter_autocast
exit_autocast: Any = autocast_mode._exit_autocast
# As it writes `no_grad` and `enable_grad`.
set_grad_enabled: Any = torch._C._set_grad_enabled
# As it writes `tensor.data`.
data_of: Any = _autograd._get_data_attr  # pyright: ignore[reportAttributeAccessIssue] - not in the stubs
# torch's note that one of its modules is used, which Dynamo leaves in graphs.
log_api_usage: Any = torch._C._log_api_usage_once

# Without the checks and the stream handling of torch.utils.dlpack, which cost more than the conversion.
from_dlpack: Any = _from_dlpack
to_dlpack: Any = _to_dlpack

# How often a tensor was changed in place, as autograd counts it.
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


def keeps_graph() -> bool:
    """Whether the backward in progress was called with `retain_graph=True`."""
    return _autograd._get_current_graph_task_keep_graph()


def memory_of(tensor: torch.Tensor) -> int:
    """A number that tensors in the same memory share, fake ones too."""
    return tensor.untyped_storage()._cdata


def owners_of_memory(tensor: torch.Tensor) -> int:
    """How many tensors and Python objects hold a tensor's memory; one for a tensor that nothing shares it with."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1
