"""Checks that a checkpoint has the task, the shapes and the optimizer of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_ort_tasks.errors import InputError

# A key of the checkpoint, besides Lightning's.
ORIGIN = "lit_ort_task"


def origin_of(task: Any, optimizer: str) -> dict[str, str]:
    """The description of a run that its checkpoints contain."""
    return {"task": type(task).__name__, "optimizer": optimizer}


def require_same_origin(task: Any, optimizer: str, checkpoint: Mapping[str, Any], *, is_whole: bool) -> None:
    """Refuses a checkpoint from which a run can't continue.

    Args:
        task: the module of the run, with its hyperparameters.
        optimizer: the name of its optimizer's class.
        checkpoint: one of Lightning's. Where it has no origin, as from another program, only the shapes are checked.
        is_whole: whether the module has all parameters, none of them sharded.

    Raises:
        InputError: the checkpoint has another task, other hyperparameters or another optimizer.
    """
    saved = checkpoint.get(ORIGIN, {})
    own = origin_of(task, optimizer)
    if saved.get("task", own["task"]) != own["task"]:
        raise InputError(f"The checkpoint is one of {saved['task']}, and this run trains {own['task']}. {_REMEDY}")
    there, here = checkpoint.get("hyper_parameters", {}), dict(task.hparams)
    differences = {name: (there[name], here[name]) for name in here if name in there and there[name] != here[name]}
    if differences:
        listed = ", ".join(f"task.{name}={a} there and {b} here" for name, (a, b) in differences.items())
        raise InputError(f"The checkpoint is of another model: {listed}. {_REMEDY}")
    if is_whole:
        _require_shapes(task, checkpoint)
    if saved.get("optimizer", own["optimizer"]) != own["optimizer"]:
        raise InputError(
            f"The checkpoint has the state of {saved['optimizer']}, and this run's optimizer is {own['optimizer']}. "
            "Resume with the optimizer of the checkpoint, or start a new run from its weights."
        )


_REMEDY = "Resume with the task and the values of the checkpoint."


def _require_shapes(task: Any, checkpoint: Mapping[str, Any]) -> None:
    saved = checkpoint.get("state_dict")
    if not isinstance(saved, Mapping):
        raise InputError("The checkpoint has no weights (state_dict). Give a checkpoint that Lightning saved.")
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
