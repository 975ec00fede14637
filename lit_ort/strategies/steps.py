"""Runs the step methods of a LightningModule compiled, without changing the module.

Everything here works on both of Lightning's packages, `lightning.pytorch` and `pytorch_lightning`, which have classes
of the same names and no common base.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lit_ort.backend.steps import LogRecorder, dynamo_settings

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class CompiledSteps:
    """The step methods of one module, each compiled at its first call.

    Args:
        module: the LightningModule; it is left as it is, but for its `log` during a step.
        backend_of: the Dynamo backend for a step's name.
        fail_on_recompile_limit: raise when a step was compiled `RECOMPILE_LIMIT` times, instead of running it in eager
            from then on with a warning.
    """

    def __init__(
        self, module: Any, backend_of: Callable[[str], Callable[..., Any] | str], fail_on_recompile_limit: bool
    ) -> None:
        self._module = module
        self._backend_of = backend_of
        self._fail = fail_on_recompile_limit
        self._recorder = LogRecorder()
        self._compiled: dict[str, Callable[..., Any]] = {}

    def run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a step; what it logs reaches Lightning after the graph has run, in the same order.

        Raises:
            CaptureError: under `fail_on_recompile_limit`, the step needs a new graph at nearly every call.
        """
        step = self._compiled.get(name)
        if step is None:
            step = torch.compile(getattr(self._module, name), backend=self._backend_of(name))
            self._compiled[name] = step
        with dynamo_settings(name, self._fail), self._recorder.attached(self._module):
            result = step(*args, **kwargs)
        self._recorder.replay(self._module)
        return result
