"""The error of the user's values and files, which ends a run with its message and without a traceback."""

from __future__ import annotations


class InputError(ValueError):
    """A value or a file from the user that cannot be used.

    Its message is all that the user sees: the offending value, the rule and the remedy.
    """


def require(condition: bool, message: str) -> None:
    """Raises `InputError(message)` unless `condition` is true."""
    if not condition:
        raise InputError(message)


def require_whole(group: str, least: int = 1, /, **options: object) -> None:
    """Raises InputError for the first of a group's options that is not a whole number of at least `least`."""
    for name, value in options.items():
        require(
            isinstance(value, int) and not isinstance(value, bool) and value >= least,
            f"{group}.{name}={value!r}: must be a whole number of at least {least}. Give one, or leave it out.",
        )


def require_heads(group: str, width: int, heads: int) -> None:
    """Raises InputError for a width that the number of heads doesn't divide.

    Args:
        group: of the configuration, such as "task".
    """
    require(
        width % heads == 0,
        f"{group}.width={width}: not divisible by {group}.heads={heads}. Each head has an equal part of the width: "
        f"try {group}.width={-(-width // heads) * heads}.",
    )
