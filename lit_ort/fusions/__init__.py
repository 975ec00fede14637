"""Patterns of the forward that become one operator of the project's own, before the backward is added."""
