"""The version of this package, which pyproject.toml reads."""

__version__ = "0.2.0"
