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
    # What is in front of a marker is a requirement itself.
    needed = [text.partition(";")[0].strip() for text in texts if _is_for(Requirement(text), extra)]
    if not needed:
        raise ValueError(f"extra={extra!r}: lit_ort has no extra of that name with packages.")
    return f"pip install {shlex.join(needed)}"


def _is_for(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})
