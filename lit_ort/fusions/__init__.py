"""Fusions: patterns of the captured graph that become one operator, before the backward is added."""
