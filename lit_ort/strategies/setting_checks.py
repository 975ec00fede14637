"""Checks of a strategy's arguments, and of the settings of the Trainer that it is created with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from lit_ort._compat.lightning import own_class_of
from lit_ort.errors import OptionsError, UnsupportedError
from lit_ort.options import AUTO, BF16_MIXED, FLOAT32, NEVER, TRUE_PRECISIONS, ORTOptions, Precision

# When steps are compiled.
ALWAYS = "always"
COMPILES = (AUTO, ALWAYS, NEVER)

# The engine's precisions by those of Lightning's plugins. With a "true" precision, Lightning's plugin converts the
# module and its batches, and graphs compute in the dtypes of their tensors.
PRECISIONS: Mapping[str, Precision] = {
    BF16_MIXED: BF16_MIXED,
    **dict.fromkeys((FLOAT32, *TRUE_PRECISIONS.values()), FLOAT32),
}


def argument_names(strategy: type, shared: type) -> list[str]:
    """The names of a strategy's arguments: those of its own, and those of the TypedDict of the shared ones."""
    parameters = inspect.signature(strategy).parameters.values()
    own = [parameter.name for parameter in parameters if parameter.kind != inspect.Parameter.VAR_KEYWORD]
    return [*own, *shared.__annotations__]


def require_compile(value: str) -> str:
    """Returns when steps are compiled; raises OptionsError for another value."""
    if value not in COMPILES:
        raise OptionsError(f"compile={value!r} is not one of {COMPILES}. Choose one of them.")
    return value


def asks_for_graphs(options: ORTOptions) -> bool:
    """Whether options are about compiled steps alone, so that a step in eager would leave something undone."""
    is_strict = options.fallback == "error"
    has_own_memory = options.optimizer_in_graph or options.recompute is not None
    return is_strict or has_own_memory or options.verifies or options.dump_dir is not None


def require_accelerator(accelerator: Any, strategy: str, supported: tuple[str, ...]) -> None:
    """Raises UnsupportedError for an accelerator of Lightning's whose class has none of the supported names."""
    if accelerator is not None and own_class_of(accelerator).__name__ not in supported:
        raise UnsupportedError(
            f"accelerator is {type(accelerator).__name__}, but strategy={strategy!r} supports "
            f"{' and '.join(supported)}. Use Trainer(accelerator='cpu', strategy={strategy!r}), "
            "or Lightning's own strategies on this accelerator."
        )


def require_precision(precision: str, strategy: str) -> None:
    """Raises UnsupportedError for a precision of Lightning's that the engine doesn't have."""
    if precision == "16-mixed":
        raise UnsupportedError(
            f"precision='16-mixed' with strategy={strategy!r}: its GradScaler scales the loss, but a run "
            "has computed the gradients by then. Use 'bf16-mixed', which needs no scaling."
        )
    if precision not in PRECISIONS:
        raise UnsupportedError(
            f"precision={precision!r} is not supported by strategy={strategy!r}. Use one of "
            f"{', '.join(PRECISIONS)}, or Lightning's own strategies with this precision."
        )
