"""Private interfaces of Fabric: the hooks with which it checks that a script calls `fabric.backward`."""

from __future__ import annotations

import sys
from typing import Any

import torch

from lit_ort._compat.imports import when_imported

_WRAPPERS = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")


def keep_backward_checks(reason: str) -> None:
    """Makes Dynamo compile a module of Fabric's with mixed precision, in a process that imports Fabric now or later.

    With a precision or a strategy that needs `fabric.backward`, Fabric adds a hook to each output that raises an error
    during any other backward. Dynamo traces the hook as if it were called, meets the error, and leaves the module's
    function in eager (Lightning 2.6, torch 2.13). Here the hook is added outside of graphs. Other hooks check nothing,
    and a graph does without them.

    Args:
        reason: of the graph break, in reports.
    """
    for module in _WRAPPERS:
        when_imported(module, lambda module=module: _keep(sys.modules[module], reason))


def _keep(wrappers: Any, reason: str) -> None:
    if not hasattr(wrappers._FabricModule, "_register_backward_hook"):
        # Fabric before 2.3 checks nothing.
        return
    is_overridden, strategy, precision = wrappers.is_overridden, wrappers.Strategy, wrappers.Precision
    register: Any = wrappers._FabricModule._register_backward_hook
    register_outside: Any = torch.compiler.disable(register, reason=reason)

    def register_backward_hook(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            return register(self, tensor)
        methods = ("pre_backward", "backward", "post_backward")
        checks = is_overridden("backward", self._strategy, parent=strategy) or any(
            is_overridden(method, self._strategy.precision, parent=precision) for method in methods
        )
        return register_outside(self, tensor) if checks else tensor

    wrappers._FabricModule._register_backward_hook = register_backward_hook
