"""Where a session finds each input: declared where the input is added to a graph, and carried by every later stage."""

from __future__ import annotations

from torch import fx

from lit_ort._compat.torch_fx import inputs_of
from lit_ort.runtime.program import Source

# The key in the metadata of an input for its `Source`.
SOURCE = "lit_ort_source"
# The source of the seed of a run, int64[].
SEED = Source("seed")


def declare_tensors(graph: fx.Graph) -> None:
    """Declares the inputs of a graph, in order, as the tensors of a call."""
    for position, node in enumerate(inputs_of(graph)):
        node.meta[SOURCE] = Source("tensor", position)
