"""The one error that a user can cause and that ends a run without a traceback."""

from __future__ import annotations


class InputError(ValueError):
    """A value or a file from the user that cannot be used.

    The message is all that the user sees, so it names the offending value, the rule and the remedy.
    """


def require(condition: bool, message: str) -> None:
    """Raises `InputError(message)` unless `condition` holds."""
    if not condition:
        raise InputError(message)
