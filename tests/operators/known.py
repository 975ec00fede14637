"""The operators of torch's database that run in eager with some of their samples, and why."""

from __future__ import annotations

_STRIDES = "reads an input by its strides"
_VALUES = "its sizes are values of a tensor"

# By name, as `tests.operators.op_db` spells it.
FALLBACKS: dict[str, str] = {
    "as_strided": _STRIDES,
    "as_strided.partial_views": _STRIDES,
    "as_strided_copy": _STRIDES,
    "as_strided_scatter": _STRIDES,
    "hash_tensor": "sessions have no uint64",
    "index_fill": "the gradient of a tensor that fills has a size that depends on values",
    "narrow": _VALUES,
    "nn.functional.multilabel_margin_loss": "torch's own trace of it gives other numbers (torch 2.13)",
    "tensor_split": _VALUES,
    "view_as_complex": "returned beside its input, whose memory it shares as another type",
}


def page() -> str:
    """The lines of docs/support.md on them."""
    rows = "\n".join(f"| `{name}` | {reason} |" for name, reason in FALLBACKS.items())
    return f"| operator | reason |\n|---|---|\n{rows}"
