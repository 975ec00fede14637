"""Private interfaces of Lightning: the collection of logged results, into which a repeated call of `log` goes directly.

`LightningModule.log` takes 150 to 250 µs a call, most of it for checks of its arguments and for a description of the
result, which is compared with that of the first call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lit_ort._compat.lightning import base_with_log


class RepeatedLogs:
    """Logs as a LightningModule does. A call that repeats an earlier one, but for its value, isn't checked again.

    Args:
        module: the LightningModule.

    Attributes:
        base: the class whose `log` is Lightning's. That of a class below calls it.
    """

    def __init__(self, module: Any) -> None:
        self._module, self.base = module, base_with_log(module)
        # By the arguments but for the value: the key of the result, and the result.
        self._known: dict[Any, tuple[str, Any]] = {}

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """As `LightningModule.log`, whose own implementation is called for what is new."""
        module = self._module
        trainer: Any = module._trainer
        results: Any = getattr(trainer, "_results", None)
        function = module._current_fx_name
        if results is None or not _is_simple(value, args, kwargs):
            self._log_as_lightning(name, value, *args, **kwargs)
            return
        call = (function, results.dataloader_idx, name, type(value), tuple(kwargs.items()))
        known = self._known.get(call)
        if (
            known is None
            or results.get(known[0]) is not known[1]
            or trainer._logger_connector.should_reset_tensors(function)
        ):
            self._log_as_lightning(name, value, **kwargs)
            self._note(call, results, kwargs)
            return
        result = known[1]
        tensor = value.detach() if isinstance(value, Tensor) else _tensor_of(value, result)
        if tensor.numel() != 1 or tensor.device != result.value.device:
            self._log_as_lightning(name, value, **kwargs)
            return
        size = results._extract_batch_size(result, kwargs.get("batch_size"), result.meta)
        result.forward(tensor.squeeze(), size)
        result.has_reset = False

    @property
    def _log_as_lightning(self) -> Callable[..., None]:
        # The module's attribute can be this object's method while a step runs, and its class can have one of its own.
        return self.base.log.__get__(self._module)

    def _note(self, call: Any, results: Any, kwargs: dict[str, Any]) -> None:
        function, dataloader, name, *_ = call
        with_index = kwargs.get("add_dataloader_idx", True) and dataloader is not None
        key = f"{function}.{name}.{dataloader}" if with_index else f"{function}.{name}"
        result = results.get(key)
        if result is not None and result.is_tensor and not result.meta.enable_graph:
            self._known[call] = key, result


# Of keyword arguments that are compared by their values. Others, such as functions, are compared by Lightning.
_COMPARABLE = (bool, int, str, type(None))


def _is_simple(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if args or type(value) not in (Tensor, float, int):
        return False
    return all(type(argument) in _COMPARABLE for argument in kwargs.values())


def _tensor_of(value: float, result: Any) -> Tensor:
    # As Lightning, whatever the default dtype of a 16-bit precision.
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    return torch.tensor(value, device=result.value.device, dtype=dtype)
