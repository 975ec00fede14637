"""What an extra of this package needs, and how to install it."""

from __future__ import annotations

import importlib.metadata
import shlex

from packaging.requirements import Requirement


def install_command(extra: str) -> str:
    """The command that installs the packages of an extra, which doesn't depend on where lit_ort was installed from.

    Raises:
        ValueError: lit_ort has no such extra.
    """
    return f"pip install {shlex.join(_needed(extra))}"


def is_installed(extra: str) -> bool:
    """Whether all packages of an extra are installed, whatever their versions.

    Raises:
        ValueError: lit_ort has no such extra.
    """
    return all(map(_is_there, (Requirement(text).name for text in _needed(extra))))


def _needed(extra: str) -> list[str]:
    texts = importlib.metadata.requires("lit_ort") or []
    # What is in front of a marker is a requirement itself.
    needed = [text.partition(";")[0].strip() for text in texts if _is_for(Requirement(text), extra)]
    if not needed:
        raise ValueError(f"extra={extra!r}: lit_ort has no extra of that name with packages.")
    return needed


def _is_there(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _is_for(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})
