"""Makes Dynamo trace the classifiers of the transformers library once.

At its first call, such a model derives `config.problem_type` from the labels and writes it. By default Dynamo makes
the write behind the graph, and its guard, that the type is None, fails at the next call. Here the write is made at
once, and the trace begins anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._dynamo.exc import UnspecializeRestartAnalysis

from lit_ort._compat.deferred_calls import replace_instructions

_NAME = "problem_type"


def keep_problem_types(is_enabled: Callable[[], bool]) -> None:
    """Puts the hook into Dynamo, for the rest of the process.

    Args:
        is_enabled: whether writes are made in the trace at hand.
    """
    replace_instructions({"STORE_ATTR"}, functools.partial(_store, is_enabled))


def _store(is_enabled: Callable[[], bool], original: Any, tx: Any, inst: Any) -> None:
    if is_enabled() and inst.argval == _NAME:
        value, config = tx.stack[-2], getattr(tx.stack[-1].realize(), "value", None)
        if value.is_python_constant() and _is_config(config) and getattr(config, _NAME, "") is None:
            setattr(config, _NAME, value.as_python_constant())
            raise UnspecializeRestartAnalysis(restart_reason=f"{_NAME} is written")
    original(tx, inst)


def _is_config(value: Any) -> bool:
    return any(cls.__module__ == "transformers.configuration_utils" for cls in type(value).__mro__)
