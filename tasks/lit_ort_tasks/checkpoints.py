"""Whether a checkpoint is of the task, the shapes and the optimizer that a run has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_ort_tasks.errors import InputError

# Beside Lightning's own keys of a checkpoint.
ORIGIN = "lit_ort_task"


def origin_of(task: Any, optimizer: str) -> dict[str, str]:
    """What a checkpoint says of where it is from."""
    return {"task": type(task).__name__, "optimizer": optimizer}


def require_same_origin(task: Any, optimizer: str, checkpoint: Mapping[str, Any], *, is_whole: bool) -> None:
    """Refuses a checkpoint that a run can't go on from.

    Args:
        task: the module of the run, with its hyperparameters.
        optimizer: the name of its optimizer's class.
        checkpoint: one of Lightning's; one from before this check, or of another program, is looked at by its shapes.
        is_whole: whether the module has all parameters, in their whole shapes.

    Raises:
        InputError: it is of another task, of other figures, or of another optimizer.
    """
    saved = checkpoint.get(ORIGIN, {})
    own = origin_of(task, optimizer)
    if saved.get("task", own["task"]) != own["task"]:
        raise InputError(f"The checkpoint is one of {saved['task']}, and this run trains {own['task']}. {_REMEDY}")
    there, here = checkpoint.get("hyper_parameters", {}), dict(task.hparams)
    other = {name: (there[name], here[name]) for name in here if name in there and there[name] != here[name]}
    if other:
        listed = ", ".join(f"task.{name}={a} there and {b} here" for name, (a, b) in other.items())
        raise InputError(f"The checkpoint is of another model: {listed}. {_REMEDY}")
    if is_whole:
        _require_shapes(task, checkpoint)
    if saved.get("optimizer", own["optimizer"]) != own["optimizer"]:
        raise InputError(
            f"The checkpoint has the state of {saved['optimizer']}, and this run's optimizer is {own['optimizer']}. "
            "Resume with the optimizer it was made with, or begin anew from its weights."
        )


_REMEDY = "Resume with the task and figures that it was made with."


def _require_shapes(task: Any, checkpoint: Mapping[str, Any]) -> None:
    saved = checkpoint.get("state_dict")
    if not isinstance(saved, Mapping):
        raise InputError("The checkpoint has no weights (state_dict). Give one that a run of Lightning's saved.")
    own = task.state_dict()
    shared = own.keys() & saved.keys()
    for name in sorted(shared):
        if own[name].shape != saved[name].shape:
            there, here = tuple(saved[name].shape), tuple(own[name].shape)
            raise InputError(
                f"The checkpoint is of another model: {name} has the shape {there} there and {here} here. {_REMEDY}"
            )
    if own and not shared:
        raise InputError(
            f"The checkpoint is of another model: {type(task).__name__} has none of its {len(saved)} weights. {_REMEDY}"
        )
