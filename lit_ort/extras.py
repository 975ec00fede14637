"""How to install what an extra of this package needs."""

from __future__ import annotations

import importlib.metadata
import shlex

from packaging.requirements import Requirement


def install_command(extra: str) -> str:
    """The command that installs the packages of an extra, which doesn't depend on where lit_ort was installed from.

    Raises:
        ValueError: lit_ort has no such extra.
    """
    texts = importlib.metadata.requires("lit_ort") or []
    needed = [one for one in map(Requirement, texts) if one.marker is not None and _is_for(one, extra)]
    if not needed:
        raise ValueError(f"extra={extra!r}: lit_ort has no extra of that name with packages.")
    return f"pip install {shlex.join(f'{one.name}{one.specifier}' for one in needed)}"


def _is_for(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})
